"""A snapshot leaves memory shared that processes share after a fork: else a session would hold more for having been saved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from waypoint.deltas import Tracking
from waypoint.engine import Engine
from waypoint.kernel import processes
from waypoint.session import Session

MIB = 1 << 20
SIZE = 24 * MIB
PROGRAM = f"""
import mmap, os, time

memory = mmap.mmap(-1, {SIZE}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for at in range(0, {SIZE}, 4096):
    memory[at] = at >> 12 & 255
mine = 0 if os.fork() else 100
while True:
    for at in range(0, {MIB}, 4096):
        memory[at] = (memory[at] + 1) & 127 | mine
    open(f"/tmp/up-{{mine}}", "w").close()
    time.sleep(0.2)
"""


@pytest.fixture(params=[None, Tracking(least=8 * MIB)], ids=["whole", "tracked"])
def session(home: Path, engine: Engine, request: pytest.FixtureRequest) -> Iterator[Session]:
    with Engine(home, ahead=True, deltas=request.param or Tracking(on=False)) as own:
        made = own.new()
        made.exec(f"cat > /tmp/program.py <<'END'\n{PROGRAM}\nEND")
        made.exec("python3 /tmp/program.py 2> /tmp/errors &")
        deadline = time.monotonic() + 30
        while made.exec("test -f /tmp/up-0 && test -f /tmp/up-100").exit_code:
            assert time.monotonic() < deadline, made.exec("cat /tmp/errors")
            time.sleep(0.02)
        yield made
        made.remove()


def shared_bytes(session: Session) -> list[int]:
    """Of each of the two processes, what it has of its memory together with the other."""
    found = []
    for pid in processes.namespace_pids(session.record.init_pid):
        if b"program.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            found.append(sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Shared_Dirty:")))
    return found


def test_what_is_shared_stays_shared(session: Session) -> None:
    before = shared_bytes(session)
    assert len(before) == 2 and min(before) > SIZE - 4 * MIB
    for _ in range(3):
        session.snapshot()
        time.sleep(0.3)
        assert min(shared_bytes(session)) > min(before) - MIB
