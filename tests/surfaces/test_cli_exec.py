"""`waypoint exec` and `run`: streams, exit codes, Ctrl-C and the JSON document."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cli_runner import Cli
from terminal_screen import CLI, Screen
from waypoint.engine import Engine
from waypoint.model import BaseRecord
from waypoint.session import Session

RESULT = {"exit_code", "stdout", "stderr", "cwd", "duration_ms", "timed_out", "truncated"}


@pytest.fixture(scope="module")
def cli(home: Path) -> Cli:
    return Cli(home)


@pytest.fixture(scope="module")
def shared(engine: Engine, small_base: BaseRecord) -> Iterator[Session]:
    """One session for the tests that leave nothing behind which the next would mind."""
    session = engine.new(base=small_base, name="shared")
    yield session
    session.remove()


@pytest.fixture(params=["quick", "whole"])
def way(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The plain form goes past click; an option that only the whole command line knows goes through it. Both must agree."""
    return () if request.param == "quick" else ("--log", os.devnull)


def wait_until(condition: object, what: str, timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


# -- results ------------------------------------------------------------------------------------------------------------


def test_streams_and_exit_code(cli: Cli, shared: Session, way: tuple[str, ...]) -> None:
    said = cli("exec", *way, "shared", "echo out; echo err >&2; (exit 7)")
    assert (said.code, said.raw, said.raw_errors) == (7, b"out\n", b"err\n")


def test_shell_state_stays(cli: Cli, shared: Session) -> None:
    cli.ok("exec", "shared", "cd /opt; export A=1; f() { echo f-$1; }; set -o noclobber")
    assert cli.ok("exec", "shared", 'pwd; echo $A; f x; set -o | grep "noclobber.*on"').lines[:3] == ["/opt", "1", "f-x"]
    cli.ok("exec", "shared", "cd /; set +o noclobber")


def test_document(cli: Cli, shared: Session, way: tuple[str, ...]) -> None:
    said = cli("exec", *way, "shared", "cd /home; echo out; echo err >&2; (exit 3)", "--json")
    assert said.code == 3
    document = said.json
    assert set(document) == RESULT
    assert document["duration_ms"] > 0
    del document["duration_ms"]
    assert document == {
        "exit_code": 3, "stdout": "out\n", "stderr": "err\n", "cwd": "/home", "timed_out": False, "truncated": False,
    }  # fmt: skip


def test_bytes_that_are_not_text(cli: Cli, shared: Session, way: tuple[str, ...]) -> None:
    every = bytes(range(256))
    said = cli("exec", *way, "shared", "cat", stdin=every)
    assert said.raw == every
    document = cli.ok("exec", *way, "--json", "shared", "cat; echo plain >&2", stdin=every).json
    assert set(document) == RESULT | {"stdout_base64"}
    assert base64.b64decode(document["stdout_base64"]) == every
    assert document["stdout"] == every.decode(errors="replace")
    assert document["stderr"] == "plain\n"


def test_command_and_directory_that_are_not_text(cli: Cli, shared: Session) -> None:
    document = cli.ok("exec", "shared", b"mkdir -p /tmp/\xff; cd /tmp/\xff; printf '\\377' | od -An -tx1; echo caf\xc3\xa9", "--json").json
    assert document["stdout"] == " ff\ncafé\n"
    assert (document["cwd"], base64.b64decode(document["cwd_base64"])) == ("/tmp/\ufffd", b"/tmp/\xff")
    cli.ok("exec", "shared", "cd /")


def test_words_are_joined(cli: Cli, shared: Session, way: tuple[str, ...]) -> None:
    assert cli.ok("exec", *way, "shared", "echo", "a;", "echo", "b").out == "a\nb\n"
    assert cli.ok("exec", *way, "shared", "--", "echo", "-n", "--json").out == "--json"


def test_a_large_command_and_a_heredoc(cli: Cli, shared: Session) -> None:
    text = "x" * 100_000
    assert cli.ok("exec", "shared", f"cat <<'END' | wc -c\n{text}\n'\"`$(\nEND").out.strip() == "100007"


def test_truncated_output_says_so(cli: Cli, shared: Session) -> None:
    document = cli.ok("exec", "shared", "seq 1 2000000", "--json").json
    assert document["truncated"] is True
    assert document["stdout"].startswith("1\n2\n") and document["stdout"].endswith("1999999\n2000000\n")
    assert len(document["stdout"]) < 5 << 20


def test_log_holds_everything(cli: Cli, shared: Session, tmp_path: Path) -> None:
    log = tmp_path / "log"
    document = cli.ok("exec", "shared", "seq 1 2000000", "--json", "--log", str(log)).json
    assert document["truncated"] is True
    assert log.read_text().split("\n")[:-1] == [str(number) for number in range(1, 2_000_001)]


def test_merge_keeps_the_order(cli: Cli, shared: Session) -> None:
    command = "for i in 1 2 3; do echo o$i; echo e$i >&2; done"
    assert cli.ok("exec", "shared", command, "--merge").lines == ["o1", "e1", "o2", "e2", "o3", "e3"]


# -- ends ---------------------------------------------------------------------------------------------------------------


def test_timeout(cli: Cli, shared: Session, way: tuple[str, ...]) -> None:
    cli.ok("exec", "shared", "KEPT=yes")
    said = cli("exec", *way, "shared", "--timeout", "0.3", "echo before; sleep 1000")
    assert (said.code, said.out) == (124, "before\n")
    assert "timed out" in said.err
    said = cli("exec", *way, "shared", "--timeout=0.3", "--json", "echo before; sleep 1000")
    assert said.code == 124
    assert said.raw_errors == b""
    document = said.json
    assert (document["timed_out"], document["exit_code"], document["stdout"]) == (True, 124, "before\n")
    assert cli.ok("exec", "shared", "echo $KEPT").out == "yes\n"


def test_shell_that_dies_is_told(cli: Cli, session: Session, way: tuple[str, ...]) -> None:
    cli.ok("exec", session.id, "LOST=1")
    said = cli("exec", *way, session.id, "echo bye; exit 3")
    assert (said.code, said.out) == (3, "bye\n")
    assert "ended the shell" in said.err
    said = cli("exec", *way, session.id, "echo [$LOST]")
    assert (said.code, said.out) == (0, "[]\n")
    assert "the shell had died" in said.err
    document = cli("exec", *way, session.id, "exit 4", "--json").json
    assert (document["exit_code"], document["shell_died"]) == (4, True)
    assert cli("exec", *way, session.id, "true", "--json").json["shell_fresh"] is True


def test_busy(cli: Cli, session: Session, way: tuple[str, ...]) -> None:
    running = cli.start("exec", session.id, "echo started; sleep 1000")
    assert running.stdout is not None
    assert running.stdout.readline() == b"started\n"
    said = cli("exec", *way, session.id, "true", "--no-wait", "--json")
    assert (said.code, said.error["code"]) == (125, "busy")
    waiting = cli.start("exec", *way, session.id, "echo after")
    assert waiting.poll() is None
    running.send_signal(signal.SIGINT)
    assert running.wait(20) == 130
    assert waiting.communicate(timeout=20)[0] == b"after\n"


def test_first_interrupt_goes_to_the_command(cli: Cli, session: Session, way: tuple[str, ...]) -> None:
    """Each program decides what an interrupt means: here it is counted."""
    cli.ok("exec", session.id, "KEPT=yes")
    program = "trap 'echo got it; exit 5' INT; echo ready; while :; do sleep 0.05; done"
    running = cli.start("exec", *way, session.id, f'bash -c "{program}"')
    assert running.stdout is not None and running.stderr is not None
    assert running.stdout.readline() == b"ready\n"
    running.send_signal(signal.SIGINT)
    assert running.communicate(timeout=20) == (b"got it\n", b"")
    assert running.returncode == 5
    assert cli.ok("exec", session.id, "echo $KEPT").out == "yes\n"


def test_second_interrupt_detaches(cli: Cli, session: Session, way: tuple[str, ...]) -> None:
    running = cli.start("exec", *way, session.id, "bash -c 'trap \"echo no\" INT; echo ready; while [ ! -e /tmp/go ]; do sleep 0.05; done; exit 9'")
    assert running.stdout is not None and running.stderr is not None
    assert running.stdout.readline() == b"ready\n"
    running.send_signal(signal.SIGINT)
    assert running.stdout.readline() == b"no\n"
    running.send_signal(signal.SIGINT)
    assert running.wait(20) == 130
    said = running.stderr.read().decode()
    assert f"waypoint wait {session.id} " in said
    words = said.split("`")[1].split()
    assert words[:2] == ["waypoint", "wait"]
    cli.ok("run", session.id, "--", "touch", "/tmp/go")
    assert cli(*words[1:]).code == 9


def test_interrupt_at_the_worst_moment(session: Session) -> None:
    """Just when the shell starts a program there is nobody to take a signal; it must reach the program all the same."""
    for _ in range(60):
        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(session.exec, "echo go; sleep 1000; echo after", on_stdout=lambda _, begun=begun: begun.set())
            assert begun.wait(20)
            session.signal(signal.SIGINT)
            assert running.result(20).exit_code == 130


def test_interrupt_before_it_began_gives_up(cli: Cli, session: Session) -> None:
    running = cli.start("exec", session.id, "echo started; sleep 1000")
    assert running.stdout is not None
    assert running.stdout.readline() == b"started\n"
    waiting = cli.start("exec", session.id, "touch /tmp/must-not-be")
    wait_until(lambda: int(session.state()["next"]) >= int(session.state()["current"]) + 2, "the second did not queue")
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(20) == 130
    running.send_signal(signal.SIGINT)
    running.wait(20)
    assert cli("exec", session.id, "test -e /tmp/must-not-be").code == 1


def test_reader_that_leaves_ends_the_command(cli: Cli, session: Session, way: tuple[str, ...]) -> None:
    """As in `waypoint exec S yes | head -1`, also when the shell itself does the printing; its state stays."""
    cli.ok("exec", session.id, "KEPT=yes")
    for command in ("yes", "while :; do echo y; done"):
        running = cli.start("exec", *way, session.id, command)
        assert running.stdout is not None
        assert running.stdout.read(2) == b"y\n"
        running.stdout.close()
        assert running.wait(30) == 141
        assert cli.ok("exec", session.id, "echo $KEPT").out == "yes\n"


def test_background_job_does_not_hold_exec(cli: Cli, session: Session) -> None:
    assert cli.ok("exec", session.id, "(sleep 0.3; echo late) & echo now").out == "now\n"
    wait_until(lambda: cli.ok("logs", session.id).out == "late\n", "the job's output is not in the log")
    assert cli.ok("logs", session.id, "--json").json == {"session": session.id, "output": "late\n"}


# -- stdin --------------------------------------------------------------------------------------------------------------


def test_stdin_of_every_kind(cli: Cli, shared: Session, tmp_path: Path, way: tuple[str, ...]) -> None:
    file = tmp_path / "input"
    file.write_bytes(b"from a file\n")
    with file.open("rb") as opened:
        assert cli.ok("exec", *way, "shared", "cat", stdin=opened).raw == b"from a file\n"
    assert cli.ok("exec", *way, "shared", "cat", stdin=b"from a pipe\n").raw == b"from a pipe\n"
    assert cli.ok("exec", *way, "shared", "cat; echo eof").raw == b"eof\n"
    assert cli.ok("exec", *way, "shared", "cat; echo eof", "-n", stdin=b"not passed on").raw == b"eof\n"
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *CLI, "exec", *way, "shared", "cat; echo eof"],
        env=cli._env, capture_output=True, timeout=60,
    )  # fmt: skip
    assert closed.stdout == b"eof\n", closed.stderr


def test_a_pipe_that_stays_open_does_not_hold_exec(cli: Cli, shared: Session, way: tuple[str, ...]) -> None:
    running = cli.start("exec", *way, "shared", "head -n 1", stdin=subprocess.PIPE)
    assert running.stdin is not None and running.stdout is not None
    running.stdin.write(b"one\n")
    running.stdin.flush()
    assert running.wait(20) == 0
    assert running.stdout.read() == b"one\n"


def test_input_that_nobody_reads_does_not_block_output(cli: Cli, shared: Session, way: tuple[str, ...]) -> None:
    said = cli.ok("exec", *way, "shared", "seq 1 500000 | tail -n 1; seq 1 300000", stdin=bytes(20 << 20))
    assert said.lines[0] == "500000" and said.lines[-1] == "300000"


def test_much_input_with_snapshots_in_between(cli: Cli, session: Session) -> None:
    """A snapshot drops every connection; not a byte of what was under way may be lost or come twice."""
    running = cli.start("exec", session.id, "cat > /tmp/got; sha256sum < /tmp/got", stdin=subprocess.PIPE)
    block = os.urandom(1 << 20)
    assert running.stdin is not None
    for number in range(24):
        running.stdin.write(block)
        if number % 6 == 3:
            session.snapshot()
    out, err = running.communicate(timeout=60)
    assert (err, running.returncode) == (b"", 0)
    assert out.split()[0].decode() == hashlib.sha256(block * 24).hexdigest()


def test_terminal_is_left_alone_unless_asked(cli: Cli, shared: Session) -> None:
    with Screen([*CLI, "exec", "shared", "cat; echo eof"]) as screen:
        screen.wait_for("eof\nended with 0")
    with Screen([*CLI, "exec", "shared", "-i", "head -n 1"]) as screen:
        screen.type("typed\r")
        screen.wait_for("typed\ntyped\nended with 0")


def test_ctrl_c_on_a_terminal(cli: Cli, session: Session) -> None:
    with Screen([*CLI, "exec", session.id, "echo ready; sleep 1000"]) as screen:
        screen.wait_for("ready")
        screen.press("C-c")
        screen.wait_for("ended with 130")


# -- run ----------------------------------------------------------------------------------------------------------------


def test_run(cli: Cli, shared: Session) -> None:
    said = cli("run", "shared", "--", "sh", "-c", 'echo "$0|$1"; echo err >&2; cat; exit 6', "a b", "--json", stdin=b"in")
    assert (said.code, said.out, said.err) == (6, "a b|--json\nin", "err\n")
    document = cli("run", "shared", "--json", "--", "sh", "-c", "pwd; exit 2").json
    assert set(document) == RESULT
    assert (document["exit_code"], document["stdout"], document["cwd"]) == (2, "/\n", "/")


def test_run_does_not_touch_the_shell(cli: Cli, shared: Session) -> None:
    cli.ok("exec", "shared", "cd /home; X=1")
    assert cli.ok("run", "shared", "--", "sh", "-c", "pwd; cd /tmp; echo [$X]").out == "/\n[]\n"
    assert cli.ok("exec", "shared", "pwd").out == "/home\n"
    cli.ok("exec", "shared", "cd /")


def test_run_with_options(cli: Cli, shared: Session) -> None:
    said = cli.ok("run", "shared", "--user", "user", "--cwd", "/tmp", "--env", "A=b c", "--", "sh", "-c", "id -un; pwd; echo $A; echo $HOME")
    assert said.lines == ["user", "/tmp", "b c", "/home/user"]
    said = cli("run", "shared", "--timeout", "0.3", "--", "sh", "-c", "echo x; sleep 1000")
    assert (said.code, said.out) == (124, "x\n")


def test_run_of_what_is_not_there(cli: Cli, shared: Session) -> None:
    said = cli("run", "shared", "--", "no-such-program")
    assert said.code == 127
    assert "no-such-program" in said.err
    assert cli("run", "shared", "--", "/etc").code == 126


def test_user(cli: Cli, shared: Session) -> None:
    cli.ok("exec", "shared", "cd /opt")
    assert cli.ok("exec", "shared", "id -un; pwd; echo $HOME", "--user", "user").lines == ["user", "/opt", "/home/user"]
    said = cli("exec", "shared", "id", "--user", "nobody-of-that-name", "--json")
    assert (said.code, said.error["code"]) == (2, "usage")
    cli.ok("exec", "shared", "cd /")
