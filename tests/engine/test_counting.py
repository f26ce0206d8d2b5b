"""What the files of a snapshot take is found out a moment later, or by whoever asks: never wrong, never missing."""

from __future__ import annotations

import copy
import pickle
import time
from dataclasses import replace
from pathlib import Path

import pytest

from statefork import create_env_manager
from statefork.counted import as_given
from statefork.driver import Captured
from waypoint import capture, counting
from waypoint import engine as engine_module
from waypoint.counting import NOT_YET
from waypoint.engine import Engine
from waypoint.errors import NotFound, StoreError, VerifyFailed
from waypoint.kernel import trees
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
    monkeypatch.setattr(engine_module, "_SOME_SECONDS", 1e6)


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
    layer = eager.store.paths.upper(later.layers[0])
    assert later.manifest[FILES] == capture.file_digest(layer)
    assert FILES_WRITTEN * 4096 <= later.files_bytes <= trees.allocated_bytes(layer)  # without what is our own in it
    session.exec(f"{WRITE}; touch -d 2001-02-03 /many/7", timeout=60)
    at_once = session.snapshot()
    assert at_once.files_bytes >= FILES_WRITTEN * 4096
    unknown = {key: value for key, value in at_once.manifest.items() if key != FILES}
    eager.store.db.update_snapshot(at_once.id, files_bytes=NOT_YET, manifest=unknown)
    again = counting.counted(eager.store, row(eager, at_once))
    assert (again.files_bytes, again.manifest) == (at_once.files_bytes, at_once.manifest)


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
    taken_back = next(one for one in history if one.operation == "snapshot")
    assert taken_back.files_bytes >= FILES_WRITTEN * 4096, "it was known before it was gone"


def test_what_is_not_counted_yet_can_be_copied(eager: Engine, session: Session, never: None) -> None:
    taken = uncounted(session)
    record = Captured(None, (), files_bytes=eager.count_later(taken))
    for copied in (pickle.loads(pickle.dumps(record)), copy.deepcopy(record)):
        assert copied.files_bytes == record.files_bytes >= FILES_WRITTEN * 4096


def test_a_full_disk_keeps_nobody_from_looking(eager: Engine, session: Session, never: None, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = uncounted(session)

    def full(*_: object, **__: object) -> None:
        raise StoreError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(type(eager.store.db), "update_snapshot", full)
        assert {one.id: one for one in eager.snapshots()}[taken.id].files_bytes >= FILES_WRITTEN * 4096
        eager.gc()
    assert row(eager, taken).files_bytes == NOT_YET
    eager.gc()
    assert row(eager, taken).files_bytes >= FILES_WRITTEN * 4096
