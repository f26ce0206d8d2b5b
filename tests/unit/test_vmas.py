"""What CRIU is told of a process's mappings is what it would have read in `smaps`, or it is not told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from waypoint.errors import KernelError
from waypoint.kernel import btf, tools, vmas
from waypoint.kernel.vmas import Flags

TWO_LINES = re.compile(rb"(?:[0-9a-f]+-[0-9a-f]+ |VmFlags: )")
KINDS = r"""
import ctypes, errno, mmap, os, sys

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
READ, WRITE, EXEC = 1, 2, 4
SHARED, PRIVATE, ANONYMOUS, GROWSDOWN, LOCKED, NORESERVE, HUGETLB, DROPPABLE = 1, 2, 0x20, 0x100, 0x2000, 0x4000, 0x40000, 8
ADVICE = dict(random=1, sequential=2, dontfork=10, mergeable=12, hugepage=14, nohugepage=15, dontdump=16, wipeonfork=18, guard=102)

def made(flags, prot=READ | WRITE, file=-1, size=16 * 4096):
    place = libc.mmap(None, size, prot, flags, file, 0)
    if place == ctypes.c_void_p(-1).value:
        print("not here:", hex(flags), os.strerror(ctypes.get_errno()), file=sys.stderr)
        return None
    return place

def advised(place, *advice, size=16 * 4096):
    for one in advice:
        if libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(size), ADVICE[one]):
            print("not here:", one, os.strerror(ctypes.get_errno()), file=sys.stderr)

for advice in ADVICE:
    advised(made(PRIVATE | ANONYMOUS), advice)
    advised(made(SHARED | ANONYMOUS), advice)
advised(made(PRIVATE | ANONYMOUS), "dontfork", "dontdump", "sequential", "mergeable")
guarded = made(PRIVATE | ANONYMOUS)
ctypes.memset(guarded, 1, 16 * 4096)
advised(guarded + 4096, "guard", size=4096)
locked = made(PRIVATE | ANONYMOUS | LOCKED)
libc.mlock2(ctypes.c_void_p(made(PRIVATE | ANONYMOUS)), ctypes.c_size_t(16 * 4096), 1)
for kind in (GROWSDOWN, NORESERVE):
    made(PRIVATE | ANONYMOUS | kind)
made(DROPPABLE | ANONYMOUS)
made(PRIVATE | ANONYMOUS | HUGETLB, size=2 << 20)
for prot in (0, READ, READ | EXEC, READ | WRITE | EXEC):
    made(PRIVATE | ANONYMOUS, prot)
for name in ("plain", "two words", "line\nfeed", "car\rriage", "octal\\012", "deleted", "name [vsyscall]", "1000-2000 rw-p 0 0:0 0"):
    file = os.open(name, os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 16 * 4096)
    for flags in (SHARED, PRIVATE):
        for prot in (READ, READ | WRITE):
            made(flags, prot, file)
    advised(made(SHARED, READ, file), "sequential")
    made(SHARED, READ, os.open(name, os.O_RDONLY))
os.unlink("deleted")
memory = os.memfd_create("memory file")
os.ftruncate(memory, 16 * 4096)
made(SHARED, READ | WRITE, memory)
print("up", flush=True)
for line in sys.stdin:
    advised(locked, *line.split())
    print("done", flush=True)
"""
TOGGLE = """
import mmap
memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_RANDOM)
print("up", flush=True)
while True:
    memory.madvise(mmap.MADV_SEQUENTIAL)
    memory.madvise(mmap.MADV_RANDOM)
"""
WITHOUT_RIGHTS = """
import os
from waypoint.errors import KernelError
from waypoint.kernel.vmas import Flags
for _ in range(2):
    try:
        Flags().learn(os.getpid())
    except (KernelError, OSError) as error:
        print(error)
"""


@pytest.fixture
def iterator() -> None:
    try:
        vmas._program()
    except KernelError as error:
        pytest.skip(error.message)


def program(source: str, where: Path) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", source], cwd=where, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        try:
            assert child.stdout.readline() == "up\n"
            yield child
        finally:
            child.kill()
            child.wait()


@pytest.fixture
def process(iterator: None, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    yield from program(KINDS, tmp_path)


def advise(process: subprocess.Popen[str], advice: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(advice + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def of_smaps(pid: int) -> bytes:
    with open(f"/proc/{pid}/smaps", "rb") as lines:
        return b"".join(line for line in lines if TWO_LINES.match(line))


def test_every_kind_of_mapping(process: subprocess.Popen[str]) -> None:
    flags = Flags()
    flags.learn(process.pid)
    told = flags.text(process.pid)
    assert told == of_smaps(process.pid)
    seen = set(re.findall(rb" ([a-z]{2})(?= )", b"".join(re.findall(rb"VmFlags:.*\n", told))))
    assert {b"gd", b"lo", b"lf", b"nr", b"sr", b"rr", b"dc", b"dd", b"wf", b"sh", b"ex"} <= seen


def test_what_has_not_been_seen_is_not_told(process: subprocess.Popen[str]) -> None:
    flags = Flags()
    with pytest.raises(KernelError, match="not been seen"):
        flags.text(process.pid)
    flags.learn(process.pid)
    advise(process, "dontfork dontdump random")
    with pytest.raises(KernelError, match="not been seen"):
        flags.text(process.pid)
    flags.learn(process.pid)
    assert flags.text(process.pid) == of_smaps(process.pid)


def test_flags_that_change_while_they_are_learnt(process: subprocess.Popen[str], tmp_path: Path) -> None:
    """And are again what they were: the words in between are those of others."""
    known = Flags()
    known.learn(process.pid)
    for busy in program(TOGGLE, tmp_path):
        for _ in range(500):
            flags = Flags()
            flags.learn(busy.pid)
            assert {number: known._words.get(number, words) for number, words in flags._words.items()} == flags._words


def test_they_are_learnt_once(process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    flags = Flags()
    flags.learn(process.pid)
    monkeypatch.setattr(vmas, "_told", None)  # would be called with what `smaps` says
    flags.learn(process.pid)


def test_a_process_that_has_ended(process: subprocess.Popen[str]) -> None:
    flags = Flags()
    flags.learn(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    for _ in range(2):
        with pytest.raises((KernelError, OSError)):
            flags.text(process.pid)
        process.wait()


def test_without_the_right_to_look(iterator: None) -> None:
    missing = "-sys_admin,-bpf,-perfmon"
    command = ["setpriv", f"--bounding-set={missing}", f"--inh-caps={missing}", sys.executable, "-c", WITHOUT_RIGHTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("the kernel does not tell the flags of mappings: [Errno 1]") == 2, done


def test_what_was_found_out_is_kept_until_the_next_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "prefix", lambda: tmp_path)
    asked = "vmas", vmas._STRUCTURES, vmas._FUNCTION
    found = btf.numbers(*asked)
    monkeypatch.setattr(btf, "_BTF", tmp_path / "none")
    assert btf.numbers(*asked) == found
    (kept,) = (tmp_path / "kdat").iterdir()
    for broken in ("", "[]", '{"vm_area_struct.vm_start": 0}'):
        kept.write_text(broken)
        with pytest.raises(KernelError, match="cannot be read"):
            btf.numbers(*asked)


@pytest.mark.parametrize("content", [b"", b"no description" * 10, btf._HEADER.pack(btf._MAGIC, 1, 0, 24, 0, 12, 12, 1) + bytes(13)])
def test_a_description_of_another_kind(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "prefix", lambda: tmp_path)
    monkeypatch.setattr(btf, "_BTF", tmp_path / "btf")
    (tmp_path / "btf").write_bytes(content)
    with pytest.raises(KernelError):
        btf.numbers("vmas", vmas._STRUCTURES, vmas._FUNCTION)
    assert not (tmp_path / "kdat").exists()
