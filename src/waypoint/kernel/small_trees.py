"""Copy a tree of a few entries in this process: starting a `cp` takes longer than most sealed layers need.

Everything is kept that `cp -a` keeps: kinds, owners, permissions, times, attributes (overlay's own too), holes, hard links.
"""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["MOST_BYTES", "MOST_ENTRIES", "copy_attributes", "copy_small"]

MOST_ENTRIES = 64
MOST_BYTES = 1 << 20
_CHUNK = 1 << 18


def copy_small(source: str, target: str) -> None:
    """`target` must not exist. OSError as the kernel says it; then part of it may be there."""
    _copy(source, target, os.lstat(source), {})


def _copy(source: str, target: str, st: os.stat_result, seen: dict[int, str]) -> None:
    mode = st.st_mode
    if stat.S_ISDIR(mode):
        os.mkdir(target, 0o700)
        with os.scandir(source) as entries:
            for entry in entries:
                _copy(entry.path, f"{target}/{entry.name}", entry.stat(follow_symlinks=False), seen)
    else:
        if st.st_nlink > 1:
            first = seen.setdefault(st.st_ino, target)
            if first is not target:
                os.link(first, target, follow_symlinks=False)
                return
        if stat.S_ISREG(mode):
            _copy_content(source, target, st)
        elif stat.S_ISLNK(mode):
            os.symlink(os.readlink(source), target)
        else:
            os.mknod(target, mode, st.st_rdev)
    copy_attributes(source, target, st)


def copy_attributes(source: str, target: str, st: os.stat_result) -> None:
    """In this order: a change of owner takes capabilities away, one of permissions changes access lists."""
    os.chown(target, st.st_uid, st.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(st.st_mode):
        os.chmod(target, stat.S_IMODE(st.st_mode))
    for name in os.listxattr(source, follow_symlinks=False):
        os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
    os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns), follow_symlinks=False)


def _copy_content(source: str, target: str, st: os.stat_result) -> None:
    reading = os.open(source, os.O_RDONLY | os.O_NOATIME | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            at = 0
            while (start := _data(reading, at)) is not None:
                at = start
                end = os.lseek(reading, start, os.SEEK_HOLE)
                while at < end:
                    data = os.pread(reading, min(_CHUNK, end - at), at)
                    if not data:
                        return  # it was made shorter meanwhile: what is there is copied
                    at += os.pwrite(writing, data, at)
            os.ftruncate(writing, max(st.st_size, at))
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _data(fd: int, at: int) -> int | None:
    """Where the next bytes are that are not a hole."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise
