"""Take a gVisor container that somebody else started with `runsc`. It is left as it was; copies of it are our own.

Found out by trial on runsc 20240729: `runsc restore` sends SIGKILL to every process that came in through `runsc exec` or
descends from one, whatever its parent is by now. We have no other way in, so of what was attached to a copy has the container's own
processes, memory and files, and neither our shell nor what that has started. The shell begins anew, and says so.

In the container itself the shell lives through snapshots. It is behind FIFOs inside and is reached through a relay, one
`runsc exec`; a relay's pipes would make the restore fail, so it is taken away for a checkpoint and put back right after.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statefork.backends.fifos import loop_argv
from statefork.backends.gvisor_guest import MARK, Inside, named
from statefork.backends.gvisor_live import BROUGHT_BACK, RUN_TIMEOUT, SandboxLive
from statefork.backends.gvisor_sandbox import Sandbox, failure, kill_sandboxes, launch
from statefork.backends.persistent_shell import WRAPPER, Channel, ShellState
from statefork.backends.programs import Child
from statefork.driver import Captured, Place
from statefork.errors import NotCapturable, NotFound, Unsupported, WaypointError
from statefork.manifest import Manifest, read_guest_manifest
from statefork.model import Mode, RunRequest

__all__ = ["AttachedLive", "Copied", "Origin", "attach_to", "find_container", "revive_copy", "sweep_attached"]

NOTE = "gvisor-attached.json"
EVICT_TIMEOUT = 30.0

# What the copies are told of what the container's own runsc was told; the rest is about where it is and who watches.
_KEPT_FLAGS = (
    "--platform=",
    "--directfs=",
    "--host-uds=",
    "--host-fifo=",
    "--file-access",
    "--net-raw=",
    "--oci-seccomp=",
)

# Three programs between our pipes and the FIFOs; they end when our end is closed.
_RELAY = r"""
cat <"$1/out" & out=$!
cat <"$1/err" >&2 & err=$!
cat >"$1/in"; kill "$out" "$err"; wait
"""
_MAKE = r"""
rm -rf -- "$1"; mkdir "$1" && mkfifo "$1/in" "$1/out" "$1/err" && chmod 666 "$1/in" "$1/out" "$1/err" && chmod 777 "$1"
"""
_INJECT = r"""
directory=$1; shift
"$@" </dev/null >/dev/null 2>&1 & echo $! >"$directory/loop"
"""
# The loop, the wrapper that it started, and the shell that that has started. Jobs of the shell stay, as they do elsewhere.
_EVICT = r"""
read -r todo <"$1/loop" || exit 0
doomed=$todo
for round in 1 2; do
  next=
  for d in /proc/[0-9]*; do
    read -r s 2>/dev/null <"$d/stat" || continue
    s=${s##*) }; set -- "$1" $s
    case " $todo " in *" $3 "*) next="$next ${d#/proc/}";; esac
  done
  todo=$next doomed="$doomed $next"
done
kill -KILL $doomed; rm -rf -- "$1"
"""


@dataclass(frozen=True, slots=True)
class Origin:
    """What it takes to make a copy of somebody's container: its OCI description, and how its runsc was told to be."""

    runsc: Path
    config: Mapping[str, Any]
    flags: tuple[str, ...]
    overlay: str
    left_out: tuple[str, ...]
    """What a copy does not have for itself, in words."""

    @property
    def user(self) -> str:
        user = self.config["process"].get("user", {})
        return f"{user.get('uid', 0)}:{user.get('gid', 0)}"

    @property
    def cwd(self) -> str:
        return str(self.config["process"].get("cwd", "/"))


@dataclass(frozen=True, slots=True)
class Copied:
    """A checkpoint of a container that was attached to, or of a copy of one."""

    image: Path
    origin: Origin
    directory: str
    """Where the FIFOs of the dead shell are in it."""


# -- finding ----------------------------------------------------------------------------------------------------------


def find_container(name: str, state: Path | None, platform: str | None) -> tuple[Sandbox, Origin]:
    """By the command line of its sandbox, which names the state directory too.

    Raises: NotFound, Unsupported if a checkpoint of it is not possible or would have no files.
    """
    known = {(found.name, found.state): found for found in _running()}
    fits = [found for (known_as, where), found in known.items() if known_as == name and state in (None, where)]
    if not fits:
        there = ", ".join(f"{known_as} (root={where})" for known_as, where in known) or "none"
        where = f" with root={state}" if state else ""
        raise NotFound(f"no container {name!r}{where} is run by runsc on this host; there are: {there}")
    if len(fits) > 1:
        roots = ", ".join(str(found.state) for found in fits)
        raise NotFound(f"there are several containers {name!r}; choose one with root=, of: {roots}")
    (found,) = fits
    flags = dict.fromkeys(found.flags)
    if "--network=host" in flags:
        raise Unsupported(
            f"container {name!r} uses the host's network (--network=host), and runsc cannot store such a one"
        )
    overlay = next((flag for flag in flags if flag.startswith("--overlay2=")), "--overlay2=root:self")
    if overlay == "--overlay2=none":
        raise Unsupported(
            f"container {name!r} writes to its root directory itself (--overlay2=none), so a checkpoint has no files; start it "
            "with --overlay2=root:memory, or leave the option out"
        )
    config = _config(found)
    if config["process"].get("terminal"):
        raise Unsupported(
            f"container {name!r} has a terminal on the host, which runsc cannot store; start it without one"
        )
    kept = [
        flag for flag in flags if flag.startswith(_KEPT_FLAGS) and not (platform and flag.startswith("--platform="))
    ]
    if platform:
        kept.append(f"--platform={platform}")
    volumes = [mount["destination"] for mount in config.get("mounts", ()) if mount.get("type") == "bind"]
    left_out = [f"volume {path}: copies share it with the container" for path in volumes]
    if "--network=none" not in flags:
        left_out.append("the network: a copy has the loopback only")
    origin = Origin(found.runsc, config, (*kept, "--network=none", "--ignore-cgroups"), overlay, tuple(left_out))
    return Sandbox(found.runsc, found.state, name, (), origin.user, origin.cwd), origin


@dataclass(frozen=True, slots=True)
class _Running:
    name: str
    state: Path
    runsc: Path
    flags: tuple[str, ...]
    bundle: Path


def _running() -> Iterator[_Running]:
    """Sandboxes of this host. The state directory of one is where its runsc was told (`--root`)."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            if not words[0].endswith("runsc-sandbox"):
                continue
            boot = words.index("boot")
            options = dict(word.partition("=")[::2] for word in words[1:])
            runsc = (entry / "exe").readlink()
            yield _Running(words[-1], Path(options["--root"]), runsc, tuple(words[1:boot]), Path(options["--bundle"]))


def _config(found: _Running) -> dict[str, Any]:
    """Its description, fit for a copy: with an absolute root, namespaces of its own, and no hooks to run once more."""
    try:
        config: dict[str, Any] = json.loads((found.bundle / "config.json").read_text())
    except OSError as error:
        raise NotFound(
            f"container {found.name!r}: its bundle {found.bundle} cannot be read: {error.strerror}"
        ) from error
    config["root"] = {**config["root"], "path": str((found.bundle / config["root"]["path"]).resolve())}
    linux = dict(config.get("linux", {}))
    linux["namespaces"] = [{"type": space["type"]} for space in linux.get("namespaces", ())]
    config["linux"] = linux
    config.pop("hooks", None)
    return config


# -- living -----------------------------------------------------------------------------------------------------------


class Relay:
    """A channel (persistent_shell.py) through `runsc exec`."""

    def __init__(self, sandbox: Sandbox, directory: str) -> None:
        self._child = Child(sandbox.argv(*sandbox.exec_arguments(["sh", "-c", _RELAY, "sh", directory], {}, "/")))
        self._closed = False

    @property
    def stdout(self) -> int:
        return self._child.stdout

    @property
    def stderr(self) -> int:
        return self._child.stderr

    def send(self, data: bytes) -> None:
        self._child.send(data)

    def close(self) -> None:
        """Returns when nothing of it is left inside."""
        if not self._closed:
            self._closed = True
            self._child.feed(None, end=True)
            self._child.wait(10)
            self._child.close()


class AttachedLive(SandboxLive):
    """Somebody's container, or a copy of it, which is ours."""

    def __init__(self, sandbox: Sandbox, origin: Origin, directory: str, *, owned: bool) -> None:
        super().__init__(sandbox)
        self._origin = origin
        self._directory = directory
        self._owned = owned
        self._suspended = False
        self._inject()
        self._shell = self._talk(None)

    def capture(self, place: Place, mode: Mode, parent: Captured | None) -> Captured:
        what = f"snapshot of container {self._sandbox.name}"
        image = place.directory / "image"
        with self._gate.alone(RUN_TIMEOUT), self._without_relay() as shell:
            inside = self._look(what)
            lost = [named(pid, line) for pid, line in self._started(inside, shell).items()]
            if lost and mode == "full":
                raise NotCapturable(
                    f"{what}: {lost[0]} came in through `runsc exec`, and runsc would end it in every copy"
                )
            taken = self._checkpoint(what, image)
        return Captured(
            handle=Copied(image, self._origin, self._directory),
            captured=BROUGHT_BACK,
            not_captured=("the shell", *(f"{one}, started through it" for one in lost), *self._origin.left_out),
            files_bytes=taken.files_bytes,
            memory_bytes=taken.memory_bytes,
            paused_ms=taken.paused_ms,
            processes=tuple(line for line in inside.processes if line not in inside.started.values()),
        )

    def stop(self) -> None:
        self._shell.close()
        if self._owned:
            kill_sandboxes(self._sandbox.state)
            return
        if self._suspended:
            self._sandbox.call("resume", self._sandbox.name)
        evict(self._sandbox, self._directory)

    def suspend(self) -> None:
        self._sandbox.ask(f"pausing {self._sandbox.name}", "pause", self._sandbox.name)
        self._suspended = True

    def proceed(self) -> None:
        self._sandbox.ask(f"resuming {self._sandbox.name}", "resume", self._sandbox.name)
        self._suspended = False

    def manifest(self) -> Manifest:
        found = read_guest_manifest(self.run)
        return {path: facts for path, facts in found.items() if not f"{path}/".startswith(f"{self._directory}/")}

    # -- inside -------------------------------------------------------------------------------------------------------

    def _inject(self) -> None:
        """A shell behind FIFOs; when its `runsc exec` has ended, it is a child of the container's PID 1."""
        what = f"a shell for container {self._sandbox.name}"
        made = self._sandbox.call(
            "exec", "--user", "0:0", "--cwd", "/", self._sandbox.name, *_script(_MAKE, self._directory)
        )
        if made.exit_code != 0:
            said = made.stderr.decode(errors="replace").strip()
            raise failure(f"{what} needs `sh`, `mkfifo` and a directory that can be written to", said)
        argv = _script(_INJECT, self._directory, *loop_argv(self._directory))
        done = self._sandbox.call(*self._sandbox.exec_arguments(argv, {MARK: "1"}, None))
        if done.exit_code != 0:
            raise failure(what, done.stderr.decode(errors="replace"))

    def _channel(self) -> Channel:
        return Relay(self._sandbox, self._directory)

    @contextlib.contextmanager
    def _without_relay(self) -> Iterator[ShellState | None]:
        """The shell itself stays; only we stop listening for a moment."""
        state = self._shell.state
        self._shell.close()
        try:
            yield state
        finally:
            self._shell = self._talk(state)

    def _started(self, inside: Inside, shell: ShellState | None) -> dict[int, str]:
        """What we have started, without the shell and what holds it."""
        ours = {" ".join(loop_argv(self._directory)), f"sh -c {WRAPPER}"}
        pid = int(shell.pid) if shell is not None and shell.pid else None
        return {one: line for one, line in inside.started.items() if one != pid and line not in ours}

    def _stage(self, data: bytes) -> str:
        target = f"{self._directory}/staged-{secrets.token_hex(8)}"
        self.run(RunRequest(("sh", "-c", 'cat >"$0"', target), stdin=data))
        return target


def _script(text: str, *arguments: str) -> list[str]:
    return ["sh", "-c", text, "sh", *arguments]


def evict(sandbox: Sandbox, directory: str) -> None:
    """Take our shell out of a container. That the container is gone is no error."""
    with contextlib.suppress(WaypointError):
        options = ["exec", "--user", "0:0", "--cwd", "/", sandbox.name]
        sandbox.call(*options, *_script(_EVICT, directory), timeout=EVICT_TIMEOUT)


def attach_to(sandbox: Sandbox, origin: Origin, place: Place) -> AttachedLive:
    directory = f"/.statefork-{place.name}"
    row = {"runsc": str(sandbox.runsc), "state": str(sandbox.state), "name": sandbox.name, "directory": directory}
    (place.directory / NOTE).write_text(json.dumps(row))
    try:
        return AttachedLive(sandbox, origin, directory, owned=False)
    except BaseException:
        evict(sandbox, directory)
        raise


def revive_copy(stored: Copied, place: Place, name: str) -> AttachedLive:
    """Restore a checkpoint of somebody's container as a sandbox of our own."""
    origin = stored.origin
    for part in ("state", "bundle", "files", "layers", "root"):
        (place.directory / part).mkdir()
    (place.directory / "bundle/config.json").write_text(json.dumps(origin.config))
    covered = origin.overlay.removeprefix("--overlay2=").partition(":")[0]
    medium = "memory" if origin.overlay.endswith(":memory") else f"dir={place.directory / 'files'}"
    flags = (*origin.flags, f"--overlay2={covered}:{medium}")
    sandbox = Sandbox(origin.runsc, place.directory / "state", name, flags, origin.user, origin.cwd)
    launch(sandbox, place.directory, ["restore", f"--image-path={stored.image}"], f"restoring {stored.image}")
    try:
        return AttachedLive(sandbox, origin, stored.directory, owned=True)
    except BaseException:
        kill_sandboxes(sandbox.state)
        raise


def sweep_attached(home: Path, in_use: Callable[[str], bool]) -> Iterator[str]:
    """Take our shell out of containers that crashed owners had attached to."""
    for note in sorted(home.glob(f"trees/*/*/{NOTE}")):
        if not in_use(note.parent.parent.name):
            row = json.loads(note.read_text())
            evict(Sandbox(Path(row["runsc"]), Path(row["state"]), row["name"], (), "0:0", "/"), row["directory"])
            yield f"gvisor shell in {row['name']}"
