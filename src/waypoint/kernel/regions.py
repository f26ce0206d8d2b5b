"""What the kernel has told of a process's memory, region by region: thousands of them, so a library of our own works on them."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from waypoint.errors import KernelError
from waypoint.kernel import processors, tools

__all__ = ["WRITTEN", "Range", "Regions"]

Range = tuple[int, int]
"""Addresses, from and up to."""
WRITTEN = 1 << 1
_REGION = struct.Struct("=QQQ")
_ENTRY_BYTES = 40
_PAGE = 4096
_WORTH_TWO = 4 << 20
"""Written bytes, for which a second thread is started."""


@cache
def _library(path: str) -> ctypes.CDLL:
    found = ctypes.CDLL(path, use_errno=True)
    number, place = ctypes.c_int, ctypes.c_uint64
    found.save_written.argtypes = [number, number, ctypes.c_void_p, ctypes.c_size_t, place, place]
    for name, kinds in (("write_entries", [ctypes.c_void_p]), ("merge", [ctypes.c_void_p]), ("written_bytes", [])):
        function = getattr(found, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *kinds]
        function.restype = ctypes.c_size_t
    return found


class Regions:
    """In order of address, none over another; some were written, the others not."""

    def __init__(self, told: bytearray) -> None:
        """`told`: what PAGEMAP_SCAN puts into its vector."""
        self._count = len(told) // _REGION.size
        self._held = (ctypes.c_char * len(told)).from_buffer(told) if told else (ctypes.c_char * 0)()
        self._library = _library(str(tools.pages_path()))

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """From, to, kind."""
        return _REGION.iter_unpack(memoryview(self._held))

    def written(self) -> list[Range]:
        return [(start, end) for start, end, kind in self if kind & WRITTEN]

    def clean(self) -> list[Range]:
        return [(start, end) for start, end, kind in self if not kind & WRITTEN]

    def whole(self) -> list[Range]:
        """Both, with what touches made one. KernelError: they are not what they should be."""
        merged = ctypes.create_string_buffer(self._count * _REGION.size)
        count = self._library.merge(self._held, self._count, merged)
        if count > self._count:
            raise KernelError("the kernel has told of a page twice, or not in order")
        return [(start, end) for start, end, _ in _REGION.iter_unpack(merged.raw[: count * _REGION.size])]

    def written_bytes(self) -> int:
        return int(self._library.written_bytes(self._held, self._count))

    def save_written(self, pid: int, file: int) -> bool:
        """The written pages, one after the other; False if some of them cannot be read, and the file is then of no use.

        Of many of them the one half is read while the other is written; on whichever processor is idle.
        """
        size = self.written_bytes()
        if size < _WORTH_TWO:
            return self._save(pid, file, 0, size)
        half = size // 2 & -_PAGE
        with ThreadPoolExecutor(1, "written", processors.spread, (processors.allowed(),)) as other:
            second = other.submit(self._save, pid, file, half, size)
            first = self._save(pid, file, 0, half)
            return second.result() and first

    def _save(self, pid: int, file: int, start: int, end: int) -> bool:
        if self._library.save_written(pid, file, self._held, self._count, start, end) == 0:
            return True
        error = ctypes.get_errno()
        if error == errno.EFAULT:
            return False
        raise OSError(error, os.strerror(error))

    def entries(self) -> bytes:
        """Of a CRIU pagemap, each behind its size: the written ones are in the image itself, the others in its parent."""
        room = ctypes.create_string_buffer(self._count * _ENTRY_BYTES)
        used = self._library.write_entries(self._held, self._count, room)
        return room.raw[:used]
