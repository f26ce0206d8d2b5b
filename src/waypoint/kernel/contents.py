"""The bytes of regular files: copied with their holes, compared to the last byte. Names are the caller's business."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

__all__ = ["copy_contents", "open_regular", "same_contents"]

_PIECE = 1 << 20
_WHOLE = 1 << 26
_NO_CLONE = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


def open_regular(directory: int, name: str, *, quietly: bool = False) -> int:
    """Open a regular file to read; OSError(EINVAL) when it is something else. Never waits, never follows a link.

    A session may put a fifo where a file was a moment ago: without O_NONBLOCK opening it would hang the host's side. `quietly`
    leaves the access time alone.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (os.O_NOATIME if quietly else 0)
    fd = os.open(name, flags, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return fd


def copy_contents(source: int, target: int, on_bytes: Callable[[int], None]) -> None:
    """Copy the data to the empty file `target`; holes stay holes. What is appended meanwhile is not copied."""
    size = os.fstat(source).st_size
    end = 0
    while end < size:
        try:
            start = os.lseek(source, end, os.SEEK_DATA)
            end = min(size, os.lseek(source, start, os.SEEK_HOLE))
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end, or the file has shrunk
                break
            if error.errno != errno.EINVAL:
                raise
            start, end = end, size  # a file system that knows no holes
        _copy_range(source, target, start, end, on_bytes)
    os.ftruncate(target, size)


def _copy_range(source: int, target: int, start: int, end: int, on_bytes: Callable[[int], None]) -> None:
    cloning = True
    while start < end:
        if cloning:
            try:  # shares the blocks where the file system can, and keeps the bytes out of this process where it cannot
                done = os.copy_file_range(source, target, min(_WHOLE, end - start), start, start)
            except OSError as error:
                if error.errno not in _NO_CLONE:
                    raise
                cloning = False
                continue
        else:
            piece = os.pread(source, min(_PIECE, end - start), start)
            done = os.pwrite(target, piece, start) if piece else 0
        if done == 0:  # the file has shrunk
            return
        start += done
        on_bytes(done)


def same_contents(one: int, other: int) -> bool:
    """Byte by byte: equal sizes and times prove nothing, and an overlay's inode numbers survive a change of content."""
    at = 0
    while True:
        piece = os.pread(one, _PIECE, at)
        if piece != os.pread(other, _PIECE, at):
            return False
        if not piece:
            return True
        at += len(piece)
