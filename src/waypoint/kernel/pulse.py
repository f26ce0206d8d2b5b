"""Has anything run? The scheduler counts the nanoseconds that each thread has had a processor; equal counts, and it has not.

A process that has not run has not changed its memory, its descriptors or any file, and has no new children. So it is enough to
look at the threads that are known.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from waypoint.kernel.processes import namespace_pids, read_proc

__all__ = ["Clocks", "io_counts"]

_ASLEEP = "STZtX"
_MOST_OPEN = 64
"""Opening such a file takes ten times as long as reading it again."""


class Clocks:
    """The clocks of every thread of a session but its init's, as they stood when this was made."""

    def __init__(self, init_pid: int) -> None:
        """`settled` is False when one of them was at work even then, or ended."""
        self._files: list[int] = []
        self._paths: list[str] = []
        self._before = 0
        self.settled = False
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            self.settled = all(self._add(pid) for pid in namespace_pids(init_pid) if pid != init_pid)

    def _add(self, pid: int) -> bool:
        for name in os.listdir(f"/proc/{pid}/task"):
            path = f"/proc/{pid}/task/{name}"
            if len(self._files) < _MOST_OPEN:
                self._files.append(os.open(f"{path}/schedstat", os.O_RDONLY | os.O_CLOEXEC))
                self._before += _nanoseconds(self._files[-1])
            else:
                self._paths.append(f"{path}/schedstat")
                self._before += _read(self._paths[-1])
            with open(f"{path}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] not in _ASLEEP:
                    return False
        return True

    def ran(self) -> int | None:
        """Nanoseconds since; None when that cannot be told, or a thread is gone."""
        if not self.settled:
            return None
        try:
            return sum(map(_nanoseconds, self._files)) + sum(map(_read, self._paths)) - self._before
        except (FileNotFoundError, ProcessLookupError):
            return None

    def close(self) -> None:
        self.settled = False
        while self._files:
            os.close(self._files.pop())


def _nanoseconds(file: int) -> int:
    """ProcessLookupError when the thread is gone."""
    return int(os.pread(file, 64, 0).split()[0])


def _read(path: str) -> int:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _nanoseconds(file)
    finally:
        os.close(file)


def io_counts(pids: Iterable[int]) -> dict[int, tuple[int, int]]:
    """How many reads and writes each process has done."""
    found = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            counts = dict(line.split(b": ") for line in read_proc(f"/proc/{pid}/io").splitlines())
            found[pid] = int(counts[b"syscr"]), int(counts[b"syscw"])
    return found
