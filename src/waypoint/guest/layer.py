"""The guest layer: what every session needs in its root besides its base. Immutable, named by its content."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["OPAQUE", "PRIVATE", "build_guest_layer", "guest_files"]

PRIVATE = ".waypoint"
"""The one directory in a session's root that is ours; diff and tree never show it."""
OPAQUE = "trusted.overlay.opaque"

_NATIVE = Path(__file__).resolve().parent / "native"
_DEVICES = (("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0))
_LINKS = (
    ("ptmx", "pts/ptmx"),
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
)


def guest_files() -> list[Path]:
    return [_NATIVE / "bashrc", _NATIVE / "shrc"]


def build_guest_layer(root: Path, init: Path) -> None:
    """Fill the empty directory `root`. Device nodes are made here, by the host: nobody inside can make any."""
    private = root / PRIVATE
    for path, mode in ((private, 0o755), (private / "run", 0o711), (private / "empty", 0o555)):
        path.mkdir()
        path.chmod(mode)
    target = private / "init"
    target.write_bytes(init.read_bytes())
    target.chmod(0o555)
    for source in guest_files():
        (private / source.name).write_bytes(source.read_bytes())
        (private / source.name).chmod(0o444)
    dev = root / "dev"
    dev.mkdir(mode=0o755)
    os.setxattr(dev, OPAQUE, b"y")
    for name, major, minor in _DEVICES:
        os.mknod(dev / name, 0o666 | 0o020000, os.makedev(major, minor))
        (dev / name).chmod(0o666)
    for name, to in _LINKS:
        (dev / name).symlink_to(to)
    for name, mode in (("pts", 0o755), ("mqueue", 0o1777), ("shm", 0o1777)):
        (dev / name).mkdir()
        (dev / name).chmod(mode)
    for name in ("proc", "sys"):
        (root / name).mkdir(mode=0o555)
    root.chmod(0o755)
