"""What the kernel tells of a process's memory, and what is made of it, against the same in Python."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waypoint.errors import KernelError
from waypoint.kernel import pagemaps, written
from waypoint.kernel import regions as known
from waypoint.kernel.criu_images_pb2 import pagemap_entry
from waypoint.kernel.regions import Range, Regions
from waypoint.kernel.wire_format import messages
from waypoint.kernel.written import PAGE, Watch, united

PRESENT, WRITTEN = 1 << 3, 1 << 1
TOP = 1 << 47
Told = list[tuple[int, int, int]]


@st.composite
def told(draw: st.DrawFn) -> Told:
    found: Told = []
    at = draw(st.sampled_from([PAGE, 1 << 31, TOP - (1 << 40)]))
    for gap, pages, is_written in draw(st.lists(st.tuples(st.sampled_from([0, 1, 70000]), st.integers(1, 1 << 17), st.booleans()))):
        at += gap * PAGE
        found.append((at, at + pages * PAGE, PRESENT | (WRITTEN if is_written else 0)))
        at += pages * PAGE
    return found


def regions(found: Told) -> Regions:
    return Regions(bytearray(b"".join(struct.pack("=QQQ", *one) for one in found)))


@given(told())
def test_entries_are_as_the_library_writes_them(found: Told) -> None:
    wanted = b""
    for start, end, kind in found:
        pages = (end - start) // PAGE
        flags = 4 if kind & WRITTEN else 1
        entry = pagemap_entry(vaddr=start, compat_nr_pages=pages, flags=flags, nr_pages=pages).SerializeToString()
        wanted += len(entry).to_bytes(4, "little") + entry
    assert regions(found).entries() == wanted


@given(told())
def test_sets(found: Told) -> None:
    one = regions(found)
    assert one.written() == [(start, end) for start, end, kind in found if kind & WRITTEN]
    assert one.clean() == [(start, end) for start, end, kind in found if not kind & WRITTEN]
    assert one.whole() == united((start, end) for start, end, _ in found)
    assert one.written_bytes() == sum(end - start for start, end in one.written())


@pytest.mark.parametrize("found", [[(8, 16, 8), (12, 20, 8)], [(16, 24, 8), (8, 16, 8)], [(8, 8, 8)]])
def test_what_is_told_twice_is_not_believed(found: Told) -> None:
    with pytest.raises(KernelError):
        regions([(start * PAGE, end * PAGE, kind) for start, end, kind in found]).whole()


CHILD = """
import ctypes, mmap, sys
size = 16 << 20
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, size, 4096):
    memory[at : at + 8] = at.to_bytes(8, "little")
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
print(start, flush=True)
libc = ctypes.CDLL(None)
for line in sys.stdin:
    words = line.split()
    if words[0] == "write":
        for at in range(int(words[1]) * 4096, size, int(words[2]) * 4096):
            memory[at + 8] = memory[at + 8] + 1
    elif words[0] == "drop":
        memory.madvise(mmap.MADV_DONTNEED, 4096 * int(words[1]), 4096 * int(words[2]))
    elif words[0] == "hide":
        libc.mprotect(ctypes.c_void_p(start + int(words[1]) * 4096), 4096, 0)
    print("done", flush=True)
"""
PAGES = (16 << 20) // PAGE


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="only there can memory be tracked")
@pytest.mark.parametrize(("room", "worth_two"), [(1, 1), (512, 1), (600, 1), (1024, 1 << 30), (16384, 1), (16384, 1 << 30)])
def test_each_page_is_told_once_and_saved_if_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, worth_two: int
) -> None:
    """The kernel has a vector of 512 of its own, and tells how far it came too low when it has emptied that on the way.

    `worth_two`: so much is saved by two threads.
    """
    monkeypatch.setattr(written, "_MANY_REGIONS", room)
    monkeypatch.setattr(known, "_WORTH_TWO", worth_two)
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        start = int(child.stdout.readline())

        def pages(found: list[Range]) -> set[int]:
            every = [(page - start) // PAGE for low, high in found for page in range(low, high, PAGE)]
            inside = [page for page in every if 0 <= page < PAGES]
            assert len(set(inside)) == len(inside), "a page was told twice"
            return set(inside)

        def tell(line: str) -> None:
            child.stdin.write(line + "\n")
            child.stdin.flush()
            assert child.stdout.readline() == "done\n"

        watch = Watch(child.pid)
        watch.begin(child.pid)
        for first, step in ((0, 2), (5, 3), (0, 1), (7, 100)):
            tell(f"write {first} {step}")
            found = watch.take_written(child.pid)
            assert pages(found.written()) == set(range(first, PAGES, step))
            assert pages(found.clean()) == set(range(PAGES)) - set(range(first, PAGES, step))
        tell("drop 40 10")
        tell("write 0 9")
        tell("hide 18")
        found = watch.take_written(child.pid)
        there = set(range(PAGES)) - set(range(40, 50)) | {45}
        assert pages(found.whole()) == there
        assert pages(found.written()) == set(range(0, PAGES, 9))
        assert pagemaps.save_written(child.pid, 7, found, tmp_path) == [], "what a process itself may not read can be read"
        (saved,) = tmp_path.glob("pages-*.img")
        data = saved.read_bytes()
        at = 0
        for low, high in found.written():
            for page in range(low, high, PAGE):
                if 0 <= page - start < PAGES * PAGE:
                    assert int.from_bytes(data[at : at + 8], "little") == (0 if page - start == 45 * PAGE else page - start)
                at += PAGE
        assert at == len(data)
        entries = [pagemap_entry.FromString(one) for one in list(messages(tmp_path / "pagemap-7.img"))[1:]]
        assert [one.vaddr for one in entries] == sorted(low for low, _ in [*found.written(), *found.clean()])
        watch.close()
        child.stdin.close()


def test_what_is_gone_is_told(tmp_path: Path) -> None:
    with mmap.mmap(-1, 16 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = b"x" * len(memory)
        held = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(held)
        del held
        ctypes.CDLL(None).munmap(ctypes.c_void_p(start + 3 * PAGE), PAGE)
        try:
            found = regions([(start, start + 8 * PAGE, PRESENT | WRITTEN)])
            missing = pagemaps.save_written(os.getpid(), 7, found, tmp_path)
        finally:
            again = (start + 3 * PAGE, PAGE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10, -1, 0)
            ctypes.CDLL(None).mmap(ctypes.c_void_p(again[0]), *(ctypes.c_long(word) for word in again[1:]))
    assert missing == [(start + 3 * PAGE, start + 4 * PAGE)]
    (saved,) = tmp_path.glob("pages-*.img")
    assert saved.stat().st_size == 8 * PAGE
