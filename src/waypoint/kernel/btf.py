"""Where the kernel keeps what it tells nobody: types and offsets from its own description (BTF), found out once per boot.

The description is five megabytes in which nothing can be looked up, so the few numbers are written down beside what CRIU has found
out about this kernel. A kernel without a description, or with other types than are asked for, is a KernelError.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from waypoint.errors import KernelError
from waypoint.kernel import processes, tools

__all__ = ["numbers"]

_BTF = Path("/sys/kernel/btf/vmlinux")
_HEADER, _TYPE, _MEMBER = struct.Struct("=HBBIIIII"), struct.Struct("=III"), struct.Struct("=III")
_MAGIC = 0xEB9F
_STRUCT, _UNION, _FUNCTION = 4, 5, 12
_FIXED = {1: 4, 3: 12, 14: 4, 17: 4}
_EACH = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}
"""Bytes behind a type of this kind: so many, or so many for each of its members."""
_LAST_KIND = 19
_BITS = 24
"""Of a member's place, where its type has bit fields; the rest is a size in bits."""


def numbers(name: str, structures: Mapping[str, tuple[str, ...]], function: str) -> dict[str, int]:
    """The offset of each "structure.member" in bytes, and the number of the type `function`; kept under `name` until the next boot."""
    path = tools.prefix() / "kdat" / f"{processes.boot_id()}-{name}"
    wanted = {f"{structure}.{member}" for structure, members in structures.items() for member in members} | {function}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(path.read_bytes())
        if isinstance(known, dict) and set(known) == wanted and all(type(number) is int for number in known.values()):
            return known
    try:
        found = _look(_BTF.read_bytes(), structures, function)
    except (OSError, struct.error, IndexError) as error:
        raise KernelError(f"the kernel's description of itself cannot be read: {error}") from error
    with contextlib.suppress(OSError):  # a read-only prefix: it is found out again by the next process
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
        fresh.write_text(json.dumps(found) + "\n")
        fresh.replace(path)
    return found


def _look(btf: bytes, structures: Mapping[str, tuple[str, ...]], function: str) -> dict[str, int]:
    magic, _, _, header, types, types_size, strings, strings_size = _HEADER.unpack_from(btf)
    if magic != _MAGIC:
        raise KernelError("the kernel's description of itself is not in the format that is known here")
    names = btf[header + strings : header + strings + strings_size]
    named = {names.find(f"\0{name}\0".encode()) + 1: name for name in (*structures, function)}
    places = [0]
    kinds: dict[str, int] = {}
    at, end = header + types, header + types + types_size
    while at < end:
        name, info, _ = _TYPE.unpack_from(btf, at)
        kind = info >> 24 & 0x1F
        if kind > _LAST_KIND:
            raise KernelError(f"the kernel's description of itself has types of a kind that is not known here ({kind})")
        if name in named and kind == (_FUNCTION if named[name] == function else _STRUCT):
            kinds.setdefault(named[name], len(places))
        places.append(at)
        at += _TYPE.size + _FIXED.get(kind, 0) + _EACH.get(kind, 0) * (info & 0xFFFF)
    found: dict[str, int] = {}
    for structure, wanted in structures.items():
        offsets = dict(_members(btf, names, places, kinds.get(structure, 0)))
        found |= {f"{structure}.{member}": offsets[member] for member in wanted if member in offsets}
    if function in kinds:
        found[function] = kinds[function]
    missing = [f"{one}.{member}" for one, members in structures.items() for member in members if f"{one}.{member}" not in found]
    if missing or function not in found:
        raise KernelError(f"the kernel does not have {', '.join(missing or [function])}")
    return found


def _members(btf: bytes, names: bytes, places: list[int], number: int) -> Iterator[tuple[str, int]]:
    """Name and offset of each, also of those in members without a name."""
    if not number:
        return
    _, info, _ = _TYPE.unpack_from(btf, places[number])
    if info >> 24 & 0x1F not in (_STRUCT, _UNION):
        return
    for member in range(info & 0xFFFF):
        name, kind, bits = _MEMBER.unpack_from(btf, places[number] + _TYPE.size + member * _MEMBER.size)
        offset = (bits & (1 << _BITS) - 1 if info >> 31 else bits) // 8
        if name:
            yield names[name : names.index(b"\0", name)].decode(), offset
        else:
            yield from ((inner, offset + further) for inner, further in _members(btf, names, places, kind))
