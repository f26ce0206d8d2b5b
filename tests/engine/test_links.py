"""Connections that are kept for the next command: each leads to what the session is, and stands in nobody's way."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from waypoint.engine import Engine
from waypoint.errors import ExecTimeout
from waypoint.guest import commands, frames
from waypoint.guest.connection import Connection, connect
from waypoint.guest.links import Links
from waypoint.model import Process
from waypoint.session import Session


@pytest.fixture
def other(home: object, engine: Engine) -> Iterator[Engine]:
    """As another process would have it."""
    with Engine(engine.store.paths.home) as found:
        yield found


def kept(session: Session) -> bool:
    engine = session._engine
    found = engine.links.take(session.id, engine.store.written(session.id))
    if found is not None:
        engine.links.keep(session.id, *found)
    return found is not None


def test_commands_in_a_row_share_a_connection(session: Session) -> None:
    session.exec("true")
    taken = session._engine.links.take(session.id, session._store.written(session.id))
    assert taken is not None
    session._engine.links.keep(session.id, *taken)
    for number in range(5):
        assert session.exec(f"echo {number}").stdout == b"%d\n" % number
    again = session._engine.links.take(session.id, session._store.written(session.id))
    assert again is not None and again[0] is taken[0]
    again[0].close()
    assert session.exec("echo new").stdout == b"new\n"


def test_another_may_save_and_restore_a_session_whose_connection_is_kept(session: Session, other: Engine) -> None:
    session.exec("V=one")
    theirs = other.session(session.id)
    one = theirs.snapshot().id
    session.exec("V=two")
    assert kept(session)
    theirs.restore(one)
    assert session.exec("echo $V").stdout == b"one\n"
    theirs.pause()
    theirs.resume()
    assert session.exec("echo $V").stdout == b"one\n"


def test_after_a_timeout_or_an_error_the_next_command_is_right(session: Session) -> None:
    with pytest.raises(ExecTimeout):
        session.exec("echo before; sleep 100", timeout=0.3)
    assert session.exec("echo after").stdout == b"after\n"

    def refuse(_: bytes) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        session.exec("echo unwanted; echo more", on_stdout=refuse)
    assert session.exec("echo wanted").stdout == b"wanted\n"


def test_no_more_are_kept_than_a_few(session: Session) -> None:
    forks = session.fork(20)
    for number, fork in enumerate(forks):
        assert fork.exec(f"echo {number}").stdout == b"%d\n" % number
    assert sum(kept(fork) for fork in forks) <= 16
    for number, fork in enumerate(forks):
        assert fork.exec(f"echo {number}").stdout == b"%d\n" % number
        fork.remove()


def test_a_process_that_was_forked_has_none_of_its_parents(session: Session) -> None:
    session.exec("true")
    assert kept(session)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if not session._engine.links._kept and session.exec("echo child").stdout == b"child\n":
                code = 0
        finally:
            os._exit(code)
    assert session.exec("echo parent").stdout == b"parent\n"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kept(session)


def test_what_comes_after_the_end_is_not_kept() -> None:
    links = Links()
    links.close()
    ours, theirs = socket.socketpair()
    with theirs:
        links.keep("s0", Connection(ours), 0)
        assert theirs.recv(1) == b""
    assert links.take("s0", 0) is None


def test_connections_that_nobody_uses_give_way(session: Session) -> None:
    """Init has room for 256: more processes than that may keep one each."""
    record = session.record
    init = Process(record.init_pid, record.init_start)
    running = session.connect()[0]
    running.send(frames.EXEC, 0, commands.exec_request("sleep 100000").payload)
    crowd = [connect(init, session.id) for _ in range(300)]
    try:
        assert session.run(["echo", "there is room"]).stdout == b"there is room\n"
        crowd[-1].send(frames.HELLO)
        frame = crowd[-1].receive()
        assert frame is not None and b"\nstate=busy\n" in b"\n" + frame.payload
        session.signal(signal.SIGKILL)
        kinds = []
        while not kinds or kinds[-1] != frames.DONE:
            frame = running.receive(time.monotonic() + 30)
            assert frame is not None, f"whoever waits for a command keeps its place; so far {kinds}"
            kinds.append(frame.type)
    finally:
        for one in [*crowd, running]:
            one.close()
