"""Snapshots ahead of the asking, and second rows for what has not changed: never of another state than the session's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from waypoint import files
from waypoint.drafts import Drafting
from waypoint.engine import Engine
from waypoint.model import BaseRecord
from waypoint.session import Session


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


@pytest.fixture
def drafting(home: Path, engine: Engine) -> Iterator[Engine]:
    with Engine(home, ahead=True, drafts=Drafting(on=True)) as found:
        yield found
        assert found.store.tag == engine.store.tag


@pytest.fixture
def session(drafting: Engine, small_base: BaseRecord) -> Iterator[Session]:
    made = drafting.new(base=small_base)
    yield made
    made.remove()


def drafted(engine: Engine, session: Session) -> None:
    until(lambda: engine.drafts.standing(session.id), "a draft")


def image_names(engine: Engine) -> set[str]:
    """Those with something in them: an empty one waits for the next snapshot."""
    return {path.parent.name for path in engine.store.paths.images.glob("*/inventory.img")}


def unnamed(engine: Engine) -> set[str]:
    return image_names(engine) - {record.image for record in engine.snapshots()}


def test_a_snapshot_names_the_draft(drafting: Engine, session: Session) -> None:
    session.exec("N=1; echo one >/file; sleep 1000 &")
    drafted(drafting, session)
    before = image_names(drafting)
    taken = session.snapshot("named")
    assert taken.id in before, "it was there already"
    assert drafting.store.db.snapshot("named", session.record.tree).id == taken.id
    assert session.record.snapshot == taken.id
    session.exec("N=2; echo two >/file")
    session.restore(taken.id, verify=True)
    assert session.exec("echo $N; cat /file; jobs -pr | wc -l").stdout.split() == [b"1", b"one", b"1"]


def test_a_command_makes_the_draft_stale(drafting: Engine, engine: Engine, session: Session) -> None:
    session.exec("N=1")
    drafted(drafting, session)
    session.exec("N=2")
    assert session.fork()[0].exec("echo $N").stdout == b"2\n"
    session.exec("true")
    drafted(drafting, session)
    engine.session(session.id).exec("N=3")  # somebody else's: this engine is not told
    (fork,) = session.fork()
    assert fork.exec("echo $N").stdout == b"3\n"
    session.exec("true")
    drafted(drafting, session)
    engine.session(session.id).run(["/bin/sh", "-c", "echo beside >/beside"])
    (fork,) = session.fork()
    assert fork.exec("cat /beside").stdout == b"beside\n"
    for record in drafting.sessions():
        if record.id != session.id:
            drafting.session(record.id).remove()


def test_a_file_written_from_outside_makes_it_stale(drafting: Engine, engine: Engine, session: Session) -> None:
    session.exec("true")
    drafted(drafting, session)
    files.write_file(engine, session.id, "/outside", b"new\n")
    (fork,) = session.fork()
    assert fork.exec("cat /outside").stdout == b"new\n"
    fork.remove()


def test_work_in_the_background_makes_it_stale(drafting: Engine, session: Session) -> None:
    session.exec("(i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done; echo done >/done; sleep 1000) & true")
    until(lambda: session.run(["/bin/cat", "/done"]).stdout == b"done\n", "the job has worked")
    drafted(drafting, session)
    session.exec("(sleep 0.3; i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done; echo more >/more; sleep 1000) & true")
    drafted(drafting, session)
    upper = drafting.store.paths.upper(session.record.upper or 0)
    until(lambda: (upper / "more").exists() and (upper / "more").read_text() == "more\n", "the second job has worked")
    (fork,) = session.fork()
    assert fork.exec("cat /more").stdout == b"more\n"
    fork.remove()


def test_nothing_changed_costs_no_image(drafting: Engine, session: Session) -> None:
    session.exec("N=1; sleep 1000 &")
    first = session.snapshot()
    until(lambda: drafting.drafts._standing[session.id].settled, "settled")
    before = image_names(drafting)
    second = session.snapshot("again")
    third = session.snapshot()
    assert len({first.id, second.id, third.id}) == 3
    assert {second.image, third.image} == {first.image}
    assert (second.parent, third.parent) == (first.id, second.id)
    assert image_names(drafting) == before
    drafting.cut_out(first)  # the image stays, for the others
    drafting.gc()
    assert first.image in image_names(drafting)
    session.exec("N=2")
    session.restore(second.id, verify=True)
    assert session.exec("echo $N").stdout == b"1\n"
    session.restore(third.id)
    assert session.exec("echo $N").stdout == b"1\n"
    drafting.remove_snapshot(second.id, recursive=True)
    until(lambda: first.image not in image_names(drafting), "nobody names the image any more")


def test_something_changed_is_a_snapshot_of_its_own(drafting: Engine, engine: Engine, session: Session) -> None:
    session.exec("N=1")
    first = session.snapshot()
    engine.session(session.id).exec("N=2")
    second = session.snapshot()
    assert second.image != first.image
    (fork,) = session.fork(1, from_snapshot=second.id)
    assert fork.exec("echo $N").stdout == b"2\n"
    fork.remove()


def test_stale_drafts_and_gc_leave_nothing(drafting: Engine, engine: Engine, session: Session) -> None:
    for number in range(4):
        session.exec(f"N={number}; echo {number} >/file")
        drafted(drafting, session)
    until(lambda: len(unnamed(drafting)) <= 1, "stale ones are dropped")
    engine.gc()  # somebody else's, which waits for all that is under way: drafts give way
    assert unnamed(drafting) == set()
    session.exec("N=after")
    drafted(drafting, session)
    (fork,) = session.fork()
    assert fork.exec("echo $N").stdout == b"after\n"
    fork.remove()


def test_a_busy_or_large_session_is_not_drafted(home: Path, engine: Engine, small_base: BaseRecord) -> None:
    with Engine(home, ahead=True, drafts=Drafting(on=True, bytes=1)) as small:
        made = small.new(base=small_base)
        made.exec("true")
        time.sleep(0.3)
        assert not small.drafts.standing(made.id)
        assert unnamed(small) == set()
        made.remove()


KILLED = """
import sys, time
from pathlib import Path
from waypoint.drafts import Drafting
from waypoint.engine import Engine
engine = Engine(Path(sys.argv[1]), ahead=True, drafts=Drafting(on=True))
session = engine.session(sys.argv[2])
session.exec("N=drafted")
while not engine.drafts.standing(session.id):
    time.sleep(0.01)
print("there", flush=True)
time.sleep(1000)
"""


def test_the_draft_of_a_killed_process_is_garbage(
    engine: Engine, home: Path, small_base: BaseRecord, sessions: list[Session]
) -> None:
    session = engine.new(base=small_base)
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(home), session.id], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "there\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert unnamed(engine) != set()
    assert engine.gc()["images"] >= 1  # it may have had a directory for the next one, too
    assert unnamed(engine) == set()
    assert session.exec("echo $N").stdout == b"drafted\n"
    (fork,) = session.fork()
    assert fork.exec("echo $N").stdout == b"drafted\n"
