"""What is done to an unpacked layer before it may lie under a session.

`drop_devices` leaves only the harmless device nodes: a session's overlay is mounted by the host's root, so a node in a
layer is a working door to the host's device for whoever owns that node. `convert_whiteouts` turns the marks that image
archives use for deletion (names that begin with `.wh.`) into those that the kernel's overlay understands.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waypoint.build.lookup import OPAQUE

__all__ = ["convert_whiteouts", "drop_devices"]

_HARMLESS = frozenset(
    os.makedev(major, minor)
    for major, minor in (
        (0, 0),  # overlay's whiteout
        (1, 3),  # null
        (1, 5),  # zero
        (1, 7),  # full
        (1, 8),  # random
        (1, 9),  # urandom
        (5, 0),  # tty
        (5, 2),  # ptmx
    )
)
_MARK = ".wh."
_OPAQUE_MARK = ".wh..wh..opq"


def drop_devices(layer: Path) -> tuple[str, ...]:
    """Remove every block device and every character device but the harmless ones; returns notes that name them."""
    dropped = []
    for entry in _entries(layer):
        # The type comes with the directory listing: only what is neither file, directory nor link costs a stat.
        if entry.is_symlink() or entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False):
            continue
        status = entry.stat(follow_symlinks=False)
        harmless = stat.S_ISCHR(status.st_mode) and status.st_rdev in _HARMLESS
        if harmless or not (stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode)):
            continue
        node = Path(entry.path)
        with _times_kept(node.parent):
            node.unlink()
        dropped.append(os.fsencode("/" / node.relative_to(layer)).decode(errors="replace"))
    if not dropped:
        return ()
    shown = ", ".join(sorted(dropped)[:8]) + (" ..." if len(dropped) > 8 else "")
    return (f"left out {len(dropped)} device node(s) that a session may not have: {shown}",)


def convert_whiteouts(layer: Path) -> None:
    """Marks apply to the layers below only, so a name that the same layer also brings is not deleted by its mark.

    A directory that is both marked and brought hides the one below entirely: it becomes opaque.
    """
    for entry in list(_entries(layer)):
        mark = Path(entry.path)
        if not entry.name.startswith(_MARK) or not os.path.lexists(mark):
            continue
        with _times_kept(mark.parent):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(mark)
            else:
                mark.unlink()
            if entry.name == _OPAQUE_MARK:
                os.setxattr(mark.parent, OPAQUE, b"y")
            else:
                _white_out(mark.parent, entry.name.removeprefix(_MARK))


def _white_out(directory: Path, name: str) -> None:
    if name in ("", ".", "..") or name.startswith(_MARK):  # aufs kept its own files under such names
        return
    victim = directory / name
    if not os.path.lexists(victim):
        os.mknod(victim, stat.S_IFCHR, 0)
    elif victim.is_dir() and not victim.is_symlink():
        os.setxattr(victim, OPAQUE, b"y")


@contextmanager
def _times_kept(directory: Path) -> Iterator[None]:
    """A layer's directories show in sessions: they keep the times that the archive gave them."""
    before = directory.stat()
    yield
    os.utime(directory, ns=(before.st_atime_ns, before.st_mtime_ns))


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Everything below, directories before their contents, never through a link."""
    todo = [str(directory)]
    while todo:
        with os.scandir(todo.pop()) as listing:
            for entry in listing:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                yield entry
