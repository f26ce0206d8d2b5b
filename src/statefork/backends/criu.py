"""CRIU alone: one process tree on the host's own files. Processes and memory come back, files do not.

`criu_build` starts a command, and beside it the persistent shell, in a pod (pods.py); both are stored and brought back,
and orphans stay in the tree. `criu_attach` takes a process that exists: it is stored where it is, and copies of it come
back in pods; its shell is a companion that is not stored.

Files are the host's, as they are now: what a process had open must still be there, of the same size (a log that is
only appended to may have grown), or CRIU refuses and BaseChanged names the file. Connections that lead out of the tree
come back closed.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import signal
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from statefork.backends.fifos import FifoChannel, loop_argv, make_fifos
from statefork.backends.guest_run import run_in_guest
from statefork.backends.persistent_shell import WRAPPER, Channel, PersistentShell, ShellState
from statefork.backends.pods import Pod, as_root_of_a_tree, kill_noted_pod, make_pod
from statefork.backends.probe_cache import remembered
from statefork.backends.process_tree import command_lines, connections_of, inside_pid, signal_each, tree_pids
from statefork.backends.programs import Child
from statefork.driver import Captured, Driver, Live, Place
from statefork.errors import (
    BaseChanged,
    CriuError,
    HostUnsupported,
    KernelError,
    NotCapturable,
    NotFound,
    SessionDead,
    UsageError,
    WaypointError,
)
from statefork.model import Capabilities, Capability, ExecRequest, ExecResult, Mode, RunRequest
from statefork.registry import Argument, Backend, Method, number, path, text
from waypoint.kernel.programs import Finished, run_program
from waypoint.kernel.tools import criu_argv, criu_version

__all__ = ["BACKEND", "CriuDriver"]

LOG_NAME = "command.log"
"""In the directory that each tree has for itself."""
INSTALL = "`waypoint setup` gets a CRIU that works; apt-get install util-linux iproute2"
_CALL_TIMEOUT = 300.0
_HELPERS = 250
"""Pids that have to be free for CRIU and its helpers when a tree is brought back."""

_OPTIONS = ["--file-locks", "--link-remap", "--ghost-limit", "4294967295", "--manage-cgroups=ignore", "-v2"]

# Files must be copied at the very instant that CRIU stored their length.
_COPY = '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || exec cp -a {source}/. {target}/\n'

_START = 'cd -- "$1" || exit; sh -c "$2" </dev/null >>"$STATEFORK_LOG" 2>&1 & shift 2; exec "$@"'


@dataclass(frozen=True, slots=True)
class StoredTree:
    images: Path
    root: int
    """The root's pid, as seen from inside."""
    pids: tuple[int, ...]
    shell_job: bool
    closed: bool
    """Connections come back closed, because they led out of the tree."""
    shell: ShellState | None
    fifos: bool


class CriuLive(Live):
    """What the attached and the podded have in common: a shell and programs started through `nsenter`."""

    def __init__(self, around: int, work_dir: Path) -> None:
        self._around = around
        self._work_dir = work_dir

    def exec(self, request: ExecRequest) -> ExecResult:
        return self._shell.exec(request)

    def run(self, request: RunRequest) -> ExecResult:
        return run_in_guest(self._wrap, request, self._dead)

    def suspend(self) -> None:
        signal_each(tree_pids(self._outside_root()), signal.SIGSTOP)

    def proceed(self) -> None:
        signal_each(tree_pids(self._outside_root()), signal.SIGCONT)

    _shell: PersistentShell
    _own_variables: Sequence[str] = ()

    @abstractmethod
    def _outside_root(self) -> int:
        """The tree's first process, as the host numbers it."""

    def _wrap(self, request: RunRequest, argv: Sequence[str]) -> list[str]:
        variables = [*self._own_variables, *(f"{key}={value}" for key, value in request.env.items())]
        within = ["env", "-C", request.cwd or str(self._work_dir), *variables, *argv]
        return ["nsenter", "-t", str(self._around), "-a", "--", "setsid", "-w", *within]

    def _open_pipes(self) -> Channel:
        return Child(self._wrap(RunRequest(()), ["sh", "-c", WRAPPER]))

    def _aside(self, script: str, *arguments: str) -> None:
        self.run(RunRequest(("sh", "-c", script, "sh", *arguments), timeout=30))

    def _stage(self, data: bytes) -> str:
        path = f"{tempfile.gettempdir()}/.statefork-{secrets.token_hex(8)}"
        self.write_file(path, data, 0o600)
        return path

    def _dead(self, said: str) -> WaypointError:
        if Path(f"/proc/{self._around}").exists():
            return KernelError(f"{self.description} runs, but no program can be started beside it: {said}")
        return SessionDead(f"{self.description} is gone: {said}")


class PodLive(CriuLive):
    """A tree in a pod; `root` is its first process, as seen from inside."""

    def __init__(
        self, pod: Pod, root: int, directory: Path, here: Path, work_dir: Path, stored: StoredTree | None
    ) -> None:
        super().__init__(pod.pid, work_dir)
        self.description = f"process {root} in the pid namespace of {pod.pid}"
        self._pod, self._root, self._directory, self._here = pod, root, directory, here
        self._own_variables = _variables(here)
        self._fifos = stored is None or stored.fifos
        opener = self._open_fifos if self._fifos else self._open_pipes
        self._shell = PersistentShell(opener, self._aside, self._stage, self._dead, stored.shell if stored else None)

    def _open_fifos(self) -> Channel:
        return FifoChannel(self._directory)

    def capture(self, place: Place, mode: Mode, parent: Captured | None) -> Captured:
        outside = self._outside_root()
        images = place.directory / "images"
        images.mkdir()
        copy = place.directory / "here"
        copy.mkdir()
        script = place.directory / "copy"
        script.write_text(_COPY.format(source=shlex.quote(str(self._here)), target=shlex.quote(str(copy))))
        script.chmod(0o755)
        options = ["--action-script", str(script)]
        tree = tree_pids(outside)
        stray = [pid for pid in tree_pids(self._pod.pid)[1:] if pid not in tree and not _is_keeper(pid)]
        lost = tuple(f"process beside the tree: {line}" for line in command_lines(stray))
        argv = self._pod.argv(*_dump_argv(self._root, images, options))
        return _dump(
            self.description,
            argv,
            images,
            tree,
            lost,
            StoredTreeDraft(self._root, False, self._shell.state if self._fifos else None, self._fifos),
        )

    def stop(self) -> None:
        self._shell.close()
        self._pod.kill()

    def _outside_root(self) -> int:
        for pid in tree_pids(self._pod.pid):
            if inside_pid(pid) == self._root:
                return pid
        raise SessionDead(f"{self.description} has ended; restore a snapshot to go on")


class AttachedLive(CriuLive):
    """A process that somebody else started, on the host itself."""

    def __init__(self, target: int, work_dir: Path) -> None:
        super().__init__(target, work_dir)
        self.description = f"process {target}"
        self._target = target
        self._shell = PersistentShell(self._open_pipes, self._aside, self._stage, self._dead)

    def capture(self, place: Place, mode: Mode, parent: Captured | None) -> Captured:
        images = place.directory / "images"
        images.mkdir()
        tree = tree_pids(self._target)
        if not Path(f"/proc/{self._target}").exists():
            raise SessionDead(f"{self.description} has ended")
        shell_job = os.getsid(self._target) not in tree
        argv = _dump_argv(self._target, images, ["--shell-job"] if shell_job else [])
        return _dump(self.description, argv, images, tree, (), StoredTreeDraft(self._target, shell_job, None, False))

    def stop(self) -> None:
        self._shell.close()

    def _outside_root(self) -> int:
        return self._target


@dataclass(frozen=True, slots=True)
class StoredTreeDraft:
    root: int
    shell_job: bool
    shell: ShellState | None
    fifos: bool


class CriuDriver(Driver):
    """Give a command, or the pid of a process to attach to."""

    name = "criu"

    def __init__(self, command: str | None = None, target_pid: int | None = None, work_dir: Path | None = None) -> None:
        if (command is None) == (target_pid is None):
            raise UsageError("criu takes either a command or a target_pid")
        self._command = command
        self._target = target_pid
        self._work_dir = (work_dir or Path.cwd()).absolute()

    def probe(self) -> Capabilities:
        if os.geteuid() != 0:
            raise HostUnsupported("the criu backend needs root", fix="run it as root")
        missing = [tool for tool in ("nsenter", "unshare", "setsid", "ip") if shutil.which(tool) is None]
        if missing:
            raise HostUnsupported(f"{', '.join(missing)} not installed: {INSTALL}", fix=INSTALL)
        found = remembered("criu", [criu_argv()[-1]], _try)
        if self._target is None:
            return found
        return Capabilities(
            backend=self.name,
            restores=found.restores - {Capability.SHELL},
            pause_releases_memory=False,
            snapshot_during_exec=True,
            versions=found.versions,
        )

    def start(self, place: Place) -> Live:
        assert self._command is not None
        if not self._work_dir.is_dir():
            raise NotFound(f"work_dir {self._work_dir} does not exist")
        directory, here = _ground(place)
        make_fifos(directory)
        pod = make_pod(directory, here, place.directory / "pod", last_pid=300)
        try:
            start = ["env", *_variables(here), "sh", "-c", _START, "sh", str(self._work_dir), self._command]
            done = pod.call(*as_root_of_a_tree([*start, *loop_argv(str(here))]))
            root = int(done.check(f"starting {self._command!r}").text)
            return PodLive(pod, root, directory, here, self._work_dir, None)
        except BaseException:
            pod.kill()
            raise

    def attach(self, place: Place) -> Live:
        assert self._target is not None
        if not Path(f"/proc/{self._target}").exists():
            raise NotFound(f"no process {self._target}")
        for space in ("mnt", "pid", "net", "ipc"):
            if Path(f"/proc/{self._target}/ns/{space}").readlink() != Path(f"/proc/self/ns/{space}").readlink():
                raise NotCapturable(
                    f"process {self._target} lives in a container (its {space} namespace is not this one); "
                    "attach to the container with docker, podman or hybrid instead"
                )
        return AttachedLive(self._target, self._work_dir)

    def revive(self, captured: Captured, place: Place) -> Live:
        stored: StoredTree = captured.handle
        directory, here = _ground(place)
        copy = stored.images.parent / "here"
        if copy.exists():
            run_program(["cp", "-a", f"{copy}/.", str(directory)], timeout=_CALL_TIMEOUT).check("copying its directory")
        pod = make_pod(directory, here, place.directory / "pod", last_pid=_gap(stored.pids))
        try:
            options = ["--shell-job"] if stored.shell_job else []
            options.append("--tcp-close" if stored.closed else "--tcp-established")
            argv = [*criu_argv(), "restore", "-D", str(stored.images), "-W", str(place.directory), "-o", "restore.log"]
            done = pod.call(*argv, "--restore-detached", *_OPTIONS, *options)
            if done.exit_code != 0:
                raise _restore_failure(stored, place.directory / "restore.log", done)
            return PodLive(pod, stored.root, directory, here, self._work_dir, stored)
        except BaseException:
            pod.kill()
            raise

    def discard(self, captured: Captured) -> None:
        """All of it is in the place's directory, which goes too."""

    @classmethod
    def sweep(cls, home: Path, in_use: Callable[[str], bool]) -> Iterable[str]:
        for note in home.glob("trees/*/*/pod"):
            if not in_use(note.parent.parent.name) and kill_noted_pod(note):
                yield f"criu processes of {note.parent.name}"


def _ground(place: Place) -> tuple[Path, Path]:
    """The pod's own directory, and the fixed path over which it is mounted."""
    directory = place.directory / "here"
    directory.mkdir()
    return directory, place.home / "criu" / "here"


def _variables(here: Path) -> list[str]:
    return [f"STATEFORK_DIR={here}", f"STATEFORK_LOG={here / LOG_NAME}"]


def _gap(pids: Sequence[int]) -> int:
    """A number after which enough pids are free for CRIU itself: it must not take one that the tree needs."""
    start = 300
    for pid in sorted(pids):
        if start < pid <= start + _HELPERS:
            start = pid
    return start


def _is_keeper(pid: int) -> bool:
    return command_lines([pid]) == ("sleep 86400",)


def _dump_argv(root: int, images: Path, options: Sequence[str]) -> list[str]:
    argv = [*criu_argv(), "dump", "-t", str(root), "-D", str(images), "-o", "dump.log", "--leave-running"]
    return [*argv, "--tcp-established", "--network-lock", "skip", *_OPTIONS, *options]


def _dump(
    what: str, argv: Sequence[str], images: Path, tree: Sequence[int], lost: tuple[str, ...], draft: StoredTreeDraft
) -> Captured:
    connections = connections_of(tree)
    processes = command_lines(tree)
    done = run_program(argv, timeout=_CALL_TIMEOUT)
    if done.exit_code != 0:
        quoted = _quoted(images / "dump.log", done)
        raise NotCapturable(f"snapshot of {what}: CRIU refused, the process goes on:\n{quoted}")
    memory = sum(path.stat().st_size for path in images.glob("pages-*.img"))
    stored = StoredTree(
        images=images,
        root=draft.root,
        pids=tuple(int(path.stem.split("-")[1]) for path in images.glob("core-*.img")),
        shell_job=draft.shell_job,
        closed=bool(connections.outside),
        shell=draft.shell,
        fifos=draft.fifos,
    )
    kept = (Capability.PROCESSES, Capability.MEMORY)
    return Captured(
        handle=stored,
        captured=(*kept, Capability.SHELL) if draft.shell is not None else kept,
        not_captured=("files", *connections.outside, *lost),
        memory_bytes=memory,
        processes=processes,
    )


def _quoted(log: Path, done: Finished) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [line for line in lines if "Error" in line and "RLIMIT_NOFILE" not in line]
    return "\n".join(errors[-6:]) or done.tail()


def _restore_failure(stored: StoredTree, log: Path, done: Finished) -> WaypointError:
    quoted = _quoted(log, done)
    changed = re.search(r"File (\S+) has bad (?:size|mode)|Can't open file (\S+) on restore", quoted)
    if changed:
        path = "/" + (changed[1] or changed[2]).lstrip("/")  # CRIU names it as seen from its root
        return BaseChanged(
            f"a process of the snapshot had {path} open, and that file is not what it was; this backend does not "
            f"keep files: use hybrid or waypoint for a process that writes them\n{quoted}",
            path=path,
        )
    return CriuError(f"restoring {stored.images}: CRIU failed:\n{quoted}")


def _try() -> Capabilities:
    """A tree with a shell, stored and brought back."""
    with tempfile.TemporaryDirectory(prefix="statefork-probe-") as scratch:
        home = Path(scratch)
        driver = CriuDriver(command="sleep 1000", work_dir=home)
        first, state, second = (Place(name, home / name, "probe", home) for name in ("first", "state", "second"))
        for place in (first, state, second):
            place.directory.mkdir()
        try:
            live = driver.start(first)
            try:
                live.exec(ExecRequest(b"probe=yes", timeout=30))
                captured = live.capture(state, "auto", None)
                again = driver.revive(captured, second)
                try:
                    answer = again.exec(ExecRequest(b'echo "$probe"', timeout=30))
                finally:
                    again.stop()
            finally:
                live.stop()
        except (KernelError, SessionDead) as error:
            raise HostUnsupported(
                f"CRIU cannot bring a shell back on this host: {error.message}", fix=INSTALL
            ) from error
        if answer.stdout != "yes\n":
            raise HostUnsupported("CRIU brought a shell back, but not its variables", fix=INSTALL)
    return Capabilities(
        backend="criu",
        restores=frozenset({Capability.PROCESSES, Capability.MEMORY, Capability.SHELL}),
        pause_releases_memory=True,
        snapshot_during_exec=False,
        versions={"criu": criu_version()},
    )


_COMMAND = Argument("command", text, "a command line, run by `sh` in work_dir")
_TARGET = Argument("target_pid", number, "a process on this host; what it started belongs to it")
_WORK_DIR = Argument(
    "work_dir", path, "the directory that the command and the shell start in; default: the present one"
)

BACKEND = Backend(
    name="criu",
    summary="processes, memory, shell",
    driver=CriuDriver,
    probe=lambda: CriuDriver(command="true").probe(),
    methods=(
        Method("criu_build", CriuDriver, (_COMMAND, _WORK_DIR), required=(("command",),)),
        Method("criu_attach", CriuDriver, (_TARGET, _WORK_DIR), required=(("target_pid",),), attach=True),
    ),
)
