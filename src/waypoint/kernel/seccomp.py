"""Compile the table of `seccomp_profile` into the filter that the launcher loads.

libseccomp does the compiling, once per set of capabilities: it takes some 90 ms, so the caller keeps the
result under `filter_key`. The kernel runs the filter at every system call of a session; libseccomp's search tree keeps
that short, and calls that are allowed with any arguments skip it (the kernel finds them out when the filter is loaded).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2s
from pathlib import Path

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel import seccomp_profile as profile
from waypoint.kernel import shorter
from waypoint.kernel.capabilities import DEFAULT_CAPABILITIES, capability_mask

__all__ = ["filter_key", "filter_program"]

_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_BAD_ARCHITECTURE, _OPTIMIZE = 2, 8
_SEARCH_TREE = 2
_LESS, _EQUAL, _MASKED_EQUAL = 2, 4, 7

_X86_64, _X86 = 0xC000003E, 0x40000003
_AARCH64, _ARM = 0xC00000B7, 0x40000028
_ARCHITECTURES = {"x86_64": (_X86_64, _X86), "aarch64": (_AARCH64, _ARM)}
"""The native one first, then the one whose programs the same kernel runs. Whatever else calls is killed.

x32, which Docker allows and hardly a kernel has, is x86-64 with a bit set in the number: higher than any known one."""

_HIGHEST_CONCEIVABLE = 2048


class _Comparison(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


class _Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint), ("minor", ctypes.c_uint), ("micro", ctypes.c_uint))


_library: ctypes.CDLL | None = None


def _load() -> ctypes.CDLL:
    global _library
    if _library is None:
        try:
            library = ctypes.CDLL("libseccomp.so.2")
        except OSError as error:
            raise HostUnsupported(
                f"the default system call filter needs libseccomp: {error}; run `apt-get install libseccomp2`",
                fix="apt-get install libseccomp2",
                feature="libseccomp",
            ) from error
        context, word, text = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_char_p
        library.seccomp_version.restype = ctypes.POINTER(_Version)
        library.seccomp_init.argtypes, library.seccomp_init.restype = [word], context
        library.seccomp_release.argtypes, library.seccomp_release.restype = [context], None
        library.seccomp_attr_set.argtypes = [context, ctypes.c_int, word]
        library.seccomp_arch_add.argtypes = [context, word]
        library.seccomp_rule_add_array.argtypes = [context, word, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
        library.seccomp_export_bpf.argtypes = [context, ctypes.c_int]
        library.seccomp_syscall_resolve_name.argtypes = [text]
        library.seccomp_syscall_resolve_num_arch.argtypes = [word, ctypes.c_int]
        library.seccomp_syscall_resolve_num_arch.restype = ctypes.c_void_p
        _library = library
    return _library


def _architectures() -> tuple[int, ...]:
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise HostUnsupported(
            f"no system call table for {machine}; known: {', '.join(_ARCHITECTURES)}",
            feature="seccomp",
            machine=machine,
        )
    return _ARCHITECTURES[machine]


def filter_key(capabilities: Iterable[str] = DEFAULT_CAPABILITIES) -> str:
    """A file name that changes whenever `filter_program` would give another program."""
    version = _load().seccomp_version().contents
    sources = b"".join(Path(path).read_bytes() for path in (__file__, profile.__file__, shorter.__file__))
    parts = (sources, platform.machine(), version.major, version.minor, version.micro, capability_mask(capabilities))
    return "seccomp-" + blake2s(repr(parts).encode(), digest_size=8).hexdigest()


def filter_program(capabilities: Iterable[str] = DEFAULT_CAPABILITIES) -> bytes:
    """The filter for a session with these capabilities, as an array of `struct sock_filter`."""
    kept = frozenset(capabilities)
    allowed = profile.ALLOWED.union(*(profile.BY_CAPABILITY.get(name, frozenset()) for name in kept))
    with _context() as context:
        for name in sorted(allowed):
            _rule(context, _ALLOW, name)
        for name in sorted(profile.NOT_IN_A_SNAPSHOT):
            _rule(context, _ERRNO | errno.ENOSYS, name)
        if "clone" not in allowed:
            _rule(context, _ALLOW, "clone", _Comparison(0, _MASKED_EQUAL, profile.NAMESPACE_FLAGS, 0))
            _rule(context, _ERRNO | errno.ENOSYS, "clone3")
        for number in profile.PERSONALITIES:
            _rule(context, _ALLOW, "personality", _Comparison(0, _EQUAL, number, 0))
        for comparison in _socket_families():
            _rule(context, _ALLOW, "socket", comparison)
        return shorter.shorter(_newer_calls_do_not_exist() + _export(context), _architectures())


@contextmanager
def _context() -> Iterator[int]:
    library = _load()
    others = _architectures()[1:]
    context: int | None = library.seccomp_init(_ERRNO | errno.EPERM)
    if not context:
        raise KernelError("libseccomp gave no context; out of memory?")
    try:
        for architecture in others:
            _done(library.seccomp_arch_add(context, architecture), f"add the architecture {architecture:#x}")
        _done(library.seccomp_attr_set(context, _BAD_ARCHITECTURE, _KILL_PROCESS), "refuse other architectures")
        library.seccomp_attr_set(context, _OPTIMIZE, _SEARCH_TREE)  # unknown before 2.5; only slower without
        yield context
    finally:
        library.seccomp_release(context)


def _rule(context: int, action: int, name: str, *comparisons: _Comparison) -> None:
    library = _load()
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number == -1:
        return  # newer than this libseccomp
    array = (_Comparison * len(comparisons))(*comparisons)
    result = library.seccomp_rule_add_array(context, action, number, len(comparisons), array if comparisons else None)
    _done(result, f"add a rule for {name}")


def _socket_families() -> list[_Comparison]:
    """All below the first refused one by one comparison, the rest one by one."""
    first = min(profile.REFUSED_SOCKET_FAMILIES)
    rest = set(range(first, profile.SOCKET_FAMILIES_END)) - set(profile.REFUSED_SOCKET_FAMILIES)
    return [_Comparison(0, _LESS, first, 0), *(_Comparison(0, _EQUAL, family, 0) for family in sorted(rest))]


def _export(context: int) -> bytes:
    descriptor = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    try:
        _done(_load().seccomp_export_bpf(context, descriptor), "compile the filter")
        size_bytes = os.fstat(descriptor).st_size
        return os.pread(descriptor, size_bytes, 0)
    finally:
        os.close(descriptor)


def _newer_calls_do_not_exist() -> bytes:
    """A prologue that answers ENOSYS to every call with a number above the last that libseccomp knows.

    EPERM would be taken for a verdict; on ENOSYS the C library falls back to what older kernels have. runc does the
    same. Jumps in a filter are relative and forward, so the compiled filter can simply follow.
    """
    load, jump_equal, jump_greater, give = 0x20, 0x15, 0x25, 0x06
    number_at, architecture_at = 0, 4
    code = b""
    for architecture in _architectures():
        last = _last_known(architecture)
        block = [(load, 0, 0, number_at), (jump_greater, 0, 1, last), (give, 0, 0, _ERRNO | errno.ENOSYS)]
        block = [(load, 0, 0, architecture_at), (jump_equal, 0, len(block), architecture), *block]
        code += b"".join(struct.pack("=HBBI", *instruction) for instruction in block)
    return code


def _last_known(architecture: int) -> int:
    library = _load()
    free = ctypes.CDLL(None).free
    free.argtypes, free.restype = [ctypes.c_void_p], None
    last = 0
    for number in range(_HIGHEST_CONCEIVABLE):
        name = library.seccomp_syscall_resolve_num_arch(architecture, number)
        if name:
            free(name)
            last = number
    return last


def _done(result: int, what: str) -> None:
    if result < 0:
        raise KernelError(f"libseccomp cannot {what}: {os.strerror(-result)}", errno=-result)
