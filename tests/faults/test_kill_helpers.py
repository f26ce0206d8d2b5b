"""kill -9 of the programs that the engine starts, CRIU and the launcher; and a command in flight while the caller dies."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from wreck import SETTING, check_state, grow, killed, leftovers, out, remove_all, start_call, until

from waypoint.engine import Engine
from waypoint.errors import WaypointError, WrongState
from waypoint.kernel import processes
from waypoint.model import BaseRecord, ExecResult
from waypoint.session import Session

BIG = "head -c 200000000 /dev/zero | tail -c 200000000 | sleep 1000 &"
"""`tail` holds 200 MB in memory: CRIU is busy with it for long enough to be met in the middle."""


@pytest.fixture
def subject(ground: Engine, floor: BaseRecord) -> Iterator[Session]:
    session = ground.new(base=floor)
    session.exec(SETTING)
    yield session
    remove_all(ground)


@pytest.fixture
def big(subject: Session) -> Session:
    subject.exec(BIG)
    assert until(lambda: _memory(subject) > 190_000)
    return subject


def _memory(session: Session) -> int:
    found = 0
    for pid in processes.namespace_pids(session.record.init_pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = Path(f"/proc/{pid}/status").read_text()
            found += next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)
    return found


def _helper(caller: int, word: bytes) -> int:
    """The pid of a child of `caller` whose command line has `word`; 0 when there is none."""
    try:
        for thread in Path(f"/proc/{caller}/task").iterdir():
            for pid in (thread / "children").read_text().split():
                if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def kill_helper(engine: Engine, session: str, code: str, word: bytes, when: Callable[[int], bool]) -> str:
    """Run `code`, kill its helper when `when(helper)` is true, and return what the caller then says; "" if it was too late."""
    call = start_call(engine.store.paths.home, session, code)
    while call.poll() is None:
        helper = _helper(call.pid, word)
        if helper and when(helper):
            os.kill(helper, signal.SIGKILL)
            break
    _, said = call.communicate(timeout=50)
    assert call.returncode in (1, 7), said
    return said


def test_criu_in_the_middle_of_a_dump(ground: Engine, big: Session) -> None:
    images = ground.store.paths.images

    def half_written(_: int) -> bool:
        return any(path.stat().st_size > 20_000_000 for path in images.glob(".*/pages-*.img"))

    said = kill_helper(ground, big.id, "session.snapshot()", b"swrk", half_written)
    assert "CriuError" in said and "criu ended without an answer" in said
    assert out(big, "echo $V; jobs | grep -c Running") == "one\n2\n"
    assert ground.snapshots() == []
    taken = big.snapshot()
    (fork,) = big.fork(1, from_snapshot=taken.id)
    assert out(fork, "echo $V; jobs | grep -c Running") == "one\n2\n" and _memory(fork) > 190_000
    ground.gc()
    assert leftovers(ground) == []


def test_criu_in_the_middle_of_a_restore(ground: Engine, big: Session) -> None:
    taken = big.snapshot()
    big.exec("V=two; echo two > /w/f; kill %+; wait %+")

    def half_restored(helper: int) -> bool:
        try:
            children = Path(f"/proc/{helper}/task/{helper}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return any(len(processes.namespace_pids(int(pid))) > 3 for pid in children)

    said = kill_helper(ground, big.id, f"session.restore({taken.id!r})", b"swrk", half_restored)
    assert "CriuError" in said
    check_state(big, "two")
    assert leftovers(ground) == [], "the caller lived: it must have cleaned up by itself"
    big.restore(taken.id)
    assert out(big, "echo $V; jobs | grep -c Running") == "one\n2\n"


@pytest.mark.parametrize("verb", ["new", "criu"])
def test_the_launcher(ground: Engine, subject: Session, verb: str) -> None:
    """It lives for some milliseconds: tried until it is met."""
    code = "engine.new(base=engine.store.db.base('floor'))" if verb == "new" else "session.fork(1)"
    said = ""
    while not said:
        said = kill_helper(ground, subject.id, code, b"\0%s\0--" % verb.encode(), lambda _: True)
    assert "Error" in said
    ground.gc()
    assert leftovers(ground) == []
    check_state(subject)


@pytest.mark.parametrize("point", ["quiesced", "frozen", "dumped", "committed"])
def test_a_command_goes_on(subject: Session, ground: Engine, point: str) -> None:
    results = _while_a_command_runs(
        subject, lambda: killed(ground.store.paths.home, subject.id, f"snapshot-{point}", "session.snapshot()")
    )
    assert results[0].exit_code == 9 and results[0].stdout == _ALL


def test_a_command_goes_on_after_resume(subject: Session, ground: Engine) -> None:
    """The session was ended in the middle of it, so its caller is told; the command itself is not lost."""
    grow(subject)
    with pytest.raises(WrongState, match="paused"):
        _while_a_command_runs(
            subject, lambda: killed(ground.store.paths.home, subject.id, "snapshot-dumped", "session.snapshot()")
        )
    subject.resume()
    result = subject.wait(timeout=30)
    assert result.exit_code == 9 and result.stdout == _ALL


_ALL = b"".join(b"%d\n" % i for i in range(1, 101))


def _while_a_command_runs(session: Session, event: Callable[[], None]) -> list[ExecResult]:
    started = threading.Event()
    results: list[ExecResult] = []
    failures: list[WaypointError] = []

    def run() -> None:
        try:
            command = "for i in $(seq 100); do echo $i; sleep 0.02; done; (exit 9)"
            results.append(session.exec(command, timeout=40, on_stdout=lambda _: started.set()))
        except WaypointError as error:
            failures.append(error)
        finally:
            session._store.db.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    event()
    thread.join(45)
    if failures:
        raise failures[0]
    return results
