"""Look a path up in stacked layers as the kernel's overlay would, without mounting them.

Symbolic links are followed inside the root that the layers form and never out of it: an absolute target starts again at
that root, and `..` at the root stays there. Used to check a base before it is kept; nothing here writes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

__all__ = ["OPAQUE", "find", "is_whiteout"]

OPAQUE = "trusted.overlay.opaque"
_MOST_LINKS = 40


def is_whiteout(status: os.stat_result) -> bool:
    """A character device 0:0 is how overlay marks a name as deleted."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def find(layers: Sequence[Path], path: str) -> Path | None:
    """The file or directory on the host that shows at `path`, or None if nothing does (also a dangling link or a loop).

    Of a directory that several layers hold, the top-most one is returned.
    """
    root = [list(layers)]
    stack = root.copy()
    todo = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    links = 0
    while todo:
        name = todo.pop()
        if name == "..":
            stack = stack[:-1] or root.copy()
            continue
        entries = _step(stack[-1], name)
        if not entries:
            return None
        if entries[0].is_symlink():
            links += 1
            if links > _MOST_LINKS:
                return None
            target = str(entries[0].readlink())
            if target.startswith("/"):
                stack = root.copy()
            todo += [part for part in reversed(target.split("/")) if part not in ("", ".")]
            continue
        if todo and not entries[0].is_dir():
            return None
        stack.append(entries)
    return stack[-1][0]


def _step(directories: Sequence[Path], name: str) -> list[Path]:
    """What `name` is in one merged directory: a single non-directory, or the directories that merge, top-most first."""
    merged: list[Path] = []
    for directory in directories:
        entry = directory / name
        try:
            status = entry.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if is_whiteout(status):
            break
        if not stat.S_ISDIR(status.st_mode):
            return merged or [entry]
        merged.append(entry)
        if _is_opaque(entry):
            break
    return merged


def _is_opaque(directory: Path) -> bool:
    try:
        return os.getxattr(directory, OPAQUE, follow_symlinks=False) == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise
