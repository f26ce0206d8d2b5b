"""CRIU and its caller on processors of their own, while nobody else wants one; and everything as it was afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from waypoint.engine import Engine
from waypoint.errors import WaypointError
from waypoint.kernel import criu, criu_worker, processes, processors
from waypoint.kernel.criu_worker import Worker
from waypoint.model import BaseRecord

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")


def until(pid: int, state: str) -> None:
    deadline = time.monotonic() + 10
    while processes.state(pid) != state:
        assert time.monotonic() < deadline, processes.state(pid)
        time.sleep(0.005)


@pytest.fixture
def program() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "1000"])
    until(process.pid, "S")
    yield process.pid
    process.kill()
    process.wait()


def test_two_programs_are_kept_apart_and_the_caller_is_free_again(program: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = os.sched_getaffinity(0)
    monkeypatch.setattr(processors, "_running", lambda: 1)
    with processors.apart(program) as kept:
        assert kept
        assert len(os.sched_getaffinity(0)) == 1
        assert os.sched_getaffinity(program) == ours - os.sched_getaffinity(0)
    assert os.sched_getaffinity(0) == ours
    with pytest.raises(ZeroDivisionError), processors.apart(program):
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == ours


def test_not_on_a_busy_machine_and_not_with_one_processor(program: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = os.sched_getaffinity(0)
    monkeypatch.setattr(processors, "_running", lambda: len(ours))
    with processors.apart(program) as kept:
        assert not kept and os.sched_getaffinity(0) == ours == os.sched_getaffinity(program)
    monkeypatch.setattr(processors, "_running", lambda: 1)
    os.sched_setaffinity(0, {min(ours)})
    try:
        with processors.apart(program) as kept:
            assert not kept and os.sched_getaffinity(program) == ours
    finally:
        os.sched_setaffinity(0, ours)


def test_who_is_to_be_kept_apart_is_not_somebody_else_who_wants_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = os.sched_getaffinity(0)
    monkeypatch.setattr(processors, "_running", lambda: len(ours))
    busy = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    try:
        until(busy.pid, "R")
        with processors.apart(busy.pid) as kept:
            assert kept and os.sched_getaffinity(busy.pid) == ours - os.sched_getaffinity(0)
        os.kill(busy.pid, signal.SIGSTOP)
        until(busy.pid, "T")
        with processors.apart(busy.pid) as kept:
            assert not kept
    finally:
        busy.kill()
        busy.wait()


def test_what_works_for_the_caller_is_not_in_the_way(program: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = os.sched_getaffinity(0)
    monkeypatch.setattr(processors, "_running", lambda: len(ours))
    with processors.woken_elsewhere(program, beside=1):
        assert len(os.sched_getaffinity(program)) == len(ours) - 1
    monkeypatch.setattr(processors, "_running", lambda: len(ours) + 1)
    with processors.woken_elsewhere(program, beside=1):
        assert os.sched_getaffinity(program) == ours


def test_a_dump_has_its_own_when_all_stands_still(
    eager: Engine, small_base: BaseRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if something else was at work when it began."""
    kept: list[bool] = []
    real = processors.apart

    @contextlib.contextmanager
    def apart(pid: int) -> Iterator[bool]:
        if not kept:
            kept.append(False)
            yield False
            return
        with real(pid) as found:
            kept.append(found)
            yield found

    monkeypatch.setattr(processors, "_running", lambda: 1)
    session = eager.new(base=small_base)
    try:
        monkeypatch.setattr(processors, "apart", apart)
        ours = os.sched_getaffinity(0)
        session.snapshot()
        assert kept == [False, True]
        assert os.sched_getaffinity(0) == ours
    finally:
        session.remove()


def test_one_that_has_ended_keeps_nobody(program: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "_running", lambda: 1)
    gone = subprocess.Popen(["true"])
    gone.wait()
    with processors.apart(gone.pid) as kept:
        assert not kept and len(os.sched_getaffinity(0)) > 1


def test_who_counts_as_running_is_at_least_oneself() -> None:
    assert processors._running() >= 1


@pytest.mark.parametrize("on", [True, False])
def test_a_snapshot_with_criu_elsewhere(
    on: bool, eager: Engine, engine: Engine, small_base: BaseRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forced, and not used by an engine that has nothing ahead; a dump that fails leaves the caller as free as before."""
    monkeypatch.setattr(processors, "_running", lambda: 1)
    ours = os.sched_getaffinity(0)
    seen: list[tuple[set[int], set[int]]] = []
    receive = criu_worker.Worker._receive

    def watched(worker: Worker) -> bytes:
        seen.append((os.sched_getaffinity(0), os.sched_getaffinity(worker.pid)))
        return receive(worker)

    session = (eager if on else engine).new(base=small_base)
    try:
        session.exec("X=1; taskset -p 1 $$ >/dev/null 2>&1; sleep 1000 &")
        inside = session.exec("grep Cpus_allowed_list /proc/self/status").stdout
        monkeypatch.setattr(criu_worker.Worker, "_receive", watched)
        taken = session.snapshot()
        assert seen and all(bool(here & there) is not on for here, there in seen)
        assert os.sched_getaffinity(0) == ours
        session.restore(taken.id, verify=True)
        assert session.exec("echo $X; jobs -pr | wc -l").stdout.split() == [b"1", b"1"]
        assert session.exec("grep Cpus_allowed_list /proc/self/status").stdout == inside

        def broken(_: object) -> bool:
            raise WaypointError("no")

        monkeypatch.setattr(criu.criu_images, "mend_terminals", broken)
        with pytest.raises(WaypointError):
            session.snapshot()
        assert os.sched_getaffinity(0) == ours
    finally:
        session.remove()


def test_one_that_sleeps_is_woken_elsewhere_and_free_again(program: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = os.sched_getaffinity(0)
    monkeypatch.setattr(processors, "_running", lambda: 1)
    with pytest.raises(ZeroDivisionError), processors.woken_elsewhere(program):
        assert len(os.sched_getaffinity(program)) == len(ours) - 1
        raise ZeroDivisionError
    assert os.sched_getaffinity(program) == ours
    monkeypatch.setattr(processors, "_running", lambda: len(ours))
    with processors.woken_elsewhere(program):
        assert os.sched_getaffinity(program) == ours


def test_a_tree_is_not_kept_where_its_criu_was_for_a_moment(
    eager: Engine, small_base: BaseRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread of ours may come between: CRIU is well under way then before it is free again."""
    ours = os.sched_getaffinity(0)
    kept: list[int] = []

    @contextlib.contextmanager
    def for_long(pid: int, *, beside: int = 0) -> Iterator[None]:
        os.sched_setaffinity(pid, {max(ours)})
        kept.append(pid)
        yield

    session = eager.new(base=small_base)
    try:
        session.exec("sleep 1000 &")
        inside = session.exec("grep -h Cpus_allowed_list /proc/self/status /proc/$!/status").stdout
        taken = session.snapshot()
        session.restore(taken.id)
        monkeypatch.setattr(processors, "woken_elsewhere", for_long)
        session.restore(taken.id)
        assert kept
        assert session.exec("grep -h Cpus_allowed_list /proc/self/status /proc/$!/status").stdout == inside
    finally:
        session.remove()


def test_one_that_was_kept_to_less_is_not_given_more(program: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started the engine on some processors has its sessions there, too."""
    ours = os.sched_getaffinity(0)
    monkeypatch.setattr(processors, "_running", lambda: 1)
    given: list[tuple[int, frozenset[int]]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mask: given.append((pid, frozenset(mask))))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: ours if pid == 0 else ours | {1000})
    with processors.woken_elsewhere(program):
        pass
    assert given[-1] == (program, frozenset(ours))
