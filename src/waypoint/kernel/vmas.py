"""What CRIU wants to know of a process's mappings, without `smaps`: for that file the kernel counts every page of the process.

CRIU reads two lines of each mapping there: what `maps` says too, and its flags. No other file tells the flags, but a BPF iterator
can read them in the kernel, as numbers, of which no kernel promises what they mean. So the words for a number are learnt, from
`smaps`, while the process runs; when it stands still the same lines are put together from that, or it is not done at all.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import struct
import threading
from collections.abc import Iterable
from typing import NamedTuple

from waypoint.errors import KernelError
from waypoint.kernel import btf

__all__ = ["Flags"]

_libc = ctypes.CDLL(None, use_errno=True)
_BPF = 321 if os.uname().machine == "x86_64" else 280
_PROGRAM_LOAD, _LINK_CREATE, _ITERATOR_CREATE = 5, 28, 33
_TRACING, _ITERATOR = 26, 28
_SEQ_WRITE = 127
_LOAD, _LOAD_INT, _STORE, _COPY, _SET, _ADD, _JUMP_IF_EQUAL, _CALL, _EXIT = 0x79, 0x61, 0x7B, 0xBF, 0xB7, 0x07, 0x15, 0x85, 0x95
_FUNCTION = "bpf_iter_task_vma"
_STRUCTURES = {
    "vm_area_struct": ("vm_start", "vm_end", "vm_flags", "vm_lock_seq"),
    "bpf_iter_meta": ("seq",),
    "bpf_iter__task_vma": ("meta", "vma"),
}
_RECORD = struct.Struct("=QQQQ")
_READ = 1 << 16
_MOST_WORDS = 1 << 14
_PLACE = re.compile(rb"[0-9a-f]+-[0-9a-f]+ ")
_KERNELS_OWN = re.compile(rb"ffffffff[0-9a-f]{8}-.* \[vsyscall\]\n")
_FLAGS_LINE = b"VmFlags: "
_KEYS = 0x1F << 32
"""On some processors the flags hold a protection key here, which `smaps` tells in a line of its own; on others what is rarely there."""
_OWN_FLAGS = -1
"""Stands for those of the kernel's own mapping, the same in every process: the iterator does not tell of it."""

_loading = threading.Lock()
_loaded: list[int | str] = []
"""The program, or why there is none."""


class _Vma(NamedTuple):
    start: int
    end: int
    flags: int
    changed: int
    """Another number whenever somebody has had the right to change the mapping: its flags may be what they were before."""


class Flags:
    """What they are called on this kernel, as far as it has been seen. Used by any number of threads."""

    def __init__(self) -> None:
        self._words: dict[int, bytes] = {}

    def learn(self, pid: int) -> None:
        """From a process that runs; not of mappings that it changes meanwhile. KernelError, OSError: it cannot be done here."""
        before = _vmas(pid)
        if _OWN_FLAGS in self._words and all(vma.flags in self._words for vma in before):
            return
        with open(f"/proc/{pid}/smaps", "rb") as lines:
            told, own = _told(lines)
        unchanged = set(before).intersection(_vmas(pid))
        if len(self._words) > _MOST_WORDS:  # somebody makes up one combination after the other
            self._words = {}
        self._words |= {vma.flags: told[_place(vma)] for vma in unchanged if _place(vma) in told}
        self._words[_OWN_FLAGS] = own

    def text(self, pid: int) -> bytes:
        """Of a process that stands still: the lines of `maps`, each with that of its flags, as `smaps` has them.

        KernelError: there are flags that have not been learnt. KernelError, OSError: it cannot be done here, or it has ended.
        """
        vmas = _vmas(pid)
        with open(f"/proc/{pid}/maps", "rb") as lines:
            maps = list(lines)
        flags, places = [vma.flags for vma in vmas], [_place(vma) for vma in vmas]
        if maps and _KERNELS_OWN.match(maps[-1]):
            flags.append(_OWN_FLAGS)
            places.append(b"")
        if not maps or len(maps) != len(places) or not all(map(bytes.startswith, maps, places)):
            raise KernelError(f"the kernel tells of other mappings of process {pid} than there are in its maps")
        if any(number != _OWN_FLAGS and number & _KEYS for number in flags):
            raise KernelError(f"process {pid} has memory with a protection key, which is not among its flags")
        words = [self._words.get(number, b"") for number in flags]
        if not all(words):
            raise KernelError(f"process {pid} has a mapping with flags that have not been seen before")
        return b"".join(itertools.chain.from_iterable(zip(maps, words, strict=True)))


def _place(vma: _Vma) -> bytes:
    """How its line begins."""
    return b"%08x-%08x " % (vma.start, vma.end)


def _told(smaps: Iterable[bytes]) -> tuple[dict[bytes, bytes], bytes]:
    """The line of each mapping's flags, by how its first line begins; and that of the kernel's own."""
    found: dict[bytes, bytes] = {}
    place = own = b""
    for line in smaps:
        if start := _PLACE.match(line):
            place = b"" if _KERNELS_OWN.match(line) else start[0]
        elif line.startswith(_FLAGS_LINE):
            if place:
                found[place] = line
            else:
                own = line
    return found, own


# -- the iterator --------------------------------------------------------------------------------------------------------


def _vmas(pid: int) -> list[_Vma]:
    """In order of address; none of a process that has ended. KernelError, OSError: this kernel does not tell."""
    which = ctypes.create_string_buffer(struct.pack("=IIQ", pid, 0, 0), 16)
    link = _bpf(_LINK_CREATE, struct.pack("=IIIIQQ", _program(), 0, _ITERATOR, 0, ctypes.addressof(which), len(which)))
    try:
        iterator = _bpf(_ITERATOR_CREATE, struct.pack("=II", link, 0))
        try:
            told = b"".join(iter(lambda: os.read(iterator, _READ), b""))
        finally:
            os.close(iterator)
    finally:
        os.close(link)
    return [_Vma._make(record) for record in _RECORD.iter_unpack(told)]


def _program() -> int:
    """Loaded once in the life of this process; where that fails it is not tried again."""
    with _loading:
        if not _loaded:
            try:
                _loaded.append(_load())
            except (OSError, KernelError) as error:
                _loaded.append(f"the kernel does not tell the flags of mappings: {error}")
        (found,) = _loaded
    if isinstance(found, str):
        raise KernelError(found)
    return found


def _load() -> int:
    """It writes a record of each mapping that it is called for; the last call is for none."""
    known = btf.numbers("vmas", _STRUCTURES, _FUNCTION)
    context, mapping, one, two, three, frame = 6, 7, 1, 2, 3, 10
    kept = [(_LOAD, "vm_start"), (_LOAD, "vm_end"), (_LOAD, "vm_flags"), (_LOAD_INT, "vm_lock_seq")]
    write = [
        *(
            code
            for place, (load, member) in enumerate(kept)
            for code in (
                _code(load, one, mapping, known[f"vm_area_struct.{member}"]),
                _code(_STORE, frame, one, place * 8 - _RECORD.size),
            )
        ),
        _code(_LOAD, one, context, known["bpf_iter__task_vma.meta"]),
        _code(_LOAD, one, one, known["bpf_iter_meta.seq"]),
        _code(_COPY, two, frame),
        _code(_ADD, two, value=-_RECORD.size),
        _code(_SET, three, value=_RECORD.size),
        _code(_CALL, value=_SEQ_WRITE),
    ]
    program = [
        _code(_COPY, context, one),
        _code(_LOAD, mapping, context, known["bpf_iter__task_vma.vma"]),
        _code(_JUMP_IF_EQUAL, mapping, offset=len(write)),
        *write,
        _code(_SET, 0),
        _code(_EXIT),
    ]
    codes, license_ = ctypes.create_string_buffer(b"".join(program)), ctypes.create_string_buffer(b"GPL")
    head = struct.pack("=IIQQ", _TRACING, len(program), ctypes.addressof(codes), ctypes.addressof(license_))
    attach = struct.pack("=16sII36xI", b"waypoint_vmas", 0, _ITERATOR, known[_FUNCTION])
    return _bpf(_PROGRAM_LOAD, head + bytes(24) + attach)


def _code(operation: int, to: int = 0, of: int = 0, offset: int = 0, *, value: int = 0) -> bytes:
    return struct.pack("=BBhi", operation, of << 4 | to, offset, value)


def _bpf(command: int, request: bytes) -> int:
    """A descriptor."""
    held = ctypes.create_string_buffer(request, len(request))
    found = _libc.syscall(_BPF, command, held, len(request))
    if found < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(found)
