"""What the machine is, and what else it was doing."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "InUse", "Watch", "describe", "disk_used_bytes", "forget_big_files", "memory_used_bytes", "merging", "pss_bytes", "until_merged",
    "use_memory",
]  # fmt: skip

_POPULATE_WRITE = 23
_TRIED_MIB = 256
_MOST_SMALL_MIB = 1024
_BIG_BYTES = 16 << 20
_PAGES = 2048
_TAKEN_NS = 3000
"""A page that is there is read in 0.1 µs, and 0.5 from far away; one that the host has to bring back takes 10 to 100."""
_FEW = _PAGES // 100


def describe() -> dict[str, Any]:
    return {
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_mib": _meminfo("MemTotal") // 2**20,
        "python": platform.python_version(),
        "first_use_us": _page_us(),
        "second_use_us": _page_us(),
    }


def _page_us() -> float:
    return round(use_memory(_TRIED_MIB) / (2 * _TRIED_MIB << 20) * mmap.PAGESIZE * 1e6, 2)


def use_memory(mib: int) -> float:
    """Use and free so much memory in big pages, and as much (at most a GiB) in small ones; how many seconds that took.

    A virtual machine may give free memory back to its host within seconds, and the next to use it waits for every page, thirty
    times as long as for one that was just freed. Without this that would be whoever comes first. Who writes a file in big pieces
    gets big pages for it, who writes it page by page, as CRIU does, what is left over in small ones. As much as half of what is
    available where all would be more: what is in memory of files has to make room for it, before the clock and not within it.
    """
    fits = _meminfo("MemAvailable") // 2**21
    small = min(mib, _MOST_SMALL_MIB, fits)
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        for kind, size in ((mmap.MADV_HUGEPAGE, min(mib, fits - small)), (mmap.MADV_NOHUGEPAGE, small)):
            if size > 0:
                memory = stack.enter_context(mmap.mmap(-1, size << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
                with contextlib.suppress(OSError):
                    memory.madvise(kind)
                    memory.madvise(_POPULATE_WRITE)
    return time.perf_counter() - began


def forget_big_files(directory: Path) -> None:
    """What is in memory of its big files, all of them on disk. To make room for use_memory the kernel would take what is small, too."""
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                fd = os.open(f"{place}/{name}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if os.fstat(fd).st_size >= _BIG_BYTES:
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)


class InUse:
    """Memory that stays in use. A virtual machine's host may take such pages away, too: nothing in the machine tells of it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._memory.write(bytes(len(self._memory)))

    def was_taken(self) -> bool:
        """Whether more than one page of a hundred had to be brought back since this was last asked."""
        clock, memory, slow = time.perf_counter_ns, self._memory, 0
        for at in range(0, len(memory), mmap.PAGESIZE):
            began = clock()
            _ = memory[at]
            slow += clock() - began > _TAKEN_NS
        return slow > _FEW


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def memory_used_bytes() -> int:
    """Of the whole host, without caches that it can drop."""
    return _meminfo("MemTotal") - _meminfo("MemAvailable")


def pss_bytes() -> int:
    """Of every process of the host: a page that several share counts once, in parts."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                lines = (entry / "smaps_rollup").read_text().splitlines()
                total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0) * 1024
    return total


_KSM = Path("/sys/kernel/mm/ksm")
_BRISK = {"pages_to_scan": "5000", "run": "1"}


@contextlib.contextmanager
def merging() -> Iterator[None]:
    """The host's KSM is on meanwhile, and looks at enough pages to come to an end; afterwards it is as it was."""
    before = {name: (_KSM / name).read_text() for name in _BRISK}
    try:
        for name, value in _BRISK.items():
            (_KSM / name).write_text(value)
        yield
    finally:
        for name, value in before.items():
            (_KSM / name).write_text(value)


def until_merged(most_seconds: float = 60.0) -> None:
    """Wait until nothing more is merged: two whole looks at all pages find no more than the one before."""
    until = time.monotonic() + most_seconds
    shared = -1
    while time.monotonic() < until:
        looks = int((_KSM / "full_scans").read_text())
        while int((_KSM / "full_scans").read_text()) < looks + 2 and time.monotonic() < until:
            time.sleep(0.2)
        now = int((_KSM / "pages_sharing").read_text())
        if now <= shared * 1.01:
            return
        shared = now


def disk_used_bytes(path: Path) -> int:
    """Allocated blocks of the file system at `path`, what is written and not yet on disk included."""
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


class Watch:
    """The load of the machine, sampled while it is entered."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._stop = threading.Event()
        self._samples: list[float] = []
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watch:
        self.before = os.getloadavg()[0]
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._seconds):
            self._samples.append(os.getloadavg()[0])

    def to_json(self) -> dict[str, Any]:
        seen = [self.before, *self._samples]
        return {
            "load_before": round(self.before, 2),
            "load_most": round(max(seen), 2),
            "load_mean": round(sum(seen) / len(seen), 2),
            "seconds": round(time.monotonic() - self._began, 1),
        }
