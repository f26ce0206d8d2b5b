"""The contract between StateFork and a backend: read this page, write the methods, run the contract suite.

Words. A *Driver* knows one kind of environment and how the caller wants it made (its constructor took the options). A
*Live* is one running environment. A *Captured* is the driver's own note of one stored state. The snapshot tree, ids,
names, locks, timing, history and error mapping belong to `statefork.environment.Environment`; a driver never sees them.

What the Environment guarantees to a driver
- `probe` is called before anything else and its answer is believed; nothing is called if it raises.
- A `Place` is fresh: its name is random and was never used, its directory exists, is empty, belongs to this call alone
  and is removed (with all that is in it) after `Live.stop` or `Driver.discard`, or when the call raises. Resources
  outside the file system (containers, images, cgroups) are named after `place.name` and marked with `place.tree` and
  `place.home`, so that `sweep` finds them after a crash.
- On one Live, `exec` calls never overlap. `run` and the file methods may overlap with everything, in several threads.
  `capture` never overlaps with another `capture`, `suspend`, `proceed` or `stop`; it overlaps with `exec` only if the
  capabilities say `snapshot_during_exec`. `stop` may be called while an `exec` runs: that one then raises SessionDead.
- `stop` (or `halt` and `retire`, of a hasty driver) is called once for every Live that was returned, and
  nothing is called on it afterwards.
- `discard` is called once for every Captured that was returned, children before parents, when no Live made from it
  is left.
- After `start`, `attach` and `revive` the Environment calls `Live.ready` and counts it in the time; if that fails the
  new Live is stopped and the old one, if any, goes on.

What a driver owes
- All or nothing: a method that raises has removed what it made, and what it worked on is as usable as before.
- Errors are those of `statefork.errors`: HostUnsupported (with `fix=`) if a tool is missing, BuildError if the base
  could not be made (with the builder's own words), NotFound if the thing to attach to does not exist, SessionDead if
  the environment is gone, NotCapturable if something in it cannot be stored (it still runs), Unsupported, DiskFull,
  and KernelError for the rest. A message says what failed, on what, the cause and the next step. A backend's failure
  is never returned as if the user's command had printed it.
- No fixed names, no sudo, no host state changed beyond its own resources, no print, no environment variables read.

A driver whose environments outlive the process that made them says so with `durable`, and gives notes (plain JSON) of
what it made, from which another process goes on: that is how the daemon survives its own end. For the others that end
is the end of their environments, and the daemon says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from statefork.counted import Counted
from statefork.errors import ExecTimeout, KernelError, Unsupported
from statefork.files import GuestFiles
from statefork.manifest import Comparison, Manifest, read_guest_manifest
from statefork.model import Capabilities, ExecRequest, ExecResult, Mode, RunRequest, Usage

__all__ = ["Captured", "Driver", "ExecRequest", "Live", "Place", "RunRequest", "Terminal"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a driver makes one thing: an environment or a stored state."""

    name: str
    """Unique on this host, `[a-z0-9-]`, at most 40 characters: fit for a container, a directory, a VM."""
    directory: Path
    tree: str
    """The snapshot tree that it belongs to; all environments forked from one another share it."""
    home: Path
    """StateFork's state directory: resources marked with another one belong to someone else."""


@dataclass(frozen=True)
class Captured:
    """A stored state as its driver knows it. `handle` is the driver's own and opaque to everyone else."""

    handle: Any
    captured: tuple[str, ...]
    """`Capability` words that this very state holds; a subset of what the probe promised."""
    not_captured: tuple[str, ...] = ()
    """What was there and is not in it, in words for a person ("1 process", "tcp connection 10.0.0.2:80")."""
    files_bytes: Counted = Counted()
    memory_bytes: int = 0
    paused_ms: float | None = None
    processes: tuple[str, ...] = ()


class Terminal(Protocol):
    """Somebody's terminal on an environment. `run` is called once, on a thread of its own; the others at any time."""

    def run(self, draw: Callable[[bytes], None]) -> str:
        """Hand over what is to be shown until `close` (then "detached") or until the shell ends ("ended")."""
        ...

    def type(self, keys: bytes) -> None: ...
    def resize(self, rows: int, columns: int) -> None: ...
    def close(self) -> None: ...


class Live(GuestFiles, ABC):
    """One running environment with one persistent shell, which is started by the first `exec` that needs it."""

    description: str = ""
    """What a person would look for on this host: a container's name, a pid, a VM id."""
    pauses_itself: ClassVar[bool] = False
    """`suspend` frees the memory too, and is better than to capture, stop and revive."""

    @abstractmethod
    def exec(self, request: ExecRequest) -> ExecResult:
        """Evaluate a command in the persistent shell; `duration_ms` is filled in by the caller.

        The exit code and the cwd travel apart from the output: nothing that a command prints can be taken for them.
        stdout and stderr are apart. A background job that keeps them open does not delay the return. At `timeout` the
        command is ended (jobs that earlier commands left behind are not), and the shell stays, with its state.
        If the command ends the shell (`exit 3`) its code is the result, `shell_restarted` is True, and the next `exec`
        starts a fresh shell. That a shell is new after a restore without memory is said by the Environment.

        Raises: ExecTimeout with the partial result. SessionDead. KernelError.
        """

    def ready(self, timeout: float) -> None:
        """Return when it answers; the Environment calls this once after `start`, `attach` and `revive`.

        Override it where the revived shell may be in the middle of a command. Raises: KernelError, SessionDead.
        """
        try:
            self.exec(ExecRequest(b"(exit $?)", timeout=timeout))  # a shell that came back keeps its last status
        except ExecTimeout as error:
            raise KernelError(f"{self.description} came up, but its shell did not answer in {timeout:g} s") from error

    @abstractmethod
    def run(self, request: RunRequest) -> ExecResult:
        """Run a program to its end; 127 if it does not exist, 128+n if signal n ended it.

        Raises: ExecTimeout (the program and its process group are killed), SessionDead, KernelError.
        """

    @abstractmethod
    def capture(self, place: Place, mode: Mode, parent: Captured | None) -> Captured:
        """Store the present state; this Live goes on as if nothing had happened, its shell included.

        `parent` is the state that this Live came from or last stored, for those who store differences.
        `mode` is one the capabilities allow. Raises: NotCapturable, DiskFull, SessionDead, KernelError.
        """

    @abstractmethod
    def stop(self) -> None:
        """End it and free all it holds, also if half of it is gone already; what was attached is left as it is."""

    def halt(self) -> bool:
        """Of hasty drivers: True when nothing of it runs any more and nobody has to hear of that, so that `retire` can wait."""
        return False

    def retire(self) -> None:
        """`stop`, when nobody waits, on a thread of its own."""
        self.stop()

    def suspend(self) -> None:
        """Stop all processes where they are. Called where `pause_releases_memory` is False or `pauses_itself` True."""
        raise Unsupported("this backend cannot stand still; it pauses by capture and stop")

    def proceed(self) -> None:
        """Undo `suspend`."""
        raise Unsupported("this backend cannot stand still; it resumes by revive")

    def manifest(self) -> Manifest:
        """Every file with its digest, for `diff`. The default reads the whole root with the guest's own `tar`."""
        return read_guest_manifest(self.run)

    # -- more than a contract asks for: what a backend has to offer beyond it ------------------------------------------

    def follow(self, number: int, seen: tuple[int, int], request: ExecRequest) -> ExecResult:
        """Go on with a command that was started before, by another process maybe; `seen` bytes of stdout and stderr are
        known already. Of the request all but the command counts. Raises: NotFound if nothing is known of it any more."""
        raise Unsupported("this backend knows a command only while the caller that started it waits")

    def running(self) -> int | None:
        """The command in the shell, by the number that `follow` takes."""
        return None

    def signal(self, signal: int, number: int | None) -> None:
        """Send a signal to a running command, by default the one in the shell."""
        raise Unsupported("this backend cannot send signals to a command; `run` kill inside")

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the shell's terminal."""
        raise Unsupported("the shell of this backend has no terminal")

    def terminal(self, rows: int, columns: int) -> Terminal:
        raise Unsupported("this backend offers no terminal")

    def usage(self) -> Usage | None:
        """None where the backend cannot tell. Raises: SessionDead, by which its death is noticed."""
        return None

    def become(self, captured: Captured) -> None:
        """Go on as this stored state, for whoever knows this Live by its own name: also where it was attached to."""
        raise Unsupported("what was attached to on this backend cannot become another state; fork or export that instead")

    def note(self) -> Mapping[str, Any]:
        """For `Driver.adopt`. Only asked of durable drivers."""
        raise Unsupported("this environment ends with the process that made it")


class Driver(ABC):
    """A kind of environment, made ready by its options; shared by threads and by all environments of a tree."""

    name: ClassVar[str]
    """The word for this backend in tables and history: `docker`, `podman`, `criu`."""
    durable: ClassVar[bool] = False
    """What it makes goes on when this process ends, and the methods under "another process" work."""
    hasty: ClassVar[bool] = False
    """It answers within milliseconds: places are made ahead for it, and what a restore has replaced is halted at once
    (`Live.halt`) and cleared away a moment later, on another thread (`Live.retire`)."""

    @abstractmethod
    def probe(self) -> Capabilities:
        """Try it, on this host, now: start, store, revive something tiny, and remove it. May keep the answer in a cache
        that the next boot and a change of the tools invalidate.

        Raises: HostUnsupported that says what is missing and which command mends it (`fix=`).
        """

    def prepare(self, place: Place) -> None:
        """Of hasty drivers, for a place that was made ahead: do what would else have to be done when it is used, if it is."""
        return

    @abstractmethod
    def start(self, place: Place) -> Live:
        """Make a new environment. Raises: BuildError, HostUnsupported, KernelError."""

    def attach(self, place: Place) -> Live:
        """Take an environment that exists already. It stays the property of whoever made it. Raises: NotFound."""
        raise Unsupported(f"{self.name} has nothing to attach to")

    @abstractmethod
    def revive(self, captured: Captured, place: Place) -> Live:
        """Make a new, independent Live from a stored state; any number may be revived from one, at the same time.

        Raises: what `start` raises; VerifyFailed if what came up is not what was stored.
        """

    @abstractmethod
    def discard(self, captured: Captured) -> None:
        """Free a stored state. It is no error if it is gone already."""

    def describe(self, captured: Captured) -> Mapping[str, Any]:
        """What the backend itself wrote down about a stored state, as plain JSON: processes, open files, versions."""
        return {}

    def manifest(self, captured: Captured, place: Place) -> Manifest:
        """Every file of a stored state, for `diff`. The default revives it for that moment."""
        live = self.revive(captured, place)
        try:
            return live.manifest()
        finally:
            live.stop()

    def keep(self, captured: Captured, name: str) -> str:
        """Bring a stored state up under a name, as something that no tree owns: it stays when all of the tree is gone, and is
        the caller's to remove. Returns how a person reaches it. Raises: Exists, Unsupported."""
        raise Unsupported(f"what {self.name} brings up ends with the process that made it")

    def save_image(self, captured: Captured, archive: Path) -> bool:
        """Write a stored state as an image archive with its configuration (as `docker save` does), where the backend has
        such images; False: it has none, and its files are read instead."""
        return False

    def compare(self, a: Captured, b: Captured | Live) -> Comparison | None:
        """Which files differ, where that can be told without reading all of them; None: ask for both manifests."""
        return None

    def close(self) -> None:
        """The tree is gone: free what belongs to the driver as a whole (an image it built). Called once."""
        return

    # -- another process ----------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """This process ends, what it made does not: let go of what belongs to the process. Called instead of `close`."""
        return

    def adopt(self, note: Mapping[str, Any], place: Place) -> Live:
        """Take over what is at a place, which may stand still. Raises: SessionDead if it is gone."""
        raise Unsupported(f"{self.name} environments end with the process that made them")

    def note_of(self, captured: Captured) -> Any:
        """A stored state's handle as plain JSON."""
        raise Unsupported(f"{self.name} snapshots end with the process that made them")

    def handle_of(self, note: Any) -> Any:
        raise Unsupported(f"{self.name} snapshots end with the process that made them")

    def abandon(self, place: Place) -> None:
        """Remove what a process that died half-way made at a place; it is no error if that is nothing."""
        return

    @classmethod
    def sweep(cls, home: Path, in_use: Callable[[str], bool]) -> Iterable[str]:
        """After a crash: remove every resource marked with `home` whose tree is not `in_use`; yield a line for each.

        Only what is outside of the places' directories: those are removed by the caller afterwards. If the tool
        is not installed there is nothing to sweep.
        """
        return ()
