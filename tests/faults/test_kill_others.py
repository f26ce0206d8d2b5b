"""kill -9 of the caller of everything but `snapshot` and `pause`: what was there stays, what was not made leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from wreck import SETTING, check_state, killed, leftovers, until

from waypoint import faults
from waypoint.engine import Engine
from waypoint.errors import NotFound
from waypoint.model import BaseRecord
from waypoint.session import Session

UP = ["up-layer", "up-begun", "up-restored"]


@pytest.fixture(scope="module")
def subject(ground: Engine, floor: BaseRecord) -> Session:
    """One session for all cases, with the snapshot `one`; it lives in the state `two`."""
    session = ground.new(base=floor, name="subject")
    session.exec(SETTING)
    session.snapshot("one")
    two(session)
    session.snapshot("two")
    return session


def two(session: Session) -> None:
    session.exec("V=two; echo two > /w/f")


def value(session: Session) -> str:
    return session.exec("echo $V", timeout=30).stdout.decode().strip()


@pytest.fixture(autouse=True)
def nothing_lost(ground: Engine, subject: Session) -> Iterator[None]:
    """After every case: the session answers, both snapshots restore, nothing else is there."""
    yield
    check_state(subject, value(subject))
    for name in ("one", "two"):
        (fork,) = subject.fork(1, from_snapshot=name)
        check_state(fork, name)
        fork.remove()
    assert [record.id for record in ground.sessions()] == [subject.id]
    assert until(lambda: leftovers(ground) == []), leftovers(ground)  # a worker that is done needs a moment to end


def collected(engine: Engine) -> None:
    """gc after the crash, by somebody who knows nothing of it, and again: the second finds nothing."""
    with Engine(engine.store.paths.home) as fresh:
        fresh.gc()
        assert leftovers(fresh) == []
        assert not any(fresh.gc().values())


@pytest.mark.parametrize("network", ["none", "nat"])
@pytest.mark.parametrize("point", ["new-row", "start-launched", "new-started"])
def test_new(ground: Engine, point: str, network: str) -> None:
    code = f"engine.new(base=engine.store.db.base('floor'), network={network!r}, name='unborn')"
    killed(ground.store.paths.home, "", point, code)
    collected(ground)
    ground.new(base=ground.store.db.base("floor"), name="unborn").remove()


@pytest.mark.parametrize("point", [*UP, "restore-up", "restore-committed", "restore-retired"])
def test_restore(ground: Engine, subject: Session, point: str) -> None:
    if value(subject) == "one":
        subject.restore("two")
    killed(ground.store.paths.home, subject.id, point, "session.restore('one')")
    expected = "one" if point in ("restore-committed", "restore-retired") else "two"
    check_state(subject, expected)
    collected(ground)
    check_state(subject, expected)


@pytest.mark.parametrize("point", ["fork-row", *UP, "fork-up"])
def test_fork_makes_none(ground: Engine, subject: Session, point: str) -> None:
    killed(ground.store.paths.home, subject.id, point, "session.fork(3, from_snapshot='one')")
    collected(ground)


def test_fork_makes_all(ground: Engine, subject: Session) -> None:
    killed(ground.store.paths.home, subject.id, "fork-live", "session.fork(3, from_snapshot='one')")
    collected(ground)
    forks = [ground.session(record.id) for record in ground.sessions() if record.id != subject.id]
    assert len(forks) == 3
    for fork in forks:
        check_state(fork, "one")
        fork.remove()


TWIN = """
import time
from waypoint.twins import Budget
engine.twins.allow(Budget(twins=1))
one = engine.store.db.snapshot("one")
engine.twins.want(one)
while one.id not in engine.twins.waiting():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("point", ["up-restored", "restore-up", "restore-committed", "restore-retired"])
def test_restore_to_a_twin(ground: Engine, subject: Session, point: str) -> None:
    two(subject)
    killed(ground.store.paths.home, subject.id, point, f"{TWIN}\nsession.restore(one.id)")
    assert value(subject) == ("one" if point in ("restore-committed", "restore-retired") else "two")
    collected(ground)


@pytest.mark.parametrize("point", ["up-restored", "fork-up"])
def test_a_fork_from_a_twin_is_not_made(ground: Engine, subject: Session, point: str) -> None:
    killed(ground.store.paths.home, subject.id, point, f"{TWIN}\nengine.fork(one, 1)")
    collected(ground)


def test_a_fork_from_a_twin_is_made(ground: Engine, subject: Session) -> None:
    killed(ground.store.paths.home, subject.id, "fork-live", f"{TWIN}\nengine.fork(one, 1, ['heir'])")
    collected(ground)
    heir = ground.session("heir")
    check_state(heir, "one")
    heir.remove()


@pytest.mark.parametrize("point", [*UP, "resume-up", "restore-committed", "restore-retired"])
def test_resume(ground: Engine, subject: Session, point: str) -> None:
    now = value(subject)
    subject.pause()
    killed(ground.store.paths.home, subject.id, point, "session.resume()")
    collected(ground)
    subject.resume()
    check_state(subject, now)


@pytest.mark.parametrize("state", ["live", "paused"])
@pytest.mark.parametrize("point", ["remove-row", "remove-ended"])
def test_remove(ground: Engine, subject: Session, point: str, state: str) -> None:
    (fork,) = subject.fork(1, from_snapshot="one")
    if state == "paused":
        fork.pause()
    killed(ground.store.paths.home, fork.id, point, "session.remove()")
    collected(ground)
    with pytest.raises(NotFound):
        ground.session(fork.id)


@pytest.mark.parametrize("point", ["drop-rows", "drop-images"])
def test_remove_snapshot(ground: Engine, subject: Session, point: str) -> None:
    subject.exec("echo more > /w/more; rm /w/more")
    third = subject.snapshot("three")
    killed(ground.store.paths.home, "", point, f"engine.remove_snapshot({third.id!r})")
    with pytest.raises(NotFound):
        ground.store.db.snapshot("three")
    collected(ground)


@pytest.mark.parametrize("point", ["gc-sessions", "gc-processes", "gc-layers"])
def test_gc(ground: Engine, subject: Session, point: str) -> None:
    """Killed while it cleans up after another that was killed."""
    killed(ground.store.paths.home, subject.id, "fork-up", "session.fork(2, from_snapshot='one')")
    killed(ground.store.paths.home, "", point, "engine.gc()")
    check_state(subject, value(subject))
    collected(ground)


FILES = ["files-frozen", "files-intended", "files-ended", "files-committed"]


@pytest.mark.parametrize(("point", "verb"), [*((point, "pause") for point in FILES), ("files-frozen", "snapshot")])
def test_files_only(ground: Engine, floor: BaseRecord, point: str, verb: str) -> None:
    """Its processes are stopped through their cgroup, and must not stay so."""
    session = ground.new(base=floor, files_only=True)
    session.exec(SETTING)
    kept = session.snapshot("kept")
    killed(ground.store.paths.home, session.id, point, f"session.{verb}()")
    expected = "paused" if point in ("files-ended", "files-committed") else "live"
    assert until(lambda: [r.state for r in ground.sessions() if r.id == session.id] == [expected])
    if expected == "live":
        check_state(session)
    collected(ground)
    session.resume()
    assert session.exec("cat /w/f").stdout == b"one\n"
    session.remove()
    ground.remove_snapshot(kept.id)


def test_every_point_is_tried() -> None:
    """The names stand in the tests of this directory; a point without a test proves nothing."""
    from pathlib import Path

    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_kill_*.py"))
    assert [name for name in faults.POINTS if name not in text and f'"{name.partition("-")[2]}"' not in text] == []


BEGUN = """
from waypoint import faults
from waypoint.engine import Engine
eager = Engine(engine.store.paths.home, ahead=True)
session = eager.session(session.id)
one = session.restore("one").id
session.restore("two")
faults.arm({point!r})
{code}
"""
"""Who has restored a snapshot a moment ago begins before it has its rows."""


@pytest.mark.parametrize("point", ["restore-begun", *UP, "restore-up", "restore-committed", "restore-retired"])
def test_restore_that_was_begun_early(ground: Engine, subject: Session, point: str) -> None:
    killed(ground.store.paths.home, subject.id, "", BEGUN.format(point=point, code="session.restore(one)"))
    expected = "one" if point in ("restore-committed", "restore-retired") else "two"
    check_state(subject, expected)
    collected(ground)
    check_state(subject, expected)


@pytest.mark.parametrize("point", ["restore-begun", "fork-row", *UP, "fork-up"])
def test_fork_that_was_begun_early(ground: Engine, subject: Session, point: str) -> None:
    killed(ground.store.paths.home, subject.id, "", BEGUN.format(point=point, code="session.fork(1, from_snapshot=one)"))
    collected(ground)
