"""What a tree of processes has used, as /proc tells it. Without a cgroup of its own a session has no other books."""

from __future__ import annotations

import contextlib
import os

from waypoint.kernel.processes import namespace_pids, read_proc

__all__ = ["anonymous_bytes", "tree_usage"]

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def anonymous_bytes(pid: int) -> int:
    """Of resident memory, what is neither a file's nor shared."""
    _, resident, shared, *_ = map(int, read_proc(f"/proc/{pid}/statm").split())
    return (resident - shared) * _PAGE


def tree_usage(init_pid: int) -> tuple[float, int]:
    """(CPU seconds, bytes of resident memory) of a process and all its descendants.

    The time of those that have ended is in the books of those that waited for them. A page that several share is
    counted for each.
    """
    ticks = pages = 0
    for pid in namespace_pids(init_pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            text = read_proc(f"/proc/{pid}/stat")
            fields = text[text.rindex(b")") + 2 :].split()
            ticks += sum(map(int, fields[11:15]))
            pages += int(fields[21])
    return ticks / _TICKS, pages * _PAGE
