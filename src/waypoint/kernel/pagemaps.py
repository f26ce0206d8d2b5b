"""CRIU's pagemaps: which pages of a process an image holds, and which are in its parent, the image in its directory `parent`.

CRIU itself makes such pairs from soft-dirty bits, which few kernels have. Here the parent's files are hard links, so an image needs no
other snapshot to exist: bytes are stored once, and freed with the last image that needs them.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from waypoint.kernel.criu_images_pb2 import pagemap_entry, pagemap_head
from waypoint.kernel.syscalls import read_memory
from waypoint.kernel.wire_format import messages, write_messages
from waypoint.kernel.written import PAGE, Range, united, without

__all__ = ["PARENT", "copy_memory", "depth", "inherit", "link_parent", "saved_pages"]

PARENT = "parent"
_IN_PARENT, _PRESENT = 1, 4
_MAGIC = struct.pack("=II", 0x54564319, 0x56084025)
_OWN_PAGES = 1 << 20
"""CRIU numbers its own files from 1."""
_CHUNK = 1 << 20
_BUFFERS = 4


def _pagemap(images: Path, number: int) -> Path:
    return images / f"pagemap-{number}.img"


def saved_pages(images: Path, number: int) -> list[Range]:
    """Of the process with this pid inside: in the image itself or in its parents."""
    return united((start, end) for start, end, _ in _entries(_pagemap(images, number)))


def inherit(images: Path, number: int, ranges: Sequence[Range]) -> list[Range]:
    """Say of those pages that the image does not hold that they are in its parent; returns what both hold."""
    path = _pagemap(images, number)
    head = next(messages(path))
    entries = list(_entries(path))
    own = united((start, end) for start, end, _ in entries)
    entries += ((start, end, _entry(start, end, _IN_PARENT)) for start, end in without(list(ranges), own))
    entries.sort()
    write_messages(path, [head, *(message for _, _, message in entries)])
    return united((start, end) for start, end, _ in entries)


def link_parent(place: Path, source: Path, numbers: Sequence[int]) -> None:
    """All that `source` and its parents have of these processes' memory, in a new directory. FileNotFoundError: it is gone."""
    place.mkdir()
    for number in numbers:
        pagemap = _pagemap(source, number)
        head = next(messages(pagemap), None)
        if head is None:
            raise FileNotFoundError(pagemap)
        for name in (pagemap.name, f"pages-{pagemap_head.FromString(head).pages_id}.img"):
            os.link(source / name, place / name)
    if (source / PARENT).is_dir():
        above = [number for number in numbers if _pagemap(source / PARENT, number).exists()]
        link_parent(place / PARENT, source / PARENT, above)


def copy_memory(pid: int, number: int, ranges: Sequence[Range], place: Path) -> None:
    """An image of these pages, taken while the process runs: only what was not written to meanwhile may be used of it."""
    pages_id = _OWN_PAGES + number
    head = pagemap_head(pages_id=pages_id).SerializeToString()
    _pagemap(place, number).write_bytes(_MAGIC)
    write_messages(_pagemap(place, number), [head, *(_entry(start, end, _PRESENT) for start, end in ranges)])
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    pages = os.open(place / f"pages-{pages_id}.img", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="pages") as pool:
            free = deque(bytearray(_CHUNK) for _ in range(_BUFFERS))
            coming: deque[Future[memoryview]] = deque()
            for chunk in _chunks(ranges):
                coming.append(pool.submit(_read, pid, memory, chunk, free.popleft()))
                if not free:
                    free.append(_write(pages, coming.popleft().result()))
            while coming:
                _write(pages, coming.popleft().result())
    finally:
        os.close(pages)
        os.close(memory)


def _chunks(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """As much as is copied at a time: single pages come together."""
    size = 0
    chunk: list[Range] = []
    for start, end in ranges:
        while start < end:
            stop = min(end, start + _CHUNK - size)
            chunk.append((start, stop))
            size += stop - start
            start = stop
            if size == _CHUNK:
                yield chunk
                size, chunk = 0, []
    if chunk:
        yield chunk


def _read(pid: int, memory: int, ranges: list[Range], buffer: bytearray) -> memoryview:
    whole = memoryview(buffer)
    if read_memory(pid, ranges, buffer):
        return whole[: sum(end - start for start, end in ranges)]
    at = 0
    for start, end in ranges:
        with contextlib.suppress(
            OSError
        ):  # unmapped meanwhile: nobody will ask for it; what may not be read can be, here
            os.preadv(memory, [whole[at : at + end - start]], start)
        at += end - start
    return whole[:at]


def _write(pages: int, data: memoryview) -> bytearray:
    """Gives the buffer back."""
    rest = data
    while rest:
        rest = rest[os.write(pages, rest) :]
    buffer = data.obj
    assert isinstance(buffer, bytearray)
    return buffer


def depth(images: Path) -> int:
    """How many parents it has, one after the other."""
    return 1 + depth(images / PARENT) if (images / PARENT).is_dir() else 0


def _entries(path: Path) -> Iterator[tuple[int, int, bytes]]:
    found = messages(path)
    next(found, None)  # the head
    for message in found:
        entry = pagemap_entry.FromString(message)
        pages = entry.nr_pages or entry.compat_nr_pages
        yield entry.vaddr, entry.vaddr + pages * PAGE, message


def _entry(start: int, end: int, flags: int) -> bytes:
    pages = (end - start) // PAGE
    entry = pagemap_entry(vaddr=start, compat_nr_pages=pages & 0xFFFF_FFFF, flags=flags, nr_pages=pages)
    return bytes(entry.SerializeToString())
