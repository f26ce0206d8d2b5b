"""Let programs hold their terminal by its name instead of /dev/tty, which CRIU does not carry.

Both are the same terminal; only the name differs under which it was opened. The process itself is made to open /dev/pts/N in the
place of its old descriptor. Done only after a dump has failed: it is rare, and stops each such process for a moment.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial

from waypoint.kernel.inject import Injection, inside
from waypoint.kernel.processes import namespace_pids

__all__ = ["reopen_by_name"]

_OPENAT, _DUP3, _CLOSE = 257, 292, 3
_AT_FDCWD = -100
_PTS_MAJORS = range(136, 144)
_ACCESS_AND_BLOCKING = os.O_ACCMODE | os.O_NONBLOCK


def reopen_by_name(init_pid: int) -> int:
    """How many descriptors were changed."""
    changed = 0
    for pid in namespace_pids(init_pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            held = [int(fd) for fd in os.listdir(f"/proc/{pid}/fd") if os.readlink(f"/proc/{pid}/fd/{fd}") == "/dev/tty"]
            name = _terminal(pid)
            if held and name:
                inside(pid, partial(_reopen_all, pid, held, name))
                changed += len(held)
    return changed


def _reopen_all(pid: int, held: list[int], name: str, process: Injection) -> None:
    for fd in held:
        _reopen(process, name, fd, _flags(pid, fd))


def _reopen(process: Injection, name: str, fd: int, flags: int) -> None:
    fresh = process.call(_OPENAT, _AT_FDCWD, name.encode() + b"\0", flags & _ACCESS_AND_BLOCKING | os.O_NOCTTY, 0)
    try:
        process.call(_DUP3, fresh, fd, flags & os.O_CLOEXEC)
    finally:
        process.call(_CLOSE, fresh)


def _terminal(pid: int) -> str:
    """Its controlling terminal, if that is one of the session's pseudo-terminals."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        number = int(stat.read().rpartition(b")")[2].split()[4])
    return f"/dev/pts/{os.minor(number)}" if os.major(number) in _PTS_MAJORS else ""


def _flags(pid: int, fd: int) -> int:
    with open(f"/proc/{pid}/fdinfo/{fd}") as info:
        return next(int(line.split()[1], 8) for line in info if line.startswith("flags"))
