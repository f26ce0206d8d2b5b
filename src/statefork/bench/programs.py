"""The programs that backends consist of, in memory before one of them is timed.

A virtual machine may take away what is in memory of a file that nobody has read for a minute. Where a round takes longer than that,
each backend would begin by reading itself from the disk again, and those that start many programs more than those that live on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from waypoint.kernel import tools
from waypoint.kernel.programs import run_program

__all__ = ["fetch_programs"]

_STARTED = (
    "bash", "conmon", "containerd-shim-runc-v2", "criu", "crun", "docker", "fuse-overlayfs", "ip", "iptables", "mount", "nft",
    "podman", "qemu-img", "qemu-system-x86_64", "runc", "runsc", "sh", "tar",
)  # fmt: skip
"""Those that do not run between the clocks."""
_HELPERS = ("/usr/lib/podman", "/usr/libexec/podman", "/usr/share/seabios", "/usr/share/qemu")
"""What they start or load that is on nobody's path."""
_PIECE = 1 << 20
_MOST_BYTES = 256 << 20
_MOST_SECONDS = 10.0


def fetch_programs(paths: Iterable[Path] | None = None) -> int:
    """Read every program and library that a process of this host runs, and those that backends start; how many there were.

    Bounded: a slow disk must not take the benchmark's time, and what is no plain file is not read at all.
    """
    seen: set[tuple[int, int]] = set()
    deadline = time.monotonic() + _MOST_SECONDS
    for path in _paths() if paths is None else paths:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                known = (found.st_dev, found.st_ino)
                if known in seen or not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
                    continue
                seen.add(known)
                while os.read(fd, _PIECE):
                    if time.monotonic() > deadline:
                        return len(seen)
            finally:
                os.close(fd)
    return len(seen)


@functools.cache
def _started() -> tuple[Path, ...]:
    """Those programs, with their libraries."""
    programs = [Path(found) for name in _STARTED if (found := shutil.which(name)) is not None]
    for directory in map(Path, _HELPERS):
        if directory.is_dir():
            programs += sorted(directory.iterdir())
    libraries: set[Path] = set()
    for program in programs:
        said = run_program(["ldd", str(program)], timeout=10).text if shutil.which("ldd") else ""
        libraries |= {Path(word) for word in said.split() if word.startswith("/") and not word.endswith(":")}
    return (*programs, *sorted(libraries))


def _paths() -> Iterator[Path]:
    yield from _started()
    yield from (tools.prefix() / "bin").glob("*")
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="surrogateescape").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and "x" in fields[1] and fields[5].startswith("/"):
                    yield Path(f"{process}/root{fields[5]}")
