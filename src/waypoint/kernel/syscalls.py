"""System calls that Python has no function for."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Sequence

__all__ = ["open_inside", "pidfd_getfd", "read_memory", "same_bytes", "set_aside", "sync_file_system"]

_libc = ctypes.CDLL(None, use_errno=True)
_OPENAT2 = 437
_SYNCFS = 306 if os.uname().machine == "x86_64" else 267
_PIDFD_GETFD = 438
_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_IN_ROOT = 0x10
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_PAGE = os.sysconf("SC_PAGESIZE")
_TOP = 7 if sys.byteorder == "little" else 0
"""Of the eight bytes that pagemap has of a page the one with bits 56 and up."""
_OWN = bytes(top for top in range(256) if top & 0x81 == 0x81)
"""Present (bit 63), and mapped once (56)."""
_TRIES = 128
"""EAGAIN: somewhere a directory was renamed while `..` was looked up, and the kernel cannot tell whether it led out."""


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def open_inside(
    root_fd: int, path: str, flags: int, *, mode: int = 0, follow: bool = True, one_mount: bool = False
) -> int:
    """Open `path` as a process whose root is `root_fd` would: no symlink made inside a session can lead out of it.

    `one_mount`: refuse (EXDEV) what lies on another mount than the root's own.
    """
    resolve = _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS | (0 if follow else _RESOLVE_NO_SYMLINKS)
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve | (_RESOLVE_NO_XDEV if one_mount else 0))
    for _ in range(_TRIES):
        fd = _libc.syscall(_OPENAT2, root_fd, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return int(fd)
        error = ctypes.get_errno()
        if error != errno.EAGAIN:
            break
    raise OSError(error, os.strerror(error), path)


def sync_file_system(fd: int) -> None:
    """syncfs(2): everything on the file system of `fd` is on disk when this returns."""
    if _libc.syscall(_SYNCFS, fd):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def set_aside(fd: int, size: int) -> None:
    """Room on the disk for so much of a file, all at once, where its file system can: it looks for it with every block else.

    OSError with ENOSPC: there is no such room.
    """
    while size > 0 and _libc.fallocate(fd, 0, 0, size):
        error = ctypes.get_errno()
        if error in (errno.EOPNOTSUPP, errno.ENOSYS):
            return
        if error != errno.EINTR:
            raise OSError(error, os.strerror(error))


def read_memory(pid: int, ranges: Sequence[tuple[int, int]], into: bytearray, *, shared: bool) -> bool:
    """Memory of another process, one range of whole pages after the other (1,024 at most); False if part of it could not be had.

    `shared`: others may have some of its pages, and keep them: to read one by process_vm_readv the kernel first gives the process
    one of its own.
    """
    size = sum(end - start for start, end in ranges)
    if shared and not _are_own(pid, ranges):
        return _read_one_by_one(pid, ranges, into)
    local = (ctypes.c_size_t * 2)(ctypes.addressof((ctypes.c_char * len(into)).from_buffer(into)), size)
    remote = (ctypes.c_size_t * (2 * len(ranges)))(*(word for start, end in ranges for word in (start, end - start)))
    return bool(_libc.process_vm_readv(pid, local, 1, remote, len(ranges), 0) == size)


def _are_own(pid: int, ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether each page is in memory and in no other process, after a fork or by KSM."""
    with contextlib.suppress(OSError):
        pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for start, end in ranges:
                told = os.pread(pagemap, (end - start) // _PAGE * 8, start // _PAGE * 8)
                if len(told) != (end - start) // _PAGE * 8 or told[_TOP::8].translate(None, _OWN):
                    return False
            return True
        finally:
            os.close(pagemap)
    return False


def _read_one_by_one(pid: int, ranges: Sequence[tuple[int, int]], into: bytearray) -> bool:
    whole, at = memoryview(into), 0
    with contextlib.suppress(OSError):
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for start, end in ranges:
                if os.preadv(memory, [whole[at : at + end - start]], start) != end - start:
                    return False
                at += end - start
            return True
        finally:
            os.close(memory)
    return False


def same_bytes(one: bytearray, other: bytearray, start: int, size: int) -> bool:
    """Without copying either, and without the interpreter's lock."""
    here = ctypes.addressof(ctypes.c_char.from_buffer(one, start))
    there = ctypes.addressof(ctypes.c_char.from_buffer(other, start))
    return bool(_libc.memcmp(here, there, size) == 0)


def pidfd_getfd(pid: int, fd: int) -> int:
    """A duplicate, here, of descriptor `fd` of another process."""
    process = os.pidfd_open(pid)
    try:
        found = _libc.syscall(_PIDFD_GETFD, process, fd, 0)
        if found < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), f"/proc/{pid}/fd/{fd}")
        return int(found)
    finally:
        os.close(process)
