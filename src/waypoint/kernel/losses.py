"""What a snapshot of these processes will not bring back, and says so: looked for, and named only where it is there.

What is refused outright is in `obstacles`; what is given back after a restore is in `forgotten`.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import stat

from waypoint.kernel.processes import namespace_pids, pid_inside
from waypoint.kernel.sockets import CLOSED, LISTENING, TIME_WAIT, inet_sockets
from waypoint.kernel.syscalls import pidfd_getfd

__all__ = ["find_losses"]


def find_losses(init_pid: int, *, filtered: bool) -> list[str]:
    """Sentences for a person. `filtered`: the session's system call filter is on, so it has no keyring, Landlock or seal."""
    found = _outside_connections(init_pid)
    for pid in namespace_pids(init_pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            found += _descriptors(pid)
            found += _nested_terminal(pid)
            found += _personality(pid)
            if not filtered:
                found += _sealed(pid)
    if not filtered:
        found.append("keyrings and Landlock rules, if there are any: this session's system call filter is off")
    return found


def _outside_connections(init_pid: int) -> list[str]:
    found = []
    for one in inet_sockets(init_pid):
        if not one.kind.startswith("tcp") or one.state in (LISTENING, TIME_WAIT, CLOSED):
            continue
        if one.remote is None:
            found.append(
                f"the connection that is just being made from {one.local}: it is reset in every restored session"
            )
            continue
        here, there = (ipaddress.ip_address(name.rpartition(":")[0].strip("[]")) for name in (one.local, one.remote))
        inner = getattr(there, "ipv4_mapped", None) or there
        if here != there and not inner.is_loopback:
            found.append(f"the connection to {one.remote}: it is reset in every restored session")
    return found


def _descriptors(pid: int) -> list[str]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/{pid}/fd/{name}")
            if link == "anon_inode:[eventfd]":
                found += _semaphore(pid, name)
            elif link.startswith("/") and not link.startswith(("/dev/", "/proc/", "/sys/")):
                found += _database(pid, int(name), link)
    return found


def _semaphore(pid: int, fd: str) -> list[str]:
    """An eventfd that counts down by one comes back as one that is emptied by a read."""
    with open(f"/proc/{pid}/fdinfo/{fd}") as info:
        if any(line.split() == ["eventfd-semaphore:", "1"] for line in info):
            return [f"that eventfd {fd} of process {pid_inside(pid)} is a semaphore: it comes back as a counter"]
    return []


def _database(pid: int, fd: int, path: str) -> list[str]:
    """SQLite compares inode numbers before it writes with a rollback journal; in WAL mode it does not.

    Read through the process's own descriptor: opening the file anew would break a lease on it.
    """
    if not stat.S_ISREG(os.stat(f"/proc/{pid}/fd/{fd}").st_mode):
        return []
    own = pidfd_getfd(pid, fd)
    try:
        if fcntl.fcntl(own, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
            return []
        header = os.pread(own, 19, 0)
    finally:
        os.close(own)
    if header[:16] != b"SQLite format 3\0" or header[18] != 1:
        return []
    return [
        f"writing to the SQLite database {path} through the connection that process {pid_inside(pid)} has open: after a restore it may "
        "say that the database is readonly; open it anew, or use WAL mode"
    ]


def _nested_terminal(pid: int) -> list[str]:
    """CRIU gives a terminal to the leader of its session only; a shell below it cannot move jobs about any more."""
    with open(f"/proc/{pid}/stat", "rb") as line:
        words = line.read().rpartition(b")")[2].split()
    session, terminal, foreground, group = (int(words[index]) for index in (3, 4, 5, 2))
    if pid == session or terminal == 0 or foreground != group:
        return []
    with open(f"/proc/{pid}/comm") as comm:
        name = comm.read().strip()
    return [f"the controlling terminal of process {pid_inside(pid)} ({name}): job control and /dev/tty inside it end"]


def _personality(pid: int) -> list[str]:
    """CRIU writes it down and forgets it; only the process itself could set it again."""
    with open(f"/proc/{pid}/personality") as text:
        found = text.read().strip()
    if int(found, 16) == 0:
        return []
    return [f"the personality {found} of process {pid_inside(pid)} (setarch): it comes back as an ordinary one"]


def _sealed(pid: int) -> list[str]:
    with open(f"/proc/{pid}/smaps", errors="replace") as lines:
        if any(line.startswith("VmFlags:") and " sl" in line for line in lines):
            return [f"memory seals (mseal) of process {pid_inside(pid)}: its mappings come back unsealed"]
    return []
