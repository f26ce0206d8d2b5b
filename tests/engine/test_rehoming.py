"""A session that is ended at a snapshot and comes back over its own layer: what goes wrong on the way leaves it paused and nothing else."""

from __future__ import annotations

import pytest

from waypoint import bringup
from waypoint.engine import Engine
from waypoint.errors import DiskFull, WaypointError
from waypoint.kernel import processes
from waypoint.model import BaseRecord
from waypoint.session import Session
from waypoint.store.database import Database


@pytest.fixture
def grown(eager: Engine, small_base: BaseRecord, sessions: list[Session]) -> Session:
    session = eager.new(base=small_base)
    sessions.append(session)
    session.exec("V=one; sleep 1000 & head -c 64000000 /dev/zero > /big")
    return session


def check(engine: Engine, session: Session) -> None:
    """It goes on from there, once."""
    init = session.record.init_pid
    assert session.exec("echo $V; jobs -pr | wc -l; wc -c < /big").stdout.split() == [b"one", b"1", b"64000000"]
    assert [one.pid for one in processes.inits(engine.store.tag)].count(init) == 1


def test_it_is_begun_while_the_old_processes_end(eager: Engine, grown: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    real = bringup.restore_tree

    def restore_tree(*arguments: object, **more: object) -> bringup.Live:
        begun.append(more["begun"] is not None)
        return real(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(bringup, "restore_tree", restore_tree)
    before = grown.record.upper
    grown.snapshot(count=False)
    assert begun == [True]
    assert grown.record.upper != before
    check(eager, grown)


@pytest.mark.parametrize("count", [True, False])
def test_a_row_that_cannot_be_written(eager: Engine, grown: Session, monkeypatch: pytest.MonkeyPatch, count: bool) -> None:
    """What has come back must not run beside what the session is resumed as."""
    real = Database.update_session

    def update_session(self: Database, session: str, **columns: object) -> None:
        if columns.get("state") == "live":
            raise DiskFull("no space left")
        real(self, session, **columns)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Database, "update_session", update_session)
        with pytest.raises(DiskFull) as raised:
            grown.snapshot(count=count)
    assert "waypoint resume" in raised.value.message
    assert grown.record.state == "paused"
    live = {record.init_pid for record in eager.sessions() if record.state == "live"}
    assert {one.pid for one in processes.inits(eager.store.tag)} == live
    grown.resume()
    check(eager, grown)


def test_one_that_cannot_begin_early(eager: Engine, grown: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    template = eager.stock.template
    if template is None:
        pytest.skip("no workers")
    real, asked = template.worker, [0]

    def worker(*arguments: object, **more: object) -> object:
        asked[0] += 1
        if asked[0] == 2:
            raise WaypointError("not now")
        return real(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(template, "worker", worker)
    grown.snapshot(count=False)
    assert asked[0] == 3
    check(eager, grown)
