"""Has anything run? The scheduler counts the nanoseconds that each thread has had a processor; equal counts, and it has not.

A process that has not run has not changed its memory, its descriptors or any file, and has no new children. So it is enough to
look at the threads that are known.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from waypoint.kernel.processes import namespace_pids

__all__ = ["io_counts", "run_time", "run_times"]

_ASLEEP = "STZtX"


def run_times(init_pid: int) -> dict[tuple[int, int], int] | None:
    """(pid, tid) -> nanoseconds of every thread of a session but its init's; None while one of them is at work."""
    found = {}
    try:
        for pid in namespace_pids(init_pid):
            if pid == init_pid:
                continue
            for name in os.listdir(f"/proc/{pid}/task"):
                found[pid, int(name)] = run_time(pid, int(name))
                with open(f"/proc/{pid}/task/{name}/stat") as stat:
                    if stat.read().rpartition(")")[2].split()[0] not in _ASLEEP:
                        return None
    except (FileNotFoundError, ProcessLookupError):
        return None
    return found


def run_time(pid: int, tid: int) -> int:
    """FileNotFoundError or ProcessLookupError when it is gone."""
    with open(f"/proc/{pid}/task/{tid}/schedstat") as text:
        return int(text.read().split()[0])


def io_counts(pids: Iterable[int]) -> dict[int, tuple[int, int]]:
    """How many reads and writes each process has done."""
    found = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/io") as lines:
            counts = dict(line.split(": ") for line in lines.read().splitlines())
            found[pid] = int(counts["syscr"]), int(counts["syscw"])
    return found
