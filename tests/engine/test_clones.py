"""Forks are told apart where twins would be dangerous, and clocks do not run backwards."""

from __future__ import annotations

from waypoint.engine import Engine
from waypoint.identity import IDENTITY
from waypoint.session import Session

CLOCKS = "python3 -c 'import time; print(time.monotonic_ns(), time.time_ns())'"


def identity(session: Session) -> bytes:
    return session.exec(f"cat {IDENTITY}").stdout


def test_every_copy_has_an_identity_of_its_own(session: Session) -> None:
    first = identity(session)
    assert len(first) == 33
    session.exec(f"exec 7<{IDENTITY}")
    snapshot = session.snapshot()
    assert identity(session) == first, "a snapshot does not make the live session another one"
    forks = session.fork(3, from_snapshot=snapshot.id)
    try:
        found = {first, *(identity(fork) for fork in forks)}
        assert len(found) == 4
        (below,) = forks[0].fork(1)
        found.add(identity(below))
        below.remove()
    finally:
        for fork in forks:
            fork.remove()
    session.restore(snapshot.id)
    found.add(identity(session))
    assert len(found) == 6
    session.pause()
    session.resume()
    assert identity(session) not in found


def test_the_identity_is_no_change_of_the_users(session: Session) -> None:
    """A snapshot of an untouched fork needs no layer of its own."""
    session.exec("echo x >/var/tmp/x")
    snapshot = session.snapshot()
    session.restore(snapshot.id)
    assert session.verify(snapshot.id) == []


def test_the_hook_runs_in_each_fork_and_only_there(engine: Engine) -> None:
    session = engine.new(on_fork=f"TOKEN=$(cut -c1-8 {IDENTITY}); RANDOM=$((16#${{TOKEN:0:7}}))")
    try:
        session.exec("TOKEN=original; RANDOM=1")
        forks = session.fork(3)
        try:
            tokens = {fork.exec("echo $TOKEN").stdout for fork in forks}
            numbers = {fork.exec("echo $RANDOM $RANDOM $RANDOM").stdout for fork in forks}
        finally:
            for fork in forks:
                fork.remove()
        assert len(tokens) == 3
        assert len(numbers) == 3
        assert session.exec("echo $TOKEN").stdout == b"original\n"
    finally:
        session.remove()


def test_monotonic_time_does_not_go_backwards_and_wall_time_goes_on(host_session: Session) -> None:
    session = host_session
    monotonic, wall = (int(word) for word in session.exec(CLOCKS).stdout.split())
    snapshot = session.snapshot()
    (fork,) = session.fork(1, from_snapshot=snapshot.id)
    try:
        for copy in (fork, session):
            later = [int(word) for word in copy.exec(CLOCKS).stdout.split()]
            assert later[0] > monotonic
            assert later[1] > wall
    finally:
        fork.remove()
    session.pause()
    session.resume()
    last = [int(word) for word in session.exec(CLOCKS).stdout.split()]
    assert last[0] > monotonic
    assert last[1] > wall
