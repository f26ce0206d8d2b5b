"""Take record locks again that CRIU restores and then loses.

POSIX says that a process loses its record locks on a file when it closes any descriptor of that file. CRIU takes the locks, then
opens each mapped file once more for its mapping and closes it: the lock on a file that its owner has mapped (SQLite in WAL mode)
is gone. Here its owner takes it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from functools import partial
from pathlib import Path

from waypoint.kernel.inject import Injection, inside
from waypoint.kernel.processes import namespace_pids, pid_inside
from waypoint.kernel.wire_format import messages, signed, unpack

__all__ = ["relock"]

_FCNTL = 72
_POSIX = 1
_FLOCK = struct.Struct("=hhxxxxqqixxxx")


def relock(init_pid: int, images: Path) -> None:
    """OSError when a lock cannot be had: another process of the tree was faster."""
    wanted = [lock for lock in _saved_locks(images) if lock[0] & _POSIX]
    if not wanted:
        return
    hosts = {_inside(pid): pid for pid in namespace_pids(init_pid)}
    by_process: dict[int, list[tuple[int, bytes]]] = {}
    for _, kind, owner, fd, start, length in wanted:
        pid = hosts.get(owner, 0)
        if pid and _maps(pid, fd):
            by_process.setdefault(pid, []).append((fd, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)))
    for pid, locks in by_process.items():
        with contextlib.suppress(ProcessLookupError):
            inside(pid, partial(_lock, locks))


def _lock(locks: list[tuple[int, bytes]], process: Injection) -> None:
    for fd, lock in locks:
        process.call(_FCNTL, fd, fcntl.F_SETLK, lock)


def _saved_locks(images: Path) -> list[tuple[int, ...]]:
    """(flag, type, pid, fd, start, length) of each lock in CRIU's image, whose fields are numbered in this order."""
    found = []
    for message in messages(images / "filelocks.img"):
        fields = dict(unpack(message))
        found.append(tuple(signed(value) for number in range(1, 7) if isinstance(value := fields[number], int)))
    return found


def _inside(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        return pid_inside(pid)
    return 0


def _maps(pid: int, fd: int) -> bool:
    try:
        inode = os.stat(f"/proc/{pid}/fd/{fd}").st_ino
        with open(f"/proc/{pid}/maps", errors="replace") as lines:
            return any(line.split(maxsplit=5)[4] == str(inode) for line in lines)
    except FileNotFoundError:
        return False
