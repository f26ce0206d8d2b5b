"""Mappings of a process whose memory is tracked: CRIU is told of them instead of reading `smaps`, and what comes back is the same."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from waypoint.deltas import Delta, Tracking
from waypoint.engine import Engine
from waypoint.errors import KernelError, NotCapturable
from waypoint.kernel import criu, processes, tools, vmas
from waypoint.model import SnapshotRecord
from waypoint.session import Session

MIB = 1 << 20
TRACKING = Tracking(least=8 * MIB)
PROGRAM = r"""
import ctypes, mmap, os

size = 24 << 20
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, size, 4096):
    memory[at] = 1
open("/tmp/address", "w").write(str(ctypes.addressof(ctypes.c_char.from_buffer(memory))))
for name in ("/tmp/in", "/tmp/out"):
    os.mkfifo(name)
while True:
    advice, place = map(int, open("/tmp/in").read().split())
    memory.madvise(advice, place << 20, 1 << 20)
    memory[place << 20] += 1
    open("/tmp/out", "w").write("ok")
"""
RANDOM, SEQUENTIAL, DONTFORK, DONTDUMP, WIPEONFORK = 1, 2, 10, 16, 18
ADVICE = {RANDOM: b"rr", SEQUENTIAL: b"sr", DONTFORK: b"dc", DONTDUMP: b"dd", WIPEONFORK: b"wf"}


@pytest.fixture(params=[TRACKING], ids=["told"])
def session(home: Path, engine: Engine, request: pytest.FixtureRequest) -> Iterator[Session]:
    with Engine(home, ahead=True, deltas=request.param) as tracking:
        made = tracking.new()
        made.exec(f"cat > /tmp/program.py <<'END'\n{PROGRAM}\nEND")
        made.exec("python3 /tmp/program.py 2> /tmp/errors &")
        deadline = time.monotonic() + 30
        while made.exec("test -p /tmp/out").exit_code:
            assert time.monotonic() < deadline, made.exec("cat /tmp/errors")
            time.sleep(0.02)
        yield made
        made.remove()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What CRIU was told for each process that it asked leave for."""
    if tools.quick_criu() is None:
        pytest.skip("the engine's own CRIU is not built; a plain one is told nothing")
    try:
        vmas._program()
    except KernelError as error:
        pytest.skip(error.message)
    found: list[bytes] = []
    tell = Delta.mappings

    def mappings(self: Delta, pid: int) -> bytes:
        found.append(tell(self, pid))
        return found[-1]

    monkeypatch.setattr(Delta, "mappings", mappings)
    return found


def advise(session: Session, advice: int, place: int) -> None:
    said = session.exec(f"echo {advice} {place} > /tmp/in; cat /tmp/out")
    assert said.stdout == b"ok", said


def flags_of(session: Session) -> list[bytes]:
    """Of each MiB of the program's memory; without that of being tracked, which does not come back."""
    start = int(session.exec("cat /tmp/address").stdout)
    mappings: list[tuple[int, int, bytes]] = []
    for pid in processes.namespace_pids(session.record.init_pid):
        smaps = Path(f"/proc/{pid}/smaps").read_bytes()
        found = re.findall(rb"^([0-9a-f]+)-([0-9a-f]+) [^\n]*\n(?:\w+:[^\n]*\n)*?VmFlags: ([^\n]*)\n", smaps, re.MULTILINE)
        if b"program.py" in Path(f"/proc/{pid}/cmdline").read_bytes() and len(found) > len(mappings):
            mappings = [(int(low, 16), int(high, 16), words.replace(b" uw", b"")) for low, high, words in found]
    places = range(start, start + 24 * MIB, MIB)
    return [words for place in places for low, high, words in mappings if low <= place < high]


def flags_in_fork(session: Session, snapshot: SnapshotRecord) -> list[bytes]:
    (fork,) = session.fork(1, from_snapshot=snapshot.id)
    try:
        return flags_of(fork)
    finally:
        fork.remove()


def change_and_compare(session: Session) -> None:
    """One snapshot after the other, each with mappings of which the one before had others."""
    taken = []
    for number, (advice, word) in enumerate(ADVICE.items()):
        advise(session, advice, 2 * number)
        taken.append((session.snapshot(), flags_of(session)))
        assert word in taken[-1][1][2 * number].split()
        assert len(taken[-1][1]) == 24
    assert len({tuple(flags) for _, flags in taken}) == len(taken)
    assert [flags_in_fork(session, snapshot) for snapshot, _ in taken] == [flags for _, flags in taken]


def test_advice_that_changes_between_snapshots(session: Session, told: list[bytes]) -> None:
    change_and_compare(session)
    assert len(told) == len(ADVICE)
    assert all(told)


def test_criu_believes_it(session: Session, monkeypatch: pytest.MonkeyPatch, told: list[bytes]) -> None:
    """Else all of this would test what it reads itself."""
    advise(session, SEQUENTIAL, 3)
    tell = Delta.mappings
    monkeypatch.setattr(Delta, "mappings", lambda self, pid: tell(self, pid).replace(b" sr ", b" rr "))
    flags = flags_in_fork(session, session.snapshot())
    assert b"rr" in flags[3].split()
    assert b"sr" not in flags[3].split()


def test_memory_with_a_protection_key_is_refused(
    session: Session, monkeypatch: pytest.MonkeyPatch, told: list[bytes]
) -> None:
    """Few processors have them: CRIU is told what it would read there."""
    tell = Delta.mappings
    key = b"ProtectionKey:         1\nVmFlags: rd wr "
    monkeypatch.setattr(Delta, "mappings", lambda self, pid: tell(self, pid).replace(b"VmFlags: rd wr ", key, 1))
    with pytest.raises(NotCapturable, match="protection key"):
        session.snapshot()
    monkeypatch.setattr(Delta, "mappings", lambda self, pid: tell(self, pid).replace(b"VmFlags: rd wr ", key.replace(b"1", b"0"), 1))
    session.snapshot()
    advise(session, SEQUENTIAL, 3)


def test_flags_that_are_new_when_everything_stands_still(
    session: Session, monkeypatch: pytest.MonkeyPatch, told: list[bytes]
) -> None:
    session.snapshot()
    monkeypatch.setattr(vmas.Flags, "learn", lambda *_: None)
    change_and_compare(session)
    assert told[0]
    assert not any(told[1:])


def test_a_file_that_is_gone(session: Session, monkeypatch: pytest.MonkeyPatch, told: list[bytes]) -> None:
    monkeypatch.setattr(criu, "_MAPPINGS", "waypoint[smaps-{}]:/proc/{}/fd/9999{}")
    change_and_compare(session)
    assert all(told)


def test_where_the_kernel_does_not_tell(session: Session, monkeypatch: pytest.MonkeyPatch, told: list[bytes]) -> None:
    monkeypatch.setattr(vmas, "_loaded", ["not on this kernel"])
    change_and_compare(session)
    assert told
    assert not any(told)


@pytest.mark.parametrize("session", [Tracking(least=8 * MIB, smaps=True)], indirect=True, ids=["off"])
def test_off(session: Session, told: list[bytes]) -> None:
    change_and_compare(session)
    assert told
    assert not any(told)
