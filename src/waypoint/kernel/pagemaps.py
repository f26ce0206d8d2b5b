"""CRIU's pagemaps: which pages of a process an image holds, and which are in its parent, the image in its directory `parent`.

CRIU itself makes such pairs from soft-dirty bits, which few kernels have. Here the parent's files are hard links, so an image needs no
other snapshot to exist: bytes are stored once, and freed with the last image that needs them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from waypoint.kernel.criu_images_pb2 import pagemap_entry, pagemap_head
from waypoint.kernel.regions import Range, Regions
from waypoint.kernel.syscalls import read_memory, same_bytes, set_aside
from waypoint.kernel.wire_format import framed, messages, write_messages
from waypoint.kernel.written import PAGE, halved, united, without

__all__ = [
    "PARENT",
    "copy_memory",
    "depth",
    "holds",
    "inherit",
    "link_parent",
    "same_pages",
    "save_written",
    "saved_pages",
]

PARENT = "parent"
_IN_PARENT, _PRESENT = 1, 4
_MAGIC = struct.pack("=II", 0x54564319, 0x56084025)
_OWN_PAGES = 1 << 20
"""CRIU numbers its own files from 1."""
_CHUNK = 1 << 20
_WORTH_TWO_FILES = 256 << 20
_TRIED, _TRIED_BYTES = 64, 64 << 10
_MOST_PIECES = 512
_Segment = tuple[int, int, int, int]
"""From, to, file, place in it."""
_Chunk = tuple[int, list[Range]]
"""Place in the file, and what comes there."""
_Read = Callable[[list[Range], bytearray], bool]
"""What reads those pages of one process."""


def _pagemap(images: Path, number: int) -> Path:
    return images / f"pagemap-{number}.img"


def saved_pages(images: Path, number: int) -> list[Range]:
    """Of the process with this pid inside: in the image itself or in its parents."""
    return united((start, end) for start, end, *_ in _entries(_pagemap(images, number)))


def inherit(images: Path, number: int, ranges: Sequence[Range]) -> list[Range]:
    """Say of those pages that the image does not hold that they are in its parent; returns what both hold."""
    path = _pagemap(images, number)
    head = next(messages(path))
    entries = [(start, end, message) for start, end, _, message in _entries(path)]
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


def copy_memory(pid: int, number: int, ranges: Sequence[Range], place: Path, *, shared: bool) -> list[Range]:
    """An image of these pages, taken while the process runs: only what was not written to meanwhile may be used of it.

    `shared`: see read_memory. Returns those that could not be read. Of much memory one half is in a parent of that image: into one
    file the kernel lets only one write at a time.
    """
    halves = halved(ranges, _WORTH_TWO_FILES)
    places = [place, place / PARENT][: len(halves)]
    if len(places) > 1:
        places[1].mkdir(exist_ok=True)
    with contextlib.ExitStack() as files:
        both = zip(places, halves, strict=True)
        copies = [(files.enter_context(_pages(where, number, _bytes([half]))), half) for where, half in both]
        for at, where in enumerate(places):
            inherited = (_entry(start, end, _IN_PARENT) for half in halves[at + 1 :] for start, end in half)
            _write_pagemap(where, number, (*(_entry(start, end, _PRESENT) for start, end in halves[at]), *inherited))
        return _copy_pages(pid, copies, shared=shared)


def save_written(pid: int, number: int, found: Regions, place: Path) -> list[Range]:
    """An image of what was written, with the rest in its parent; returns what could not be read. The process stands still."""
    with _pages(place, number, found.written_bytes()) as pages:
        missing: list[Range] = []
        if not found.save_written(pid, pages):
            os.ftruncate(pages, 0)
            missing = _copy_pages(pid, [(pages, found.written())], shared=True)
    _write_pagemap(place, number, (), found.entries())
    return missing


def _write_pagemap(place: Path, number: int, entries: Iterable[bytes], more: bytes = b"") -> None:
    """`more`: entries, each behind its size."""
    _pagemap(place, number).unlink(missing_ok=True)  # it may be a link of another image's
    head = pagemap_head(pages_id=_OWN_PAGES + number).SerializeToString()
    _pagemap(place, number).write_bytes(_MAGIC + framed([head, *entries]) + more)


@contextlib.contextmanager
def _pages(place: Path, number: int, size: int) -> Iterator[int]:
    path = place / f"pages-{_OWN_PAGES + number}.img"
    path.unlink(missing_ok=True)  # it may be a link of another image's, too
    pages = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        set_aside(pages, size)
        yield pages
    finally:
        os.close(pages)


def _copy_pages(pid: int, copies: Sequence[tuple[int, Sequence[Range]]], *, shared: bool) -> list[Range]:
    """Each into its file, all of them side by side."""
    missing: list[Range] = []
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(2, thread_name_prefix="pages") as pool:
            copy = partial(_copy, partial(read_memory, pid, shared=shared), memory, threading.local(), missing)
            chunks = itertools.zip_longest(*([(pages, chunk) for chunk in _chunks(ranges)] for pages, ranges in copies))
            for _ in pool.map(copy, (one for some in chunks for one in some if one is not None)):
                pass
        return united(missing)
    finally:
        os.close(memory)


def _copy(read: _Read, memory: int, local: threading.local, missing: list[Range], one: tuple[int, _Chunk]) -> None:
    pages, (at, ranges) = one
    if not hasattr(local, "buffer"):
        local.buffer = bytearray(_CHUNK)
    rest = _read(read, memory, ranges, local.buffer, missing)
    while rest:
        done = os.pwrite(pages, rest, at)
        rest, at = rest[done:], at + done


def _chunks(ranges: Sequence[Range]) -> Iterator[_Chunk]:
    """As much as is copied at a time: single pages come together."""
    at = size = 0
    chunk: list[Range] = []
    for start, end in ranges:
        while start < end:
            stop = min(end, start + _CHUNK - size)
            chunk.append((start, stop))
            size += stop - start
            start = stop
            if size == _CHUNK:
                yield at, chunk
                at += size
                size, chunk = 0, []
    if chunk:
        yield at, chunk


def _read(read: _Read, memory: int, ranges: list[Range], buffer: bytearray, missing: list[Range]) -> memoryview:
    whole = memoryview(buffer)
    if read(ranges, buffer):
        return whole[: sum(end - start for start, end in ranges)]
    at = 0
    for start, end in ranges:  # some of it was unmapped meanwhile, or the process itself may not read it
        place = start
        while place < end:
            here = at + place - start
            try:
                got = os.preadv(memory, [whole[here : here + end - place]], place) & -PAGE
            except OSError:
                got = 0
            if not got:
                missing.append((place, place + PAGE))
            place += got or PAGE
        at += end - start
    return whole[:at]


def holds(images: Path, number: int) -> bool:
    return _pagemap(images, number).exists()


def same_pages(pid: int, number: int, ranges: Sequence[Range], images: Path, *, shared: bool) -> list[Range]:
    """Which of these pages of a process that runs are as an image, with its parents, has them.

    `shared`: see read_memory. If less than half of some that are looked at first are, no more are looked at: it has written most of
    its memory.
    """
    with contextlib.ExitStack() as files, ThreadPoolExecutor(2, thread_name_prefix="same") as pool:
        batches = list(_batches(_pieces(ranges, _segments(images, number, files))))
        same = partial(_same, partial(read_memory, pid, shared=shared), threading.local())
        tried = [[_part(batch[0], number)] for number, batch in enumerate(batches[:: max(1, len(batches) // _TRIED)])]
        if 2 * _bytes(pool.map(same, tried)) < _bytes([(start, end)] for [(start, end, *_)] in tried):
            return []
        return united(page for pages in pool.map(same, batches) for page in pages)


def _part(piece: _Segment, number: int) -> _Segment:
    """Of each piece another part: memory may be used in a pattern that repeats."""
    start, end, file, at = piece
    parts = max(1, (end - start) // _TRIED_BYTES)
    skipped = number * 7 % parts * _TRIED_BYTES
    return start + skipped, min(end, start + skipped + _TRIED_BYTES), file, at + skipped


def _bytes(found: Iterable[list[Range]]) -> int:
    return sum(end - start for ranges in found for start, end in ranges)


def _segments(images: Path, number: int, files: contextlib.ExitStack) -> list[_Segment]:
    """(from, to, file, place in it) of all that an image holds of a process, in order of address."""
    path = _pagemap(images, number)
    above = _segments(images / PARENT, number, files) if (images / PARENT).is_dir() else []
    head = next(messages(path), None)
    if head is None:
        return above
    name = images / f"pages-{pagemap_head.FromString(head).pages_id}.img"
    file = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    files.callback(os.close, file)
    found: list[_Segment] = []
    inherited: list[Range] = []
    at = 0
    for start, end, flags, _ in _entries(path):
        if flags & _IN_PARENT:
            inherited.append((start, end))
        else:
            found.append((start, end, file, at))
            at += end - start
    found += _pieces(inherited, above)
    found.sort()
    return found


def _pieces(ranges: Sequence[Range], saved: Sequence[_Segment]) -> Iterator[_Segment]:
    """What of `saved` lies in the ranges, by the chunk; both in order."""
    first = 0
    for start, end in ranges:
        while first < len(saved) and saved[first][1] <= start:
            first += 1
        here = first
        while here < len(saved) and saved[here][0] < end:
            begin, stop, file, at = saved[here]
            low, high = max(start, begin), min(end, stop)
            for piece in range(low, high, _CHUNK):
                yield piece, min(high, piece + _CHUNK), file, at + piece - begin
            here += 1


def _batches(pieces: Iterable[_Segment]) -> Iterator[list[_Segment]]:
    """As much as is compared at a time."""
    batch: list[_Segment] = []
    size = 0
    for piece in pieces:
        length = piece[1] - piece[0]
        if batch and (size + length > _CHUNK or len(batch) == _MOST_PIECES):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += length
    if batch:
        yield batch


def _same(read: _Read, local: threading.local, batch: list[_Segment]) -> list[Range]:
    if not hasattr(local, "now"):
        local.now, local.then = bytearray(_CHUNK), bytearray(_CHUNK)
    if not read([(start, end) for start, end, _, _ in batch], local.now):
        return []
    then = memoryview(local.then)
    size = 0
    for start, end, file, at in batch:
        if os.preadv(file, [then[size : size + end - start]], at) != end - start:
            return []
        size += end - start
    if same_bytes(local.now, local.then, 0, size):
        return [(start, end) for start, end, _, _ in batch]
    found: list[Range] = []
    size = 0
    for start, end, _, _ in batch:
        found += [
            (start + at - size, start + to - size)
            for at, to in _halves(local.now, local.then, size, size + end - start)
        ]
        size += end - start
    return found


def _halves(one: bytearray, other: bytearray, start: int, end: int) -> Iterator[Range]:
    """Where they are the same, by the page: few pages differ, so most halves are."""
    if same_bytes(one, other, start, end - start):
        yield start, end
    elif end - start > PAGE:
        middle = (start + end) // 2 & -PAGE
        yield from _halves(one, other, start, middle)
        yield from _halves(one, other, middle, end)


def depth(images: Path) -> int:
    """How many parents it has, one after the other."""
    return 1 + depth(images / PARENT) if (images / PARENT).is_dir() else 0


def _entries(path: Path) -> Iterator[tuple[int, int, int, bytes]]:
    """From, to, flags, and the entry as it is written."""
    found = messages(path)
    next(found, None)  # the head
    for message in found:
        entry = pagemap_entry.FromString(message)
        pages = entry.nr_pages or entry.compat_nr_pages
        yield entry.vaddr, entry.vaddr + pages * PAGE, entry.flags, message


def _entry(start: int, end: int, flags: int) -> bytes:
    pages = (end - start) // PAGE
    entry = pagemap_entry(vaddr=start, compat_nr_pages=pages & 0xFFFF_FFFF, flags=flags, nr_pages=pages)
    return bytes(entry.SerializeToString())
