"""What init keeps of commands: the last 256 KiB of each stream to the byte, and no more memory than that takes.

init is in every snapshot, so each page that it has ever touched and still holds is paid for in every dump and every restore.
"""

from __future__ import annotations

import time

import pytest

from waypoint.session import Session

RING = 256 << 10
NUMBERS = b"".join(b"%d\n" % i for i in range(1, 200_001))


def memory(session: Session) -> tuple[int, int]:
    """KiB of memory of init's own, and its mappings."""
    with open(f"/proc/{session.record.init_pid}/smaps") as smaps:
        lines = smaps.read().splitlines()
    return (
        sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")),
        sum(line.startswith("VmFlags:") for line in lines),
    )


def test_little_output_leaves_init_small(session: Session) -> None:
    session.exec("echo out; echo err >&2")
    size_kib, mappings = memory(session)
    for _ in range(100):
        session.exec("echo out; echo err >&2")
    after_kib, mappings_after = memory(session)
    assert after_kib - size_kib < 128, "a finished command takes some hundred bytes"
    assert mappings_after <= mappings + 1


def test_kept_output_takes_no_mappings_and_goes_back(session: Session) -> None:
    session.exec("true")
    size_kib, mappings = memory(session)
    for _ in range(40):
        session.exec("seq 100000; seq 30000 >&2")
    assert memory(session)[1] <= mappings + 2
    session.exec("cat >/dev/null", stdin=bytes(4 << 20))
    session.exec("x='" + "x" * (4 << 20) + "'; unset x")
    for _ in range(70):
        session.exec("true")
    session.snapshot()
    after_kib, mappings_after = memory(session)
    assert after_kib - size_kib < 256, "what was used once is in the snapshot"
    assert mappings_after <= mappings + 2


def test_snapshots_leave_nothing_in_init(session: Session) -> None:
    session.exec("for i in {1..20000}; do v+=xxxxxxxxxx; done")
    session.snapshot()
    size_kib, _ = memory(session)
    for i in range(4):
        session.exec(f"i={i}; echo $i > /tmp/changed")
        session.snapshot()
    assert memory(session)[0] - size_kib < 64, "the shell's answers about its variables are kept"


@pytest.mark.parametrize(
    "size", [1, 1023, 1024, 1025, 4095, 4096, 4097, 65_537, RING - 1, RING, RING + 1, 700 << 10, 1_200_000]
)
def test_a_late_reader_gets_the_last_bytes_exactly(session: Session, size: int) -> None:
    """In pieces, so that the buffer grows more than once; stderr a little longer than stdout."""
    write = "numbers() { seq 200000 | head -c $1; }; in_pieces() { numbers $1 | (head -c 700; sleep 0.02; head -c 900; cat); }; "
    done = session.exec(f"{write} in_pieces {size}; in_pieces {size + 7} >&2")
    assert (done.stdout, done.stderr, done.lost_bytes) == (NUMBERS[:size], NUMBERS[: size + 7], 0)
    session.exec("echo another")
    again = session.wait(done.command_id, timeout=30)
    assert again.stdout == NUMBERS[:size][-RING:] and again.stderr == NUMBERS[: size + 7][-RING:]
    assert again.lost_bytes == max(0, size - RING) + max(0, size + 7 - RING)
    part = session.wait(done.command_id, seen=(size // 2, size), timeout=30)
    assert part.stdout == NUMBERS[:size][max(size // 2, size - RING) :] and part.stderr == NUMBERS[size : size + 7]
    if size % RING == 1:
        fork = session.fork(1)[0]
        there = fork.wait(done.command_id, timeout=30)
        assert (there.stdout, there.stderr) == (again.stdout, again.stderr)


def test_the_background_log_is_the_last_bytes(session: Session) -> None:
    session.exec("(sleep 0.2; echo first) &")
    wait_for_log(session, b"first\n")
    session.exec("(sleep 0.2; seq 200000 | head -c 700000) &")
    wait_for_log(session, NUMBERS[:700_000][-RING:])


@pytest.mark.parametrize("size", [300_000, 400_000, 450_000])
def test_a_job_does_not_take_the_place_of_the_commands_own_output(session: Session, size: int) -> None:
    """Its caller is slow: init holds a part of the output when the job prints."""

    def slow(_: bytes) -> None:
        if not seen:
            wait_for_log(session, b"late\n")
        seen.append(True)

    seen: list[bool] = []
    done = session.exec(f"seq 200000 | head -c {size}; (sleep 0.5; echo late) &", on_stdout=slow)
    assert (done.stdout, done.lost_bytes) == (NUMBERS[:size], 0)
    assert session.wait(done.command_id, timeout=30).stdout == NUMBERS[:size][-RING:]
    assert session.background_output() == b"late\n"


def wait_for_log(session: Session, wanted: bytes) -> None:
    deadline = time.monotonic() + 20
    while (found := session.background_output()) != wanted:
        assert time.monotonic() < deadline, found[-100:]
        time.sleep(0.02)
