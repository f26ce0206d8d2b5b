"""CRIU through its RPC: `criu swrk` on a socketpair, started by the launcher in a private mount namespace.

Never by parsing its prose: success is a field of the answer. Only when it fails is the log read, for the lines that say why.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from waypoint.errors import CriuError, DiskFull, NotCapturable
from waypoint.kernel import criu_images, netlock, obstacles, processes, processors, tools
from waypoint.kernel import criu_rpc_pb2 as rpc
from waypoint.kernel.criu_start import Forked, Started
from waypoint.kernel.criu_worker import Hook, Worker
from waypoint.kernel.launch import launch_argv
from waypoint.kernel.template import Template

__all__ = [
    "LINK_PREFIX",
    "Dumped",
    "Dumper",
    "base_options",
    "cached_kernel_options",
    "failure",
    "has_remaps",
    "started",
]

_NEWNET = 0x40000000
_GHOST_LIMIT = 0xFFFF_FFFF
"""Deleted files that are still open are saved whole: CRIU's own default refuses those over 1 MiB."""
_LOG_LEVEL = 2
_NO_SPACE = 256 << 10
_OWN_USERS = "waypoint[userns]"
_OWN_NETWORK = "waypoint[network]"
"""What our own CRIU says of the tree by itself; for another one `claim_network` does."""
_NO_SOCKETS = "waypoint[unix]"
"""What our own CRIU need not find out (kernel/quick): that the session's user namespace can be entered, and that no process
but init has a socket. Another CRIU takes them for the names of things outside, and meets none."""
_UNTOUCHED = "waypoint[memory-{}]"
"""Our own asks ("memory") before it touches this process."""
_MAPPINGS = "waypoint[smaps-{}]:/proc/{}/fd/{}"
"""Our own reads this file for the process's `smaps`, if it is there."""
LINK_PREFIX = "link_remap."
"""CRIU's names, in the session, for open files whose own name is gone while another is left; it removes them after the dump."""


@dataclass(frozen=True, slots=True)
class Dumped:
    paused_ms: float
    """From the moment before the first process was stopped until the last one runs again, or has ended."""
    since: float
    """That moment, on the clock of `time.perf_counter`."""


class Dumper:
    """A CRIU worker that gets ready while its caller has other things to do."""

    def __init__(
        self,
        init_pid: int,
        *,
        own_network: bool,
        hold: Sequence[int],
        written: bool = False,
        template: Template | None = None,
    ) -> None:
        """`hold`: see Started. `written`: only memory that was written is saved, see written.py.

        `template`: by which to have the worker, if it is our own CRIU."""
        self.written = written
        self._pid = init_pid
        self._own_network = own_network
        self._wait = False
        self._leave_running = True
        self._images = Path()
        criu = tools.engine_criu()
        self._worker: Worker
        if template is not None and tools.is_quick(criu):
            self._worker = template.worker(criu, enter=init_pid, own_network=own_network, written=written, hold=hold)
        else:
            options = ["--enter", str(init_pid), "--network", "own" if own_network else "host"]
            self._worker = started(options, (), hold, _environment(written))

    def __enter__(self) -> Dumper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._worker.close(wait=self._wait)

    @property
    def pid(self) -> int:
        return self._worker.pid

    def begin(self, images: Path, *, leave_running: bool, unmounted: bool = False) -> None:
        """CRIU gets ready while the caller does; it touches nothing before `dump`.

        `unmounted`: of a tree that is not left running nothing is mounted any more when this has been closed; CRIU holds on to it.
        """
        self._images = images
        self._wait = unmounted
        self._leave_running = leave_running
        options = base_options(images, "dump.log", self._own_network)
        options.pid = self._pid
        options.leave_running = leave_running
        options.external.append(_OWN_USERS)
        if self._own_network:
            options.external.append(_OWN_NETWORK)
        with processors.woken_elsewhere(self.pid, beside=1) if isinstance(self._worker, Forked) else contextlib.nullcontext():
            self._worker.begin(rpc.DUMP, options)

    def dump(
        self,
        *,
        when_frozen: Callable[[], bool],
        look: Callable[[], None],
        while_frozen: Callable[[], None],
        before_release: Callable[[], None],
        meanwhile: Callable[[], None],
        watched: Callable[[], Sequence[int]],
        mappings: Callable[[int], bytes],
        apart: bool = False,
    ) -> Dumped:
        """Dump the tree.

        `when_frozen` runs as soon as every process has stopped, before CRIU does anything in the session (it makes and removes
        directories there), and says whether there may be connections. `look` is done before CRIU touches one of the processes
        `watched`, beside what it does before that; `mappings` is what it is to read as the `smaps` of one of them, nothing if it is to
        read those. `while_frozen` runs beside CRIU's own work, `before_release`
        when both are done, before anything moves again (or dies, if not `leave_running`), and `meanwhile` as it does.
        `apart`: CRIU and the caller on processors of their own; then nothing of all that may start what outlives it.

        On failure CRIU lets the tree go on and CriuError says so: the session is alive.
        """
        images, pid, own_network = self._images, self._pid, self._own_network
        stopped: list[float] = []
        rest = [while_frozen]

        parted = not apart

        def part() -> None:  # what is at work for a moment when CRIU begins is not when all stands still
            nonlocal parted
            if not parted:
                parted = held.enter_context(processors.apart(self.pid))

        def mark(_: int) -> None:
            stopped.append(time.perf_counter())

        def frozen(_: int) -> Callable[[], None]:
            part()
            connected = when_frozen()
            if not connected:
                self._worker.tell(_NO_SOCKETS)
            if own_network and connected and netlock.has_connections(pid):
                held.callback(netlock.lock_network(pid))
            untouched = watched()
            if untouched and self._worker.own:
                for one in untouched:
                    self._worker.tell(_UNTOUCHED.format(one))
                    if said := mappings(one):
                        self._worker.tell(_MAPPINGS.format(one, os.getpid(), held.enter_context(_in_memory(said))))
                return look_beside
            look()
            return rest.pop()

        def look_beside() -> None:
            look()
            if not self._worker.has_asked():  # it is not there yet
                rest.pop()()

        def looked(_: int) -> Callable[[], None] | None:
            return rest.pop() if rest else None

        def mend() -> None:
            if own_network and not self._worker.own:
                criu_images.claim_network(images)
            criu_images.mend_terminals(images)

        def released(_: int) -> Callable[[], None]:
            if rest:
                raise CriuError("criu has not asked whether it may touch the processes whose memory is tracked")
            if not self._leave_running:  # whoever finds that it has ended takes the images as they are
                mend()
            before_release()
            return finish

        def finish() -> None:
            if self._leave_running:
                mend()
            meanwhile()

        with contextlib.ExitStack() as held:
            hooks: dict[str, Hook] = {
                "pre-dump": mark,
                "query-ext-files": frozen,
                "memory": looked,
                "post-dump": released,
            }
            part()
            answer = self._worker.answer(hooks)
            ended = time.perf_counter()
        if not answer.success:
            raise failure("dump", images / "dump.log", answer, self._worker.stderr(), pid)
        since = stopped[0] if stopped else ended
        return Dumped((ended - since) * 1000, since)


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    """A file that nobody has to remove."""
    with open(os.memfd_create("mappings", os.MFD_CLOEXEC), "wb") as file:
        file.write(content)
        file.flush()
        yield file.fileno()


def has_remaps(images: Path) -> bool:
    """A process holds a file whose name is gone."""
    try:
        return os.stat(f"{images}/remap-fpath.img").st_size > 8  # beyond its magic
    except FileNotFoundError:
        return False


def started(options: Sequence[str], cgroups: Sequence[Path], hold: Sequence[int], environment: Mapping[str, str]) -> Worker:
    criu = tools.engine_criu()
    argv = launch_argv("criu", [*cached_kernel_options(criu), *options], cgroups, list(criu.argv))
    return Started(argv, hold=hold, environment=environment, own=tools.is_quick(criu))


def _environment(written: bool) -> dict[str, str]:
    """With which CRIU saves only memory that was written: our own has it in it, into another it is loaded."""
    return {"WAYPOINT_WRITTEN": "1", "LD_PRELOAD": str(tools.written_path())} if written else {}


def base_options(images: Path, log: str, own_network: bool) -> rpc.criu_opts:
    options = rpc.criu_opts(
        images_dir_fd=-1,
        images_dir=str(images),
        log_level=_LOG_LEVEL,
        log_file=log,
        tcp_established=True,
        file_locks=True,
        link_remap=True,
        ghost_limit=_GHOST_LIMIT,
        manage_cgroups_mode=rpc.IGNORE,
        notify_scripts=True,
        # loopback connections have both ends frozen; connections to the outside do not survive by design (docs/network.md)
        network_lock=rpc.SKIP,
    )
    if own_network:
        options.empty_ns = _NEWNET
    return options


# What CRIU says when it meets something that `obstacles` does not see -> what that is in a user's words.
_UNCAPTURABLE = (
    (r"Unsupported FD|Unknown shit", "a descriptor of a kind that cannot be saved"),
    (r"Unsupported socket family|Unknown socket collected", "a socket of a family that cannot be saved"),
    (r"Multiple .* namespaces|dumping of nested|Can't dump nested", "a nested namespace"),
    (r"Unable to handle char device|Can't dump device|chrdev", "an open device"),
    (r"External socket is used|external (unix )?socket", "a socket whose other end is outside the session"),
    (r"corked", "a UDP socket in the middle of a corked datagram"),
    (r"Memory protection key", "memory with a protection key (pkey_mprotect)"),
)


def failure(
    verb: str, log: Path, answer: rpc.criu_resp, stderr: str, init_pid: int | None = None
) -> CriuError | NotCapturable | DiskFull:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [line for line in lines if "Error" in line and "RLIMIT_NOFILE" not in line]
    quoted = "\n".join(errors[-8:]) or stderr or answer.cr_errmsg or os.strerror(answer.cr_errno)
    alive = "; the session goes on untouched" if verb == "dump" else ""
    full = _free(log.parent) < _NO_SPACE  # then the log may be cut off before it says so, or not be there
    if "No space left on device" in quoted or answer.cr_errno == errno.ENOSPC or full:
        return DiskFull(f"criu {verb} ran out of disk space{alive}:\n{quoted}", log=str(log))
    if init_pid is not None:
        refusal = _refusal(init_pid, "\n".join(errors), quoted)
        if refusal is not None:
            return refusal
    return CriuError(f"criu {verb} failed{alive}:\n{quoted}", log=str(log), lines=errors[-8:])


def _refusal(init_pid: int, errors: str, quoted: str) -> NotCapturable | None:
    """Which process holds what, if that can be told: the tree runs again and is looked at."""
    head = "a snapshot cannot carry what the session holds; it goes on untouched. "
    found = obstacles.find_obstacles(init_pid)
    if found:
        return NotCapturable(
            head + "; ".join(str(obstacle) for obstacle in found[:5]),
            obstacles=[str(obstacle) for obstacle in found],
            lines=quoted,
        )
    for pattern, thing in _UNCAPTURABLE:
        if re.search(pattern, errors):
            who = ", ".join(obstacles.named_processes(errors)) or "a process"
            return NotCapturable(f"{head}{who} has {thing}: close it and try again\n{quoted}", object=thing)
    return None


def _free(path: Path) -> int:
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def cached_kernel_options(criu: tools.Criu | None = None) -> list[str]:
    """CRIU's memory of this kernel, made once per boot: without it each start probes the kernel for 60 ms.

    `criu`: by default the engine's; each has one of its own.
    """
    criu = criu or tools.engine_criu()
    path = tools.prefix() / "kdat" / f"{processes.boot_id()}-{criu.version}-{'-'.join(map(str, criu.identity))}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
        quoted = " ".join(f"'{word}'" for word in criu.argv)
        script = f"{quoted} check >/dev/null 2>&1; cat /run/criu.kdat"
        with open(fresh, "wb") as out:
            subprocess.run(
                launch_argv("criu", [], (), ["/bin/sh", "-c", script]),
                stdout=out,
                stderr=subprocess.DEVNULL,
                check=False,
            )
        if fresh.stat().st_size == 0:
            fresh.unlink()
            return []
        fresh.replace(path)
        for old in path.parent.iterdir():
            if not old.name.startswith((processes.boot_id(), ".")):
                old.unlink(missing_ok=True)
    return ["--kdat", str(path)]
