"""Where ext4 puts new files.

It keeps a directory and what is in it in one block group, and new directories near their parent. In a store that makes and
removes files all the time that group fills up with inodes that were deleted a moment ago, which ext4 does not use again for some
minutes and looks at one by one each time it needs a new one: then every new file takes 0.7 ms instead of 0.03. A directory with
the `T` attribute has its subdirectories spread over the whole disk instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct

__all__ = ["spread_children"]

_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_TOP_DIRECTORY = 0x00020000
_FLAGS = struct.Struct("=l")


def spread_children(directory: str) -> None:
    """A hint: other file systems do not take it, and are as quick without."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            flags = _FLAGS.unpack(fcntl.ioctl(fd, _GET_FLAGS, _FLAGS.pack(0)))[0]
            if not flags & _TOP_DIRECTORY:
                fcntl.ioctl(fd, _SET_FLAGS, _FLAGS.pack(flags | _TOP_DIRECTORY))
    finally:
        os.close(fd)
