"""What the machine is, and what else it was doing."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["Watch", "describe", "disk_used_bytes", "memory_used_bytes", "pss_bytes"]


def describe() -> dict[str, Any]:
    return {
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_mib": _meminfo("MemTotal") // 2**20,
        "python": platform.python_version(),
    }


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
