"""Sets of addresses, against sets of pages; and memory that is copied while it goes away."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waypoint.kernel import pagemaps
from waypoint.kernel.pagemaps import copy_memory, same_pages
from waypoint.kernel.regions import Range
from waypoint.kernel.written import PAGE, united, within, without

ranges = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 6)).map(lambda pair: (pair[0] * PAGE, sum(pair) * PAGE)), max_size=12
)


def pages(found: list[Range]) -> set[int]:
    return {page for start, end in found for page in range(start, end, PAGE)}


def is_united(found: list[Range]) -> bool:
    return all(start < end for start, end in found) and all(a[1] < b[0] for a, b in itertools.pairwise(found))


@given(ranges)
def test_united(some: list[Range]) -> None:
    assert pages(united(some)) == pages(some)
    assert is_united(united(some))


@given(ranges, ranges)
def test_without(some: list[Range], others: list[Range]) -> None:
    left, right = united(some), united(others)
    assert pages(without(left, right)) == pages(left) - pages(right)
    assert is_united(without(left, right))


@given(ranges, ranges)
def test_within(some: list[Range], others: list[Range]) -> None:
    left, right = united(some), united(others)
    assert within(left, right) == (not without(left, right))


HOLES = """
import ctypes, mmap, sys
size = 3 << 20
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, size, 4096):
    memory[at : at + 8] = at.to_bytes(8, "little")
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None)
for page in (10, 300):
    libc.munmap(ctypes.c_void_p(start + page * 4096), 4096)
libc.mprotect(ctypes.c_void_p(start + 20 * 4096), 4096, 0)
print(start, flush=True)
sys.stdin.read()
"""


def test_what_cannot_be_read_is_told_and_all_else_is_copied(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        start = int(child.stdout.readline())
        missing = copy_memory(child.pid, 7, [(start, start + (3 << 20))], tmp_path, shared=False)
        child.communicate("")
    assert missing == [(start + page * PAGE, start + (page + 1) * PAGE) for page in (10, 300)]
    (copied,) = tmp_path.glob("pages-*.img")
    data = copied.read_bytes()
    for page in set(range(768)) - {10, 300}:
        assert int.from_bytes(data[page * PAGE : page * PAGE + 8], "little") == page * PAGE


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("changed", [0, 1, 40, 255])
def test_what_an_image_has_is_found_unless_most_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: int, shared: bool
) -> None:
    """Of 256 pages in a row `changed` are, in each of 24 MiB; what is looked at is counted."""
    size = 24 << 20
    looked_at = 0

    def read_memory(pid: int, ranges: list[Range], into: bytearray, *, shared: bool) -> bool:
        nonlocal looked_at
        looked_at += sum(end - start for start, end in ranges)
        return original(pid, ranges, into, shared=shared)

    original = pagemaps.read_memory
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for at in range(0, size, PAGE):
            memory[at] = 1
        held = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(held)
        del held
        assert copy_memory(os.getpid(), 7, [(start, start + size)], tmp_path, shared=False) == []
        places = {page for page in range(size // PAGE) if page % 256 < changed}
        for page in places:
            memory[page * PAGE + 5] = 9
        monkeypatch.setattr(pagemaps, "read_memory", read_memory)
        found = same_pages(os.getpid(), 7, [(start, start + size)], tmp_path, shared=shared)
    if changed < 128:
        assert pages(found) == {start + page * PAGE for page in set(range(size // PAGE)) - places}
    else:
        assert found == []
        assert looked_at < size // 4
