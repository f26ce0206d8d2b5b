"""CRIU's pagemaps: which pages of a process an image holds, and which are in its parent, the image in its directory `parent`.

CRIU itself makes such pairs from soft-dirty bits, which few kernels have. Here the parent's files are hard links, so an image needs no
other snapshot to exist: bytes are stored once, and freed with the last image that needs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from waypoint.kernel.wire_format import messages, pack, unpack, write_messages
from waypoint.kernel.written import PAGE, Range, united

__all__ = ["PARENT", "depth", "inherit", "link_parent", "saved_pages"]

PARENT = "parent"
_IN_PARENT = 1
_VADDR, _PAGES_32, _FLAGS, _PAGES = 1, 2, 4, 5


def _pagemap(images: Path, number: int) -> Path:
    return images / f"pagemap-{number}.img"


def saved_pages(images: Path, number: int) -> list[Range]:
    """Of the process with this pid inside: in the image itself or in its parents."""
    return united((start, end) for start, end, _ in _entries(_pagemap(images, number)))


def inherit(images: Path, number: int, ranges: Iterable[Range]) -> None:
    """Say of pages that the image does not hold that they are in its parent. Both are in order of address."""
    path = _pagemap(images, number)
    head, *_ = messages(path)
    own = list(_entries(path))
    more = [(start, end, _entry(start, end)) for start, end in ranges]
    write_messages(path, [head, *(message for _, _, message in sorted([*own, *more]))])


def link_parent(place: Path, source: Path, numbers: Iterable[int]) -> None:
    """All that `source` and its parents have of these processes' memory, in a new directory. FileNotFoundError: it is gone."""
    place.mkdir()
    for number in numbers:
        pagemap = _pagemap(source, number)
        head = dict(unpack(next(messages(pagemap))))
        for name in (pagemap.name, f"pages-{head[1]}.img"):
            os.link(source / name, place / name)
    if (source / PARENT).is_dir():
        link_parent(place / PARENT, source / PARENT, [n for n in numbers if _pagemap(source / PARENT, n).exists()])


def depth(images: Path) -> int:
    """How many parents it has, one after the other."""
    return 1 + depth(images / PARENT) if (images / PARENT).is_dir() else 0


def _entries(path: Path) -> Iterator[tuple[int, int, bytes]]:
    found = messages(path)
    next(found, None)  # the head
    for message in found:
        fields = dict(unpack(message))
        start, pages = fields[_VADDR], fields.get(_PAGES, fields[_PAGES_32])
        assert isinstance(start, int) and isinstance(pages, int)
        yield start, start + pages * PAGE, message


def _entry(start: int, end: int) -> bytes:
    pages = (end - start) // PAGE
    return pack([(_VADDR, start), (_PAGES_32, pages & 0xFFFF_FFFF), (_FLAGS, _IN_PARENT), (_PAGES, pages)])
