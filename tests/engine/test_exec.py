"""What exec promises: evaluated in the shell itself, streams apart, every strange end defined."""

from __future__ import annotations

import io
import os
import threading
import time

import pytest

from waypoint.errors import Busy, ExecTimeout, UsageError
from waypoint.session import Session


def out(session: Session, command: str, **options: object) -> str:
    return session.exec(command, **options).stdout.decode()  # type: ignore[arg-type]


def test_state_stays_between_commands(session: Session) -> None:
    session.exec(
        "cd /tmp; export FOO=bar; declare -A map=([a]=1); arr=(x 'y z'); f() { echo f-$1; }; alias ll='echo alias'"
    )
    session.exec("set -o pipefail; shopt -s nullglob; umask 027; trap 'echo bye' USR2; set -- one two")
    said = out(
        session, 'echo $FOO ${map[a]} "${arr[1]}" $(f 2) $(umask) $2; ll; pwd; set -o | grep pipefail; trap -p USR2'
    )
    assert said.splitlines() == [
        "bar 1 y z f-2 0027 two",
        "alias",
        "/tmp",
        "pipefail       \ton",
        "trap -- 'echo bye' SIGUSR2",
    ]


def test_streams_are_apart_and_status_is_the_commands(session: Session) -> None:
    result = session.exec("echo out; echo err >&2; (exit 7)")
    assert (result.stdout, result.stderr, result.exit_code) == (b"out\n", b"err\n", 7)
    assert out(session, "echo $?") == "7\n"


def test_merged_streams_keep_their_order(session: Session) -> None:
    result = session.exec("for i in 1 2 3; do echo o$i; echo e$i >&2; done", merge=True)
    assert result.output == b"o1\ne1\no2\ne2\no3\ne3\n"


@pytest.mark.parametrize(
    "command",
    ["cat <<'E'\na $x 'b' \"c\"\n\tE2\nE", "printf '%s' \"$'\\''\"", "echo 'multi\nline'; echo \\\ncontinued"],
)
def test_text_is_taken_to_the_letter(session: Session, command: str) -> None:
    import subprocess

    wanted = subprocess.run(["bash", "-c", command], capture_output=True, check=True).stdout
    assert session.exec(command).stdout == wanted


def test_bytes_that_are_not_text(session: Session) -> None:
    every = bytes(range(1, 256))
    assert session.exec("cat", stdin=every).stdout == every
    assert session.exec(b"printf '%s' '\xff\xfe\x80'").stdout == b"\xff\xfe\x80"


def test_eight_mebibytes_of_command(session: Session) -> None:
    text = "x='" + "a" * ((8 << 20) - 20) + "'"
    assert session.exec(text).exit_code == 0
    assert out(session, "echo ${#x}; unset x").strip() == str((8 << 20) - 20)
    with pytest.raises(UsageError):
        session.exec(text + "b" * 40)
    with pytest.raises(UsageError):
        session.exec("echo a\0b")


def test_much_output_is_bounded_and_said(session: Session) -> None:
    log = io.BytesIO()
    seen = 0

    def count(data: bytes) -> None:
        nonlocal seen
        seen += len(data)

    result = session.exec("head -c 200000000 /dev/zero | tr '\\0' x; echo end", limit=1 << 20, on_stdout=count)
    assert seen == 200_000_004
    assert result.truncated and len(result.stdout) < (1 << 20) + 100
    assert result.stdout.startswith(b"xxx") and result.stdout.endswith(b"end\n")
    session.exec("seq 1000", limit=64, log=log)
    assert log.getvalue() == b"".join(b"%d\n" % i for i in range(1, 1001))


def test_stdin_from_a_pipe(session: Session) -> None:
    reading, writing = os.pipe()

    def feed() -> None:
        with os.fdopen(writing, "wb") as pipe:
            for i in range(2000):
                pipe.write(b"line %d\n" % i)

    thread = threading.Thread(target=feed)
    thread.start()
    with os.fdopen(reading, "rb", buffering=0) as source:
        result = session.exec("wc -l; read x || echo eof", stdin=source)
    thread.join()
    assert result.stdout.split() == [b"2000", b"eof"]
    assert out(session, "read x || echo no stdin") == "no stdin\n"


def test_output_arrives_while_it_runs(session: Session) -> None:
    first = threading.Event()
    thread = threading.Thread(
        target=session.exec, args=("echo now; read -t 20 x <>/tmp/never",), kwargs={"on_stdout": lambda _: first.set()}
    )
    session.exec("mkfifo /tmp/never")
    thread.start()
    assert first.wait(10), "nothing was streamed"
    session.signal(2)
    thread.join(10)


def test_timeout_ends_the_command_and_keeps_the_shell(session: Session) -> None:
    session.exec("FOO=kept; cd /tmp")
    with pytest.raises(ExecTimeout) as caught:
        session.exec("echo partial; while :; do sleep 1; done; echo never", timeout=0.3)
    assert caught.value.result.stdout == b"partial\n" and caught.value.result.timed_out
    assert out(session, "echo $FOO $PWD") == "kept /tmp\n"


@pytest.mark.parametrize(
    "stubborn",
    [
        "while :; do :; done",
        "x=$(sleep 100)",
        "sleep 100 | cat",
        'bash -c "trap \\"\\" INT TERM; sleep 100; sleep 100"',
    ],
)
def test_timeout_ends_whatever_runs(session: Session, stubborn: str) -> None:
    session.exec("FOO=kept")
    with pytest.raises(ExecTimeout):
        session.exec(stubborn, timeout=0.2)
    assert out(session, "echo $FOO") == "kept\n"


def test_background_job_returns_at_once_and_stays(session: Session) -> None:
    began = time.monotonic()
    assert "started\n" in out(session, "(while :; do echo tick; sleep 0.05; done) & echo started")
    assert time.monotonic() - began < 20
    assert "Running" in out(session, "jobs")
    assert "tick" not in out(session, "sleep 0.3; echo clean")
    assert b"tick" in session.background_output()
    assert out(session, "kill %1; wait %1 2>/dev/null; jobs") == ""


def test_signal_reaches_the_running_command(session: Session) -> None:
    started = threading.Event()
    results = []

    def work() -> None:
        results.append(session.exec("echo go; sleep 100; echo after", on_stdout=lambda _: started.set()))

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(10)
    session.signal(2)
    thread.join(10)
    assert results[0].exit_code == 130


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 3", 3), ("set -e; false", 1), ("exec echo replaced", 0), ("kill -9 $$", 137), ("exec /bin/false", 1)],
)
def test_the_shell_itself_ends(session: Session, command: str, code: int) -> None:
    session.exec("GONE=1; cd /tmp")
    result = session.exec(command)
    assert (result.exit_code, result.shell_died) == (code, True)
    after = session.exec("echo [$GONE] $PWD")
    assert after.stdout == b"[] /tmp\n" and after.shell_fresh
    assert not session.exec("true").shell_fresh


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("if", 2),
        ("echo 'unfinished", 2),
        ("${none:?missing}", 1),
        ("no-such-program", 127),
        ("break", 0),
        ("return 5", None),
    ],
)
def test_errors_leave_the_shell_alone(session: Session, command: str, code: int | None) -> None:
    session.exec("KEPT=1")
    result = session.exec(command)
    assert code is None or result.exit_code == code
    assert not result.shell_died
    assert out(session, "echo $KEPT") == "1\n"


def test_options_of_the_shell_do_not_break_it(session: Session) -> None:
    session.exec("set -u; set -o noglob; IFS=:; trap 'echo E' ERR; alias printf=false read=false eval=false")
    assert b"E\n" in session.exec("false").stdout
    assert session.exec("true").stdout == b""
    assert out(session, "echo still $?") == "still 0\n"


def test_two_callers_take_turns_or_hear_busy(session: Session) -> None:
    started = threading.Event()
    thread = threading.Thread(
        target=session.exec, args=("echo x; sleep 0.5",), kwargs={"on_stdout": lambda _: started.set()}
    )
    thread.start()
    assert started.wait(10)
    with pytest.raises(Busy):
        session.exec("true", wait=False)
    assert out(session, "echo second") == "second\n"
    thread.join()


def test_run_is_beside_the_shell(session: Session) -> None:
    started = threading.Event()
    thread = threading.Thread(
        target=session.exec, args=("echo x; sleep 1",), kwargs={"on_stdout": lambda _: started.set()}
    )
    thread.start()
    assert started.wait(10)
    result = session.run(["sh", "-c", "echo $0 $1; echo e >&2; exit 4", "a", "b c"], stdin=b"")
    assert (result.stdout, result.stderr, result.exit_code) == (b"a b c\n", b"e\n", 4)
    assert session.run(["no-such-program"]).exit_code == 127
    thread.join()


def test_as_another_user(session: Session) -> None:
    session.exec("echo 'bob:x:1234:1234::/home/bob:/bin/bash' >> /etc/passwd; mkdir -p /home/bob; cd /tmp")
    assert out(session, "echo $(id -u) $HOME $PWD", user="bob") == "1234 /home/bob /tmp\n"
    assert session.run(["id", "-u"], user="77").stdout == b"77\n"
    with pytest.raises(UsageError):
        session.run(["true"], user="nobody-at-all")


def test_descriptors_stay_open(session: Session) -> None:
    session.exec("exec 5>/tmp/five; echo one >&5")
    assert out(session, "echo two >&5; exec 5>&-; cat /tmp/five") == "one\ntwo\n"
