"""A restore that begins before its rows are looked at: used when the snapshot is what it was, and of no consequence when not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from waypoint import beginning
from waypoint.engine import Engine
from waypoint.errors import CriuError, Exists, NotFound
from waypoint.model import BaseRecord, SnapshotRecord
from waypoint.session import Session


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each restore that was begun, whether it was gone on with."""
    found: list[bool] = []
    real = beginning.Beginning.of

    def of(self: beginning.Beginning, snapshot: SnapshotRecord) -> object:
        restoring = real(self, snapshot)
        if self.restoring is not None:
            found.append(restoring is not None)
        return restoring

    monkeypatch.setattr(beginning.Beginning, "of", of)
    return found


@pytest.fixture
def subject(eager: Engine, small_base: BaseRecord, sessions: list[Session]) -> Session:
    session = eager.new(base=small_base)
    session.exec("V=one; echo one >/file; sleep 1000 &")
    return session


def state(session: Session) -> bytes:
    return session.exec("echo $V; cat /file; jobs -pr | wc -l").stdout


ONE = b"one\none\n1\n"


def spoil(session: Session) -> None:
    session.exec("V=two; echo two >/file; kill %1; wait")


def directories(engine: Engine) -> tuple[set[str], set[str]]:
    """Sessions and layers on disk, without what waits for the next operation, when no more of that is being made."""
    engine.gc()
    paths, spares = engine.store.paths, engine.stock.spares

    def look() -> tuple[set[str], set[str]]:
        sessions = {one.name for one in paths.session("x").parent.iterdir()}
        layers = {one.name for one in paths.layers.iterdir()}
        return sessions - set(spares.waiting_sessions()), layers - set(map(str, spares.waiting()))

    found = look()
    deadline = time.monotonic() + 10
    while True:
        time.sleep(0.15)
        found, before = look(), found
        if found == before:
            return found
        assert time.monotonic() < deadline, "directories come and go"


def test_restores_and_forks_are_begun_before_they_may_be(eager: Engine, subject: Session, begun: list[bool]) -> None:
    one = subject.snapshot().id
    for _ in range(3):
        spoil(subject)
        subject.restore(one)
        assert state(subject) == ONE
        (fork,) = subject.fork(1, from_snapshot=one)
        assert state(fork) == ONE
        fork.remove()
    assert begun == [True] * 6


def test_what_was_begun_of_another_state_comes_to_nothing(
    eager: Engine, subject: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the snapshot were not any more what was known of it."""
    one = subject.snapshot().id
    before = directories(eager)
    monkeypatch.setattr(beginning.Beginning, "of", lambda self, snapshot: None)
    spoil(subject)
    subject.restore(one)
    assert state(subject) == ONE
    (fork,) = subject.fork(1, from_snapshot=one)
    assert state(fork) == ONE
    fork.remove()
    after = directories(eager)
    assert after[0] == before[0]
    assert len(after[1]) == len(before[1])


@pytest.mark.parametrize("wanted", ["restore", "fork"])
def test_of_a_snapshot_that_somebody_else_has_removed(
    eager: Engine, engine: Engine, subject: Session, wanted: str
) -> None:
    one = subject.snapshot().id
    subject.exec("V=later")
    subject.snapshot()
    engine.drop_snapshots([one])
    before = directories(eager)
    with pytest.raises(NotFound, match=one):
        if wanted == "restore":
            subject.restore(one)
        else:
            subject.fork(1, from_snapshot=one)
    assert subject.exec("echo $V").stdout == b"later\n"
    assert directories(eager) == before


@pytest.mark.parametrize("ahead", [True, False])
def test_a_fork_that_fails_leaves_no_directory(
    eager: Engine, engine: Engine, subject: Session, ahead: bool, sessions: list[Session]
) -> None:
    chosen = eager if ahead else engine
    session = chosen.session(subject.id)
    one = session.snapshot().id
    session.fork(1, from_snapshot=one, names=["taken"])
    before = directories(chosen)
    for _ in range(3):
        with pytest.raises(Exists):
            session.fork(1, from_snapshot=one, names=["taken"])
    assert directories(chosen) == before


def test_two_at_once_of_one_session(eager: Engine, subject: Session) -> None:
    one = subject.snapshot().id
    problems: list[BaseException] = []

    def restore() -> None:
        try:
            for _ in range(4):
                eager.session(subject.id).restore(one)
        except BaseException as error:  # noqa: BLE001
            problems.append(error)
        finally:
            eager.store.db.close()

    threads = [threading.Thread(target=restore) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems
    assert state(subject) == ONE


def broken(engine: Engine, snapshot: str) -> Callable[[], object]:
    """Without its shell's memory no snapshot can be restored."""
    found = next(iter(engine.store.paths.image(snapshot).glob("pagemap-*.img")))
    text = found.read_bytes()
    found.write_bytes(b"")
    return lambda: found.write_bytes(text)


@pytest.mark.parametrize("ahead", [True, False])
def test_the_log_of_one_that_fails_is_kept(eager: Engine, engine: Engine, subject: Session, ahead: bool) -> None:
    session = (eager if ahead else engine).session(subject.id)
    one = session.snapshot().id
    mend = broken(eager, one)
    spoil(session)
    with pytest.raises(CriuError) as caught:
        session.restore(one)
    log = eager.store.paths.session(subject.id) / "restore.log"
    assert caught.value.details["log"] == str(log)
    assert "Error" in log.read_text()
    assert session.exec("echo $V").stdout == b"two\n"
    mend()
    session.restore(one)
    assert state(session) == ONE
