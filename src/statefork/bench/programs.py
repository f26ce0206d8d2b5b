"""The programs that backends consist of, in memory before one of them is timed.

A virtual machine may take away what is in memory of a file that nobody has read for a minute. Where a round takes longer than that,
each backend would begin by reading itself from the disk again, and those that start many programs more than those that live on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from waypoint.kernel import tools

__all__ = ["fetch_programs"]

_STARTED = (
    "bash", "conmon", "containerd-shim-runc-v2", "criu", "crun", "docker", "fuse-overlayfs", "ip", "iptables", "mount", "nft",
    "podman", "qemu-img", "qemu-system-x86_64", "runc", "runsc", "sh", "tar",
)  # fmt: skip
"""Those that do not run between the clocks."""
_PIECE = 1 << 20


def fetch_programs() -> int:
    """Read every program and library that a process of this host runs, and those that backends start; how many."""
    seen: set[tuple[int, int]] = set()
    for path in _paths():
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            if (found.st_dev, found.st_ino) in seen:
                continue
            seen.add((found.st_dev, found.st_ino))
            while file.read(_PIECE):
                pass
    return len(seen)


def _paths() -> Iterator[Path]:
    for name in _STARTED:
        found = shutil.which(name)
        if found is not None:
            yield Path(found)
    yield from (tools.prefix() / "bin").glob("*")
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="surrogateescape").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and "x" in fields[1] and fields[5].startswith("/"):
                    yield Path(f"{process}/root{fields[5]}")
