"""What the kernel says about a file, in Waypoint's own errors. One boundary for everything that looks into sessions."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from waypoint.errors import DiskFull, Exists, KernelError, NotFound, UsageError, WaypointError

__all__ = ["explain", "explained"]

_WORDS: dict[int, tuple[type[WaypointError], str]] = {
    errno.ENOENT: (NotFound, "no such file or directory"),
    errno.ENOTDIR: (UsageError, "a part of this path is not a directory"),
    errno.EISDIR: (UsageError, "is a directory"),
    errno.EEXIST: (Exists, "exists already"),
    errno.ENOTEMPTY: (UsageError, "is a directory that is not empty"),
    errno.ELOOP: (UsageError, "too many symbolic links, or a link where none is followed"),
    errno.ENAMETOOLONG: (UsageError, "the path is too long; reach it with a command inside the session"),
    errno.EXDEV: (
        UsageError,
        "lies on a mount of its own in the session, not in its files; read it with a command inside",
    ),
    errno.EBUSY: (UsageError, "is in use, maybe as a mount point"),
    errno.ENOSPC: (DiskFull, "no space left on the disk"),
    errno.EDQUOT: (DiskFull, "the disk quota is used up"),
    errno.EROFS: (UsageError, "is read-only"),
}


def explained(error: OSError, name: str) -> WaypointError:
    kind, words = _WORDS.get(error.errno or 0, (KernelError, error.strerror or str(error)))
    return kind(f"{name}: {words}", path=name)


@contextmanager
def explain(name: str) -> Iterator[None]:
    """An OSError inside is about the file `name`."""
    try:
        yield
    except OSError as error:
        raise explained(error, name) from error
