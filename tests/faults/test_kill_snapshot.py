"""kill -9 of the caller of `snapshot` and `pause`, at every point: the session goes on or is paused, whole either way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from wreck import SETTING, check_state, grow, killed, leftovers, remove_all

from waypoint.engine import Engine
from waypoint.errors import WrongState
from waypoint.model import BaseRecord
from waypoint.session import Session

COPYING = ["staged", "quiesced", "frozen", "dumped", "renamed", "committed"]
ENDING = ["staged", "quiesced", "frozen", "renamed", "intended", "dumped", "committed"]
REHOMING = [*(f"snapshot-{point}" for point in (*ENDING, "moving", "moved")), "rehome-up", "rehome-committed"]
PAUSING = [*(f"snapshot-{point}" for point in ENDING), "pause-committed"]


def aftermath(engine: Engine, session: Session, known: set[str]) -> None:
    """Before gc the session is live or paused; after it nothing is left over, and every snapshot that is listed is whole."""
    fresh = Engine(engine.store.paths.home)
    state = next(record.state for record in fresh.sessions() if record.id == session.id)
    assert state in ("live", "paused")
    fresh.gc()
    assert all(record.files_bytes >= 0 for record in fresh.store.db.snapshots()), "nobody has counted"
    assert leftovers(fresh) == []
    if fresh.session(session.id).record.state == "paused":
        with pytest.raises(WrongState):
            session.exec("true")
        session.resume()
    check_state(session)
    assert known <= {record.id for record in fresh.snapshots()}, "a snapshot was lost"
    for record in fresh.snapshots():
        (fork,) = engine.fork(record, 1)
        check_state(fork)
        fork.remove()
    fresh.close()


@pytest.fixture
def clean(ground: Engine) -> Iterator[None]:
    """One case's wreck must not be seen by the next."""
    yield
    remove_all(ground)


@pytest.fixture
def subject(ground: Engine, floor: BaseRecord, clean: None) -> Session:
    session = ground.new(base=floor)
    session.exec(SETTING)
    return session


def wreck(engine: Engine, session: Session, point: str, code: str) -> None:
    before = session.snapshot("before")
    known = {record.id for record in engine.snapshots()}
    if code.endswith("# grown"):
        grow(session)
    killed(engine.store.paths.home, session.id, point, code)
    aftermath(engine, session, known)
    session.exec("V=two; echo two > /w/f; kill %1")
    session.restore(before.id)
    check_state(session)


@pytest.mark.parametrize("point", COPYING)
def test_copying(ground: Engine, subject: Session, point: str) -> None:
    wreck(ground, subject, f"snapshot-{point}", "session.snapshot()")


@pytest.mark.parametrize("point", COPYING)
def test_tracking(ground: Engine, subject: Session, point: str) -> None:
    tracked = "from waypoint.deltas import Deltas, Tracking; engine.deltas = Deltas(engine.store.paths, Tracking(least=4096))"
    wreck(ground, subject, f"snapshot-{point}", f"{tracked}; session.snapshot()")


@pytest.mark.parametrize("point", REHOMING)
def test_rehoming(ground: Engine, subject: Session, point: str) -> None:
    wreck(ground, subject, point, "session.snapshot() # grown")


@pytest.mark.parametrize("point", ["snapshot-moved", "rehome-begun", "snapshot-dumped", "snapshot-committed", "rehome-up"])
def test_rehoming_that_begins_early(ground: Engine, subject: Session, point: str) -> None:
    """CRIU reads the images while the old processes end, if nothing has to be counted meanwhile."""
    eager = "session = Engine(engine.store.paths.home, ahead=True).session(session.id)"
    wreck(ground, subject, point, f"from waypoint.engine import Engine; {eager}; session.snapshot(count=False) # grown")


@pytest.mark.parametrize("point", PAUSING)
def test_pause(ground: Engine, subject: Session, point: str) -> None:
    wreck(ground, subject, point, "session.pause()")


@pytest.mark.parametrize("point", COPYING)
def test_host_root(ground: Engine, clean: None, point: str) -> None:
    session = ground.new()
    session.exec(SETTING)
    wreck(ground, session, f"snapshot-{point}", "session.snapshot()")
