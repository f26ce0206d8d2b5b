"""What the files of a snapshot take is found out a moment later, or by whoever asks: never wrong, never missing."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from statefork import create_env_manager
from statefork.counted import as_given
from waypoint import capture, counting
from waypoint import engine as engine_module
from waypoint.counting import NOT_YET
from waypoint.engine import Engine
from waypoint.errors import NotFound, VerifyFailed
from waypoint.model import BaseRecord, SnapshotRecord
from waypoint.session import Session
from waypoint.twins import Budget
from waypoint.verify import FILES

FILES_WRITTEN = 600
WRITE = f"mkdir -p /many; cd /many; for i in $(seq {FILES_WRITTEN}); do echo $i > $i; done; cd /"


@pytest.fixture(autouse=True)
def rehomed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "is_big", lambda *_, **__: True)


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody counts unless he is asked."""
    monkeypatch.setattr(engine_module, "_COUNT_SECONDS", 1e6)


def uncounted(session: Session) -> SnapshotRecord:
    session.exec(WRITE, timeout=60)
    taken = session.snapshot(count=False)
    assert taken.files_bytes == NOT_YET
    assert FILES not in taken.manifest
    return taken


def row(engine: Engine, snapshot: SnapshotRecord) -> SnapshotRecord:
    return engine.store.db.snapshot(snapshot.id)


def until_counted(engine: Engine, snapshot: SnapshotRecord) -> SnapshotRecord:
    deadline = time.monotonic() + 30
    while (found := row(engine, snapshot)).files_bytes == NOT_YET:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@pytest.fixture
def session(eager: Engine, small_base: BaseRecord, sessions: list[Session]) -> Session:
    return eager.new(base=small_base)


def test_it_is_counted_without_being_asked(eager: Engine, session: Session) -> None:
    taken = uncounted(session)
    count = eager.count_later(taken)
    later = until_counted(eager, taken)
    assert later.files_bytes == count() >= FILES_WRITTEN * 4096
    assert later.manifest == taken.manifest | {FILES: later.manifest[FILES]}


def test_it_says_the_same_as_one_that_is_counted_at_once(eager: Engine, session: Session, never: None) -> None:
    later = counting.counted(eager.store, uncounted(session))
    (fork,) = eager.fork(later, 1)
    fork.exec("touch /many/1")  # of the same size, in a layer of its own
    at_once = fork.snapshot()
    assert at_once.files_bytes != NOT_YET and at_once.manifest[FILES]
    assert later.manifest[FILES] == capture.file_digest(eager.store.paths.upper(later.layers[0]))
    again = counting.counted(eager.store, replace(later, files_bytes=NOT_YET))
    assert (again.files_bytes, again.manifest) == (later.files_bytes, later.manifest)


@pytest.mark.parametrize("way", ["snapshots", "gc", "count"])
def test_whoever_reads_it_first_finds_it_out(eager: Engine, session: Session, never: None, way: str, home: Path) -> None:
    """As after a process that was killed before it had counted."""
    taken = uncounted(session)
    with Engine(home) as other:
        if way == "snapshots":
            assert {one.id: one for one in other.snapshots()}[taken.id].files_bytes >= FILES_WRITTEN * 4096
        elif way == "gc":
            other.gc()
        else:
            assert other.count_later(taken)() >= FILES_WRITTEN * 4096
    found = row(eager, taken)
    assert found.files_bytes >= FILES_WRITTEN * 4096
    assert found.manifest[FILES]


def test_one_that_is_gone_takes_nothing(eager: Engine, session: Session, never: None) -> None:
    taken = uncounted(session)
    count = eager.count_later(taken)
    session.remove()
    eager.drop_snapshots([taken.id])
    assert count() == 0
    with pytest.raises(NotFound):
        counting.counted(eager.store, taken)


@pytest.mark.parametrize("twin", [False, True], ids=["plain", "twin"])
def test_what_is_verified_is_counted_before(
    home: Path, small_base: BaseRecord, sessions: list[Session], never: None, twin: bool
) -> None:
    with Engine(home, ahead=True, twins=Budget(twins=1) if twin else Budget()) as engine:
        session = engine.new(base=small_base)
        taken = uncounted(session)
        if twin:
            deadline = time.monotonic() + 30
            while taken.id not in engine.twins.waiting():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        session.restore(taken.id, verify=True)
        assert row(engine, taken).manifest[FILES]
        (engine.store.paths.upper(taken.layers[0]) / "many" / "7").write_text("changed in the store")
        with pytest.raises(VerifyFailed):
            session.restore(taken.id, verify=True)


def test_through_the_library_nobody_waits_unless_he_reads_it(tmp_path: Path, small_rootfs: Path, never: None) -> None:
    with create_env_manager("waypoint_build", home=tmp_path, rootfs=small_rootfs) as environment:
        environment.exec_command(WRITE, timeout=60)
        name = environment.snapshot()
        (taken,) = environment.snapshots()
        assert taken.id == name
        assert callable(as_given(taken, "files_bytes"))
        assert callable(as_given(environment.history[-1], "files_bytes"))
        assert taken.files_bytes >= FILES_WRITTEN * 4096
        assert as_given(taken, "files_bytes") == taken.files_bytes
        assert environment.history[-1].files_bytes == taken.files_bytes == environment.stats.files_bytes
        assert replace(taken, name="other").files_bytes == taken.files_bytes
    with create_env_manager("waypoint_build", home=tmp_path, rootfs=small_rootfs) as environment:
        environment.exec_command(WRITE, timeout=60)
        environment.snapshot()
        history = environment.history
    assert next(one for one in history if one.operation == "snapshot").files_bytes >= 0
