"""Twins: snapshots brought up ahead. They must be what a restore gives, in nobody's way, and gone when nobody owns them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from waypoint import twins as twins_module
from waypoint.engine import Engine
from waypoint.errors import VerifyFailed
from waypoint.guest.layer import PRIVATE
from waypoint.kernel import processes, trees
from waypoint.kernel.criu_timers import has_running_timers
from waypoint.model import BaseRecord
from waypoint.session import Session
from waypoint.twins import Budget


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


@pytest.fixture
def paired(home: Path, engine: Engine) -> Iterator[Engine]:
    with Engine(home, ahead=True, twins=Budget(twins=2)) as found:
        yield found
        assert found.store.tag == engine.store.tag


@pytest.fixture
def session(paired: Engine, small_base: BaseRecord) -> Iterator[Session]:
    made = paired.new(base=small_base)
    yield made
    made.remove()


def has_twin(engine: Engine, snapshot: str) -> None:
    until(lambda: snapshot in engine.twins.waiting(), f"a twin of {snapshot}")


def strays(engine: Engine) -> int:
    """Inits of the store that no row names."""
    known = {record.init_pid for record in engine.sessions()}
    return len([init for init in processes.inits(engine.store.tag) if init.pid not in known])


def newest_layer(engine: Engine) -> tuple[int, str]:
    """The twin's own: a file that was open for writing may be in it, but nothing changes there."""
    upper = max(int(entry.name) for entry in engine.store.paths.layers.iterdir())
    return upper, trees.fingerprint(engine.store.paths.upper(upper), skip=PRIVATE)


def test_a_restore_and_a_fork_adopt_a_twin(paired: Engine, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.exec("N=1; echo one >/file; sleep 1000 &")
    snapshot = session.snapshot().id
    adopted: list[str] = []
    adopt = twins_module._Twin.adopt
    monkeypatch.setattr(twins_module._Twin, "adopt", lambda *given: adopted.append(snapshot) or adopt(*given))
    for verify in (False, True):
        session.exec("N=2; echo two >/file; kill %1")
        has_twin(paired, snapshot)
        session.restore(snapshot, verify=verify)
        assert session.exec("echo $N; cat /file; jobs -pr | wc -l").stdout.split() == [b"1", b"one", b"1"]
    has_twin(paired, snapshot)
    first, second = session.fork(2, from_snapshot=snapshot)
    first.exec("echo mine >/file")
    assert second.exec("echo $N; cat /file").stdout.split() == [b"1", b"one"]
    identities = {one.exec("cat /.waypoint/identity").stdout for one in (session, first, second)}
    assert len(identities) == 3
    assert len(adopted) >= 3
    for fork in (first, second):
        fork.remove()


def test_snapshots_between_which_nothing_changed_share_a_twin(paired: Engine, session: Session) -> None:
    session.exec("N=1")
    first = session.snapshot().id
    has_twin(paired, first)
    until(lambda: session.snapshot().shares == first, "nothing has happened since")
    second = session.snapshot()
    assert second.shares == first
    session.exec("N=2")
    (fork,) = session.fork(1, from_snapshot=second.id)
    assert paired.twins.waiting() == [], "it was adopted"
    assert fork.exec("echo $N").stdout == b"1\n"
    assert fork.record.snapshot == second.id
    fork.remove()


def test_somebody_elses_restore_is_seen_at_once(paired: Engine, engine: Engine, session: Session) -> None:
    """A restored session keeps the connection by which it first answered: that must not lead to what is gone."""
    session.exec("N=1")
    first = session.snapshot().id
    session.exec("N=2")
    second = session.snapshot().id
    for number, (snapshot, other) in enumerate([(second, first), (first, second)] * 2):
        has_twin(paired, snapshot)
        session.restore(snapshot)
        engine.session(session.id).restore(other)
        assert session.exec("echo $N").stdout == (b"2\n" if number % 2 else b"1\n")


def test_nothing_runs_in_a_twin_before_it_is_adopted(paired: Engine, session: Session) -> None:
    """The job writes down how often it ran: a twin that waits must not add to what was saved."""
    session.exec("(n=0; while sleep 0.02; do n=$((n+1)); echo $n >>/count; done) & sleep 0.1")
    snapshot = session.snapshot().id
    has_twin(paired, snapshot)
    (twin,) = [one for one in paired.twins._there if one.snapshot.id == snapshot]
    before = newest_layer(paired)
    time.sleep(0.5)
    assert newest_layer(paired) == before
    assert not twin.failed
    session.restore(snapshot)
    until(lambda: len(session.exec("cat /count").stdout.split()) > 8, "the job goes on")


def test_a_wrong_twin_is_not_adopted(paired: Engine, session: Session) -> None:
    session.exec("echo one >/file")
    snapshot = session.snapshot()
    has_twin(paired, snapshot.id)
    (paired.store.paths.upper(snapshot.layers[0]) / "file").write_text("tampered with\n")
    session.exec("X=still")
    with pytest.raises(VerifyFailed):
        session.restore(snapshot.id, verify=True)
    assert session.exec("echo $X").stdout == b"still\n"
    paired.twins.drop()
    until(lambda: strays(paired) == 0, "the refused twin is gone")


def test_running_timers_are_seen(paired: Engine, session: Session) -> None:
    session.exec("sleep 1000 &")
    images = paired.store.paths.image(session.snapshot().image)
    assert not has_running_timers(images)
    session.exec('timeout 900 sleep 1000 & until [ -n "$(ps -o pid= --ppid $!)" ]; do sleep 0.01; done')
    snapshot = session.snapshot()
    assert has_running_timers(paired.store.paths.image(snapshot.image))
    time.sleep(0.2)
    assert snapshot.id not in paired.twins.waiting()


def test_gc_and_removal_do_not_wait_for_twins(paired: Engine, engine: Engine, session: Session) -> None:
    snapshot = session.snapshot().id
    has_twin(paired, snapshot)
    engine.gc()  # another process's engine, as it were: it knows nothing of the twins
    assert session.exec("echo well").stdout == b"well\n"
    session.restore(snapshot)
    has_twin(paired, snapshot)
    paired.remove_snapshot(snapshot)
    until(lambda: strays(paired) == 0, "no twin of a removed snapshot")
    assert not paired.store.paths.image(snapshot).exists()


def test_the_budget_holds(home: Path, engine: Engine, small_base: BaseRecord) -> None:
    with Engine(home, ahead=True, twins=Budget(twins=2, bytes=1)) as poor:
        made = poor.new(base=small_base)
        made.snapshot()
        time.sleep(0.3)
        assert poor.twins.waiting() == []
        made.remove()
    with Engine(home, ahead=True, twins=Budget(twins=1)) as one:
        made = one.new(base=small_base)
        first = made.snapshot().id
        has_twin(one, first)
        made.exec("X=1")
        second = made.snapshot().id
        has_twin(one, second)
        until(lambda: first not in one.twins.waiting(), "the older one is let go")
        made.remove()
    until(lambda: strays(engine) == 0, "twins end with their engine")


KILLED = """
import sys, time
from pathlib import Path
from waypoint.engine import Engine
from waypoint.twins import Budget
engine = Engine(Path(sys.argv[1]), ahead=True, twins=Budget(twins=1))
session = engine.session(sys.argv[2])
snapshot = session.snapshot().id
while snapshot not in engine.twins.waiting():
    time.sleep(0.01)
print(snapshot, flush=True)
time.sleep(1000)
"""


def test_the_twins_of_a_killed_process_end_without_having_run(
    engine: Engine, home: Path, small_base: BaseRecord
) -> None:
    session = engine.new(base=small_base)
    session.exec("(while sleep 0.05; do echo ran >>/count; done) &")
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(home), session.id], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    snapshot = child.stdout.readline().strip()
    twins = [init for init in processes.inits(engine.store.tag) if init.pid != session.record.init_pid]
    assert len(twins) == 1
    before = newest_layer(engine)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert processes.wait_gone(twins[0], 30)
    assert newest_layer(engine) == before
    session.restore(snapshot)
    assert session.exec("echo back").stdout == b"back\n"
    session.remove()
    engine.gc()
    assert strays(engine) == 0
