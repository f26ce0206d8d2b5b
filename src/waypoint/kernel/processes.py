"""Processes as /proc tells them: identity, life and death."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator

from waypoint.outcomes import Process

__all__ = [
    "alive",
    "boot_id",
    "half_restored",
    "identified",
    "identify",
    "inits",
    "is_sessions",
    "kill",
    "kill_each",
    "may_share_memory",
    "namespace_pids",
    "pid_inside",
    "read_proc",
    "state",
    "wait_gone",
]

_BOOT = "/proc/sys/kernel/random/boot_id"
_CHUNK = 1 << 16


def read_proc(path: str) -> bytes:
    """All of a file that the kernel makes up as it is read. A Python file object would ask it a dozen questions first."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while data := os.read(fd, _CHUNK):
            parts.append(data)
        return b"".join(parts)
    finally:
        os.close(fd)


def boot_id() -> str:
    return read_proc(_BOOT).decode().strip()


def start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat; FileNotFoundError or ProcessLookupError when it is gone."""
    text = read_proc(f"/proc/{pid}/stat")
    after = text[text.rindex(b")") + 2 :].split()
    if after[0] in (b"Z", b"X"):
        raise ProcessLookupError(pid)
    return int(after[19])


def identify(pid: int) -> Process:
    return Process(pid, start_ticks(pid))


def identified(pids: Iterable[int]) -> list[Process]:
    """Those that have not ended."""
    found = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append(identify(pid))
    return found


def alive(process: Process) -> bool:
    if process.pid <= 0:
        return False
    try:
        return start_ticks(process.pid) == process.start
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill(process: Process) -> None:
    """SIGKILL, through a pidfd so that a reused number is never hit. Killing PID 1 ends its whole namespace."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if alive(process):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
    finally:
        os.close(fd)


def kill_each(pids: Iterable[int]) -> None:
    """Of a tree that stands still: a process that is only about to die with its PID 1 would run for an instant when it is let go."""
    for process in identified(pids):
        kill(process)


def wait_gone(process: Process, timeout: float) -> bool:
    """Wait until it has ended (a zombie counts); False when it outlives the timeout."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        deadline = time.monotonic() + timeout
        while alive(process):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll(left * 1000)
        return True
    finally:
        os.close(fd)


def inits(tag: str) -> Iterator[Process]:
    """Every running init whose argv carries `tag`: the sessions of one store, known to it or not."""
    wanted = b"/.waypoint/init\0"
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/cmdline", "rb") as cmdline:
                text = cmdline.read(4096)
            if text.startswith(wanted) and tag.encode() in text.split(b"\0") and _is_first(entry.name):
                yield identify(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue


def _is_first(pid: str) -> bool:
    """PID 1 of its namespace. A program that init is about to start is called init too, until it is executed."""
    with open(f"/proc/{pid}/status") as lines:
        return any(line.startswith("NSpid:") and line.split()[-1] == "1" for line in lines)


def half_restored(is_criu: Callable[[str], bool], first_id: int) -> Iterator[Process]:
    """Every PID 1 that CRIU began to restore and will never finish, because that CRIU is dead; a program's path tells it.

    It still runs CRIU's program, in the user namespace that sessions have, and its parent is somebody else.
    """
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if not is_criu(_program(entry.name)):
                continue
            if not is_sessions(int(entry.name), first_id):
                continue
            with open(f"/proc/{entry.name}/stat") as stat:
                parent = stat.read().rpartition(")")[2].split()[1]
            # others than PID 1 have it as their parent, and it may run the session's own program already
            if _is_first(entry.name) and not is_criu(_program(parent)):
                yield identify(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue


def is_sessions(pid: int, first_id: int) -> bool:
    """It is in the user namespace that sessions have."""
    return read_proc(f"/proc/{pid}/uid_map").split()[:2] == [b"0", str(first_id).encode()]


def _program(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def pid_inside(pid: int) -> int:
    """Its pid in the innermost namespace: as the session itself numbers it."""
    with open(f"/proc/{pid}/status") as lines:
        return next(int(line.split()[-1]) for line in lines if line.startswith("NSpid:"))


def state(pid: int) -> str:
    """The kernel's letter for it: R, S, D, T, t, Z ...; X: it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as text:
            return text.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def namespace_pids(init_pid: int) -> list[int]:
    """The host pids of every process of a session: PID 1 and all that descend from it, as orphans come back to it."""
    found = [init_pid]
    for pid in found:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                found += map(int, read_proc(f"/proc/{pid}/task/{thread}/children").split())
    return sorted(found)


def may_share_memory(pid: int, init_pid: int) -> bool:
    """Whether pages of this process of a session may be another one's, too: since a fork, or because the kernel has merged them."""
    try:
        if int(read_proc(f"/proc/{pid}/ksm_merging_pages")):
            return True
    except FileNotFoundError:  # a kernel that merges nothing, or the process has ended
        pass
    except OSError:
        return True
    others = (other for other in namespace_pids(init_pid) if other != pid)
    return any(_program_file(other) in (_program_file(pid), None) for other in others)


def _program_file(pid: int) -> tuple[int, int] | None:
    """The file that it runs: who has forked it runs the same until one of them starts another. None: it has just ended."""
    with contextlib.suppress(OSError):
        found = os.stat(f"/proc/{pid}/exe")
        return found.st_dev, found.st_ino
    return None
