"""Coming back to a session: to a command that another caller started, and to its terminal from elsewhere."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from waypoint.errors import NotFound, WrongState
from waypoint.guest.terminal import Remote
from waypoint.kernel.usage import tree_usage
from waypoint.session import Session


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def abandoned(session: Session, command: str) -> int:
    """Start a command whose caller goes away when it has printed something and been fed `half `."""
    read, write = os.pipe()
    os.write(write, b"half ")
    numbers: list[int] = []
    printed = threading.Event()

    def leave(data: bytes) -> None:
        printed.set()

    def call() -> None:
        with open(read, "rb", buffering=0) as stdin, pytest.raises(WrongState):
            session.exec(command, stdin=stdin, on_start=numbers.append, on_stdout=leave)

    thread = threading.Thread(target=call)
    thread.start()
    assert printed.wait(30)
    session.pause()  # drops the caller, keeps the command
    thread.join(30)
    os.close(write)
    session.resume()
    return numbers[0]


def test_a_command_is_taken_up_with_its_input(session: Session) -> None:
    number = abandoned(session, "echo first; read word; echo the word is $word; cat >&2")
    read, write = os.pipe()
    os.write(write, b"whole\nrest")
    os.close(write)
    with open(read, "rb", buffering=0) as stdin:
        ended = session.wait(number, stdin=stdin, seen=(6, 0), timeout=30)
    assert (ended.stdout, ended.stderr, ended.exit_code) == (b"the word is half whole\n", b"rest", 0)
    again = session.wait(number, timeout=30)
    assert again.stdout == b"first\nthe word is half whole\n"


def test_a_command_that_never_was(session: Session) -> None:
    with pytest.raises(NotFound, match="no command 999"):
        session.wait(999, timeout=10)


def test_a_terminal_elsewhere(session: Session) -> None:
    terminal, shown, left = Remote(session, 33, 99), bytearray(), []
    thread = threading.Thread(target=lambda: left.append(terminal.serve(shown.extend)))
    thread.start()
    terminal.type(b"stty size; WORD=kept\r")
    until(lambda: b"33 99" in shown)
    terminal.resize(21, 61)
    terminal.type(b"stty size\r")
    until(lambda: b"21 61" in shown)
    session.snapshot()  # drops the connection; the terminal does not notice
    terminal.type(b"echo $((6*7))\r")
    until(lambda: b"42" in shown)
    terminal.close()
    thread.join(30)
    assert left == ["detached"] and session.exec("echo $WORD").stdout == b"kept\n"
    terminal.type(b"too late")
    terminal.resize(1, 1)


def test_the_size_without_a_terminal(session: Session) -> None:
    session.resize(40, 120)
    assert session.exec("stty size < /dev/tty").stdout == b"40 120\n"


def test_usage_grows_with_work(session: Session) -> None:
    before, memory = tree_usage(session.record.init_pid)
    assert memory > 1 << 20
    session.exec(
        "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; sh -c 'i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done'"
    )
    assert tree_usage(session.record.init_pid)[0] > before + 0.05
