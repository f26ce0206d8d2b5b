"""Everything at once, from threads and processes, on the same few sessions: each verb succeeds or says why not, nothing tears."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable

import pytest
from wreck import SETTING, check_state, leftovers, out, remove_all, start_call

from waypoint.engine import Engine
from waypoint.errors import Busy, HasChildren, NotFound, WaypointError, WrongState
from waypoint.model import BaseRecord
from waypoint.session import Session

SECONDS = 20
THREADS = 10
EXPECTED = (
    WrongState,  # paused by another, or another snapshot was restored while the command ran
    NotFound,  # removed by another
    HasChildren,
    Busy,
)


class Crowd:
    """Threads that pick a session and a verb at random."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.seed = seed
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.failures: list[str] = []

    def run(self, number: int) -> None:
        choose = random.Random(self.seed * 1000 + number)
        deadline = time.monotonic() + SECONDS
        verbs: list[tuple[int, Callable[[Session, random.Random], None]]] = [
            (30, self.exec), (10, self.run_program), (12, self.snapshot), (12, self.restore), (8, self.fork),
            (8, self.remove), (6, self.remove_snapshot), (5, self.pause_and_resume), (3, self.gc),
        ]  # fmt: skip
        try:
            while time.monotonic() < deadline and not self.failures:
                verb = choose.choices([verb for _, verb in verbs], [weight for weight, _ in verbs])[0]
                session = self.engine.session(choose.choice(self.engine.sessions()).id)
                try:
                    verb(session, choose)
                    self.done[verb.__name__] += 1
                except EXPECTED as error:
                    self.refused[f"{verb.__name__}: {error.code}"] += 1
        except NotFound:
            self.run(number + 100)  # the session went between choosing and looking
        except BaseException:  # noqa: BLE001  told by the test
            self.failures.append(traceback.format_exc())
        finally:
            self.engine.store.db.close()

    def exec(self, session: Session, choose: random.Random) -> None:
        word = choose.randbytes(6).hex()
        result = session.exec(f"T={word}; sleep 0.0{choose.randrange(9)}; echo $V $T {word}", timeout=30)
        assert result.stdout.decode().split() == ["one", word, word], result

    def run_program(self, session: Session, choose: random.Random) -> None:
        result = session.run(["cat", "/w/f"], timeout=30)
        assert result.stdout == b"one\n", result

    def snapshot(self, session: Session, choose: random.Random) -> None:
        if len(self.engine.snapshots()) < 24:
            session.snapshot()

    def restore(self, session: Session, choose: random.Random) -> None:
        session.restore(choose.choice([record.id for record in self.engine.snapshots() if not record.pinned]))

    def fork(self, session: Session, choose: random.Random) -> None:
        if len(self.engine.sessions()) < 10:
            session.fork(choose.randint(1, 2))

    def remove(self, session: Session, choose: random.Random) -> None:
        if len(self.engine.sessions()) > 4:
            session.remove()

    def remove_snapshot(self, session: Session, choose: random.Random) -> None:
        known = [record.id for record in self.engine.snapshots() if not record.pinned]
        if len(known) > 6:
            self.engine.remove_snapshot(choose.choice(known), recursive=choose.random() < 0.3)

    def pause_and_resume(self, session: Session, choose: random.Random) -> None:
        session.pause()
        session.resume()

    def gc(self, session: Session, choose: random.Random) -> None:
        self.engine.gc()


@pytest.mark.timeout(150)
def test_ten_threads(ground: Engine, floor: BaseRecord) -> None:
    for _ in range(4):
        session = ground.new(base=floor)
        session.exec(SETTING)
        session.snapshot()
    crowd = Crowd(ground, seed=random.randrange(1000))
    threads = [threading.Thread(target=crowd.run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    told = f"seed {crowd.seed}; done {dict(crowd.done)}; refused {dict(crowd.refused)}"
    assert not crowd.failures, f"{told}\n{crowd.failures[0]}"
    assert all(
        crowd.done[verb] for verb in ("exec", "snapshot", "restore", "fork", "remove", "pause_and_resume", "gc")
    ), told
    whole(ground)


def whole(engine: Engine) -> None:
    """Every session answers with its state, every snapshot comes back whole, and nothing else is there."""
    for record in engine.sessions():
        session = engine.session(record.id)
        if record.state == "paused":
            session.resume()
        check_state(session)
        session.remove()
    for snapshot in engine.snapshots():
        (fork,) = engine.fork(snapshot, 1)
        check_state(fork)
        fork.remove()
    engine.gc()
    assert leftovers(engine) == []
    remove_all(engine)


LOOP = """
import time
from waypoint.errors import WrongState, NotFound, WaypointError
first = engine.snapshots()[0].id
deadline = time.monotonic() + 5
while time.monotonic() < deadline:
    try:
        {work}
    except (WrongState, NotFound) as error:
        pass
"""


def test_processes_at_once(ground: Engine, floor: BaseRecord) -> None:
    """Callers that share nothing but the store."""
    session = ground.new(base=floor)
    session.exec(SETTING)
    session.snapshot("first")
    works = [
        "session.snapshot()",
        "session.restore(first)",
        "[fork.remove() for fork in session.fork(2, from_snapshot=first)]",
        "assert session.exec('echo $V').stdout == b'one\\n'",
        "assert session.run(['cat', '/w/f']).stdout == b'one\\n'",
        "engine.gc(); time.sleep(0.05)",
    ]
    calls = [start_call(ground.store.paths.home, session.id, LOOP.format(work=work)) for work in works]
    for call, work in zip(calls, works, strict=True):
        _, said = call.communicate(timeout=50)
        assert call.returncode == 7, f"{work}: {said}"
    whole(ground)


def test_remove_while_others_wait(ground: Engine, floor: BaseRecord) -> None:
    """Whoever waits for a session that is removed meanwhile is told so."""
    for verb in (
        "session.exec('true')",
        "session.snapshot()",
        "session.pause()",
        "session.fork(1)",
        "session.remove()",
    ):
        session = ground.new(base=floor)
        assert out(session, "echo up") == "up\n"
        answers: list[object] = []

        def other(session: Session = session, verb: str = verb, answers: list[object] = answers) -> None:
            try:
                while True:
                    eval(verb, {"session": session})
            except WaypointError as error:
                answers.append(error)
            except BaseException:  # noqa: BLE001
                answers.append(traceback.format_exc())
            finally:
                ground.store.db.close()

        threads = [threading.Thread(target=other) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        try:
            session.remove()
        except NotFound:
            assert verb == "session.remove()"
        for thread in threads:
            thread.join(30)
        codes = {answer.code if isinstance(answer, WaypointError) else str(answer) for answer in answers}
        assert len(answers) == 3 and codes <= {"not_found", "wrong_state", "session_dead"}, codes
        remove_all(ground)
        ground.gc()
        assert leftovers(ground) == []
