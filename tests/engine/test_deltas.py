"""Snapshots of what was written since the last one: whatever a program does to its memory, what comes back is what was there."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from waypoint import deltas
from waypoint.deltas import Tracking
from waypoint.engine import Engine
from waypoint.errors import NotCapturable
from waypoint.kernel import pagemaps, processes, written
from waypoint.model import SnapshotRecord
from waypoint.session import Session

MIB = 1 << 20
TRACKING = Tracking(least=8 * MIB)
PROGRAM = r"""
import ctypes, hashlib, mmap, os, random, threading, time

size = 24 << 20
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, size, 4096):
    memory[at : at + 8] = at.to_bytes(8, "little")
ticks = 0
local = threading.local()

def tick():
    global ticks
    local.mine = 0
    while True:
        local.mine += 1
        ticks = local.mine
        time.sleep(0.005)

def race(pages=512):
    # each round writes its number to all pages in order: at any instant the numbers along the pages never rise, and differ by one
    number = 0
    while True:
        number += 1
        for page in range(pages):
            memory[page * 4096 : page * 4096 + 4] = number.to_bytes(4, "little")

open("/tmp/address", "w").write(str(ctypes.addressof(ctypes.c_char.from_buffer(memory))))
for name in ("/tmp/in", "/tmp/out"):
    os.mkfifo(name)
while True:
    words = open("/tmp/in").read().split()
    said = "ok"
    if words[0] == "digest":
        view = memoryview(memory)
        found = hashlib.sha1(view[: 16 << 20])
        found.update(view[(16 << 20) + 4096 :])  # a page is left out that may have a guard
        said = found.hexdigest()
    elif words[0] == "write":
        for page in random.sample(range(512, size // 4096), int(words[1])):
            memory[page * 4096 + 8] = random.randrange(1, 256)
    elif words[0] == "drop":  # these read as zeros again
        memory.madvise(mmap.MADV_DONTNEED, 8 << 20, 1 << 20)
        memory.madvise(mmap.MADV_DONTNEED, 10 << 20, 4096)
    elif words[0] == "guard":
        memory.madvise(102, 16 << 20, 4096)
    elif words[0] == "guarded":
        child = os.fork()
        if not child:
            os._exit(memory[16 << 20])
        said = str(os.WIFSIGNALED(os.waitpid(child, 0)[1]))
    elif words[0] == "direct":
        direct = os.open("/tmp/direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    elif words[0] == "threads":
        for _ in range(3):
            threading.Thread(target=tick, daemon=True).start()
    elif words[0] == "ticks":
        said = str(ticks)
    elif words[0] == "race":
        threading.Thread(target=race, daemon=True).start()
    open("/tmp/out", "w").write(said + "\n")
"""


@pytest.fixture(params=["one file", "two files", "plain criu"])
def tracking(
    home: Path, engine: Engine, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """`two files`: as much memory is copied, and protected by two threads. A plain CRIU does not ask before it touches a process."""
    if request.param == "plain criu":
        monkeypatch.setenv("WAYPOINT_QUICK", "0")
    if request.param == "two files":
        monkeypatch.setattr(pagemaps, "_WORTH_TWO_FILES", MIB)
        monkeypatch.setattr(written, "_WORTH_TWO", MIB)
    with Engine(home, ahead=True, deltas=TRACKING) as found:
        yield found
        assert found.store.tag == engine.store.tag


@pytest.fixture
def session(tracking: Engine) -> Iterator[Session]:
    made = tracking.new()
    start(made)
    yield made
    made.remove()


def copied() -> int:
    """How many parents an image has of which all was copied while the process ran."""
    return 2 if pagemaps._WORTH_TWO_FILES == MIB else 1


def start(session: Session) -> None:
    session.exec(f"cat > /tmp/program.py <<'END'\n{PROGRAM}\nEND")
    session.exec("python3 /tmp/program.py 2> /tmp/errors &")
    deadline = time.monotonic() + 30
    while session.exec("test -p /tmp/out").exit_code:
        assert time.monotonic() < deadline, session.exec("cat /tmp/errors")
        time.sleep(0.02)


def ask(session: Session, words: str) -> str:
    said = session.exec(f"echo {words} > /tmp/in; cat /tmp/out", timeout=60)
    assert said.exit_code == 0, said
    return said.stdout.decode().strip()


def digest_in_fork(session: Session, snapshot: SnapshotRecord) -> str:
    (fork,) = session.fork(1, from_snapshot=snapshot.id)
    try:
        return ask(fork, "digest")
    finally:
        fork.remove()


def program_pid(session: Session) -> int:
    for pid in processes.namespace_pids(session.record.init_pid):
        if b"program.py" in Path(f"/proc/{pid}/cmdline").read_bytes() and not Path(
            f"/proc/{pid}/comm"
        ).read_text().startswith("sh"):
            return pid
    raise AssertionError("the program is gone")


def is_tracked(session: Session) -> bool:
    flags = [
        line
        for line in Path(f"/proc/{program_pid(session)}/smaps").read_text().splitlines()
        if line.startswith("VmFlags")
    ]
    return any(" uw" in line for line in flags)


def test_each_snapshot_has_its_own_memory_and_stores_what_was_written(session: Session, tracking: Engine) -> None:
    taken = []
    for pages in (0, 20, 300, 1):  # 300 are saved beside CRIU
        ask(session, f"write {pages}")
        taken.append((session.snapshot(), ask(session, "digest")))
    ask(session, "write 50")
    first, *later = (snapshot for snapshot, _ in taken)
    assert first.memory_bytes > 24 * MIB
    assert all(snapshot.memory_bytes < 8 * MIB for snapshot in later)
    depths = [pagemaps.depth(tracking.store.paths.image(snapshot.id)) - copied() for snapshot, _ in taken]
    assert depths == [0, 1, 3, 4]
    assert [digest_in_fork(session, snapshot) for snapshot, _ in taken] == [digest for _, digest in taken]


def test_it_outlives_the_snapshots_that_it_was_built_on(session: Session, tracking: Engine) -> None:
    first = session.snapshot()
    ask(session, "write 40")
    second, digest = session.snapshot(), ask(session, "digest")
    tracking.cut_out(first)
    tracking.gc()
    assert digest_in_fork(session, second) == digest


def test_without_the_last_image_the_next_one_is_whole(session: Session, tracking: Engine) -> None:
    tracking.cut_out(session.snapshot())
    ask(session, "write 1")
    snapshot = session.snapshot()
    assert snapshot.memory_bytes > 24 * MIB
    assert digest_in_fork(session, snapshot) == ask(session, "digest")


def test_memory_that_is_given_back_stays_given_back(session: Session) -> None:
    session.snapshot()
    ask(session, "drop")
    ask(session, "write 5")
    snapshot, digest = session.snapshot(), ask(session, "digest")
    assert snapshot.memory_bytes < 8 * MIB
    assert digest_in_fork(session, snapshot) == digest


def test_guard_regions_come_back_and_nothing_behind_them_moves(session: Session) -> None:
    """To the kernel's scan they look like pages in swap."""
    ask(session, "guard")
    assert ask(session, "guarded") == "True"
    for _ in range(3):
        ask(session, "write 20")
        snapshot, digest = session.snapshot(), ask(session, "digest")
        (fork,) = session.fork(1, from_snapshot=snapshot.id)
        try:
            assert ask(fork, "digest") == digest
            assert ask(fork, "guarded") == "True"
        finally:
            fork.remove()


def test_direct_input_is_not_tracked(session: Session) -> None:
    """It writes past the page tables."""
    session.snapshot()
    assert is_tracked(session)
    ask(session, "direct")
    ask(session, "write 1")
    snapshot = session.snapshot()
    assert not is_tracked(session)
    assert snapshot.memory_bytes > 24 * MIB
    assert digest_in_fork(session, snapshot) == ask(session, "digest")


def test_threads_go_on(session: Session) -> None:
    """CRIU's code in each thread makes the kernel write to the thread's memory when its pages are saved already."""
    ask(session, "threads")
    for _ in range(2):
        snapshot = session.snapshot()
        (fork,) = session.fork(1, from_snapshot=snapshot.id)
        try:
            before, deadline = int(ask(fork, "ticks")), time.monotonic() + 30
            while int(ask(fork, "ticks")) <= before:
                assert time.monotonic() < deadline, "the threads stand still"
        finally:
            fork.remove()


def test_memory_that_changes_while_it_is_copied_comes_back_as_of_one_instant(session: Session) -> None:
    ask(session, "race")
    for _ in range(3):
        snapshot = session.snapshot()
        (fork,) = session.fork(1, from_snapshot=snapshot.id)
        try:
            fork.exec(f"kill -STOP {session.exec('pgrep -f program.py').stdout.decode().split()[0]}")
            numbers = _numbers(fork)
            assert numbers[0] > 0
            assert all(a >= b for a, b in itertools.pairwise(numbers)), "torn"
            assert numbers[0] - numbers[-1] <= 1
        finally:
            fork.remove()


def _numbers(session: Session) -> list[int]:
    """Of a program that is stopped: what its race had written."""
    address = int(session.exec("cat /tmp/address").stdout)
    pid = program_pid(session)
    deadline = time.monotonic() + 30
    while any(processes.state(int(thread.name)) != "T" for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, "it does not stop"  # the thread that gets the signal has to tell the others
        time.sleep(0.001)
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        block = memory.read(512 * 4096)
    return [int.from_bytes(block[page * 4096 : page * 4096 + 4], "little") for page in range(512)]


def test_a_restored_session_stores_only_what_is_not_in_the_image_that_it_came_from(session: Session) -> None:
    first, digest = session.snapshot(), ask(session, "digest")
    ask(session, "write 30")
    session.restore(first.id)
    assert ask(session, "digest") == digest
    ask(session, "write 300")
    second, digest = session.snapshot(), ask(session, "digest")
    ask(session, "write 3")
    third, last = session.snapshot(), ask(session, "digest")
    assert second.memory_bytes < 8 * MIB
    assert third.memory_bytes < 8 * MIB
    assert [digest_in_fork(session, one) for one in (second, third)] == [digest, last]


def test_a_restored_session_that_has_changed_most_of_it_is_copied(session: Session) -> None:
    first = session.snapshot()
    (fork,) = session.fork(1, from_snapshot=first.id)
    try:
        ask(fork, "write 5000")
        second, digest = fork.snapshot(), ask(fork, "digest")
        assert second.memory_bytes > 24 * MIB
        assert digest_in_fork(fork, second) == digest
    finally:
        fork.remove()
    assert digest_in_fork(session, first) == ask(session, "digest")


def test_a_tracked_process_that_has_written_most_of_it_is_copied_while_it_runs(session: Session, tracking: Engine) -> None:
    """Else it would stand still for as long as all of it takes to be saved."""
    taken = [(session.snapshot(), ask(session, "digest"))]
    for pages in (5000, 20, 5000, 5000):
        ask(session, f"write {pages}")
        taken.append((session.snapshot(), ask(session, "digest")))
    ask(session, "write 5000")
    images = [tracking.store.paths.image(snapshot.id) for snapshot, _ in taken]
    saved_by_criu = [sum(file.stat().st_blocks * 512 for file in image.glob("pages-*.img")) for image in images]
    assert max(saved_by_criu) < 12 * MIB, "it stood still for all of it"
    assert [pagemaps.depth(image) - copied() for image in images] == [0, 0, 1, 0, 0]
    assert [digest_in_fork(session, snapshot) for snapshot, _ in taken] == [digest for _, digest in taken]


def test_pause_and_resume(session: Session) -> None:
    session.snapshot()
    ask(session, "write 30")
    digest = ask(session, "digest")
    session.pause()
    session.resume()
    assert ask(session, "digest") == digest


def test_only_one_process_tracks_a_session(session: Session, tracking: Engine, home: Path) -> None:
    session.snapshot()
    with Engine(home, ahead=True, deltas=TRACKING) as other:
        theirs = other.session(session.id)
        ask(theirs, "write 10")
        whole, digest = theirs.snapshot(), ask(theirs, "digest")
        assert whole.memory_bytes > 24 * MIB
    ask(session, "write 10")
    mine, last = session.snapshot(), ask(session, "digest")
    assert mine.memory_bytes < 8 * MIB
    assert [digest_in_fork(session, one) for one in (whole, mine)] == [digest, last]


def test_chains_end(session: Session, tracking: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "MOST_PARENTS", 2)
    for _ in range(5):
        ask(session, "write 2")
        snapshot = session.snapshot()
        assert pagemaps.depth(tracking.store.paths.image(snapshot.id)) <= 2
    assert digest_in_fork(session, snapshot) == ask(session, "digest")


def test_what_is_missing_in_the_last_image_is_found_out(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.snapshot()
    saved = deltas.pagemaps.inherit

    def forgetful(images: Path, number: int, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        saved(images, number, ranges)
        return []

    monkeypatch.setattr(deltas.pagemaps, "inherit", forgetful)
    ask(session, "write 1")
    session.snapshot()
    ask(session, "write 1")
    snapshot = session.snapshot()
    assert snapshot.memory_bytes > 24 * MIB, "it was believed"
    assert digest_in_fork(session, snapshot) == ask(session, "digest")


def test_off(home: Path, engine: Engine) -> None:
    with Engine(home, ahead=True, deltas=Tracking(on=False, least=8 * MIB)) as plain:
        made = plain.new()
        try:
            start(made)
            made.snapshot()
            assert not is_tracked(made)
            ask(made, "write 1")
            assert made.snapshot().memory_bytes > 24 * MIB
        finally:
            made.remove()


def test_a_small_process_is_not_tracked(engine: Engine, home: Path) -> None:
    with Engine(home, ahead=True) as usual:
        made = usual.new()
        try:
            start(made)
            made.snapshot()
            assert not is_tracked(made)
        finally:
            made.remove()


OWNER = """
import sys, time
from pathlib import Path
from waypoint.deltas import Tracking
from waypoint.engine import Engine
from waypoint.errors import NotCapturable
engine = Engine(Path(sys.argv[1]), ahead=True, deltas=Tracking(least=8 << 20))
engine.session(sys.argv[2]).snapshot()
print("tracked", flush=True)
time.sleep(1000)
"""


def test_a_killed_owner_leaves_nothing_of_it(home: Path, engine: Engine) -> None:
    made = engine.new()
    owner = None
    try:
        start(made)
        owner = subprocess.Popen([sys.executable, "-c", OWNER, str(home), made.id], stdout=subprocess.PIPE, text=True)
        assert owner.stdout is not None
        assert owner.stdout.readline() == "tracked\n"
        assert is_tracked(made)
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        deadline = time.monotonic() + 30
        while is_tracked(made):  # a child that it was just starting has its descriptors until it is another program
            assert time.monotonic() < deadline
        ask(made, "write 10")
        with Engine(home, ahead=True, deltas=TRACKING) as heir:
            snapshot = heir.session(made.id).snapshot()
        assert digest_in_fork(made, snapshot) == ask(made, "digest")
    finally:
        if owner is not None and owner.stdout is not None:
            owner.kill()
            owner.wait()
            owner.stdout.close()
        made.remove()


def test_a_message_queue_is_refused_in_a_tracked_session_too(session: Session) -> None:
    session.snapshot()
    assert is_tracked(session)
    before = ask(session, "digest")
    session.exec("touch /dev/mqueue/letters")
    with pytest.raises(NotCapturable, match="/dev/mqueue/letters"):
        session.snapshot()
    session.exec("rm /dev/mqueue/letters")
    assert digest_in_fork(session, session.snapshot()) == before
