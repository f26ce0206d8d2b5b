"""`waypoint shell` on a real terminal: what is on the screen, what is typed, and that leaving and coming back change nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rootfs import busybox_rootfs
from terminal_screen import CLI, SOURCE, Screen
from waypoint.bases import base_from_rootfs
from waypoint.engine import Engine
from waypoint.errors import Busy
from waypoint.session import Session

pytestmark = pytest.mark.timeout(120)


@contextmanager
def shell(session: Session, *options: str, rows: int = 30, columns: int = 100) -> Iterator[Screen]:
    with Screen([*CLI, "shell", session.id, *options], rows=rows, columns=columns) as screen:
        yield screen


def detach(screen: Screen) -> str:
    screen.press("C-]")
    return screen.wait_for("ended with 0")


def prompt(screen: Screen) -> str:
    return screen.wait_for(lambda shown: shown.rstrip().endswith(("#", "$", "%")))


def ready(session: Session, file: str, timeout: float = 20) -> str:
    """The content of a file in the session once it is there."""
    deadline = time.monotonic() + timeout
    while True:
        done = session.run(["cat", file])
        if done.exit_code == 0 and done.stdout:
            return done.text
        assert time.monotonic() < deadline, f"{file} did not appear"
        time.sleep(0.02)


# -- the shell ----------------------------------------------------------------------------------------------------------


def test_shell_is_the_one_that_exec_uses(session: Session) -> None:
    session.exec("export COLOUR=blue; cd /home")
    with shell(session) as screen:
        prompt(screen)
        screen.type('echo "it is $COLOUR in $PWD"; cd /opt; NUMBER=7; greet() { echo "hello $1"; }\r')
        screen.wait_for("it is blue in /home")
        done = session.exec("echo $NUMBER; pwd; greet you")
        assert done.text == "7\n/opt\nhello you\n"
        screen.type("NUM")
        screen.wait_for("# NUM")
        assert session.exec("NUMBER=8").exit_code == 0
        screen.type("BER=9; echo now-$NUMBER\r")
        screen.wait_for("now-9")
        detach(screen)
    assert session.exec("echo $NUMBER").text == "9\n"


def test_same_screen_again(session: Session) -> None:
    with shell(session) as screen:
        prompt(screen)
        screen.type("seq 1 60; printf '\\033[31mred\\033[0m \\033[1mbold\\033[0m\\n'; echo half-ty")
        screen.press("Enter")
        screen.wait_for("half-ty\n")
        screen.type("echo not sent yet")
        before, colours = screen.settled(), screen.coloured
        assert "\x1b[31mred" in colours
        left = detach(screen)
        assert "`waypoint shell" in left
    with shell(session) as screen:
        screen.wait_for("not sent yet")
        assert screen.settled() == before
        assert screen.coloured == colours
        screen.type("\r")
        screen.wait_for("\nnot sent yet\n")


def test_screen_of_a_fork_and_of_a_restored_session(session: Session, sessions: list[Session]) -> None:
    with shell(session) as screen:
        prompt(screen)
        screen.type("echo one-$((1 + 1))\r")
        screen.wait_for("one-2")
        before = screen.settled()
        snapshot = session.snapshot()
        (fork,) = session.fork(from_snapshot=snapshot.id)
        screen.type("clear; echo other-$((1 + 1))\r")
        screen.wait_for("other-2")
        session.restore(snapshot.id)
        screen.wait_for("one-2")
        assert screen.settled() == before, "the attached terminal shows the restored screen"
    with shell(fork) as screen:
        screen.wait_for("one-2")
        assert screen.settled() == before
        screen.type("echo fork-$((1 + 1))\r")
        screen.wait_for("fork-2")


def test_snapshots_do_not_disturb_a_terminal(session: Session) -> None:
    with shell(session) as screen:
        prompt(screen)
        screen.type("for i in $(seq 1 40); do echo line-$i; sleep 0.05; done\r")
        for number in (3, 12, 21):
            screen.wait_for(f"line-{number}\n")
            session.snapshot()
        shown = screen.wait_for("line-40\n")
        numbers = [int(line.removeprefix("line-")) for line in shown.splitlines() if line.startswith("line-")]
        assert numbers == list(range(numbers[0], 41)), "nothing twice, nothing lost"
        screen.type("echo still-$((1 + 1))\r")
        screen.wait_for("still-2")


def test_exit_leaves_and_the_next_shell_is_fresh(session: Session) -> None:
    session.exec("LOST=1")
    with shell(session) as screen:
        prompt(screen)
        screen.type("exit\r")
        assert "ended; the next command" in screen.wait_for("ended with 0")
    done = session.exec("echo [$LOST]")
    assert (done.text, done.shell_fresh) == ("[]\n", True)
    with shell(session) as screen:
        prompt(screen)
        screen.press("C-d")
        screen.wait_for("ended with 0")


def test_two_terminals_see_the_same(session: Session) -> None:
    with shell(session) as one, shell(session) as two:
        prompt(one)
        prompt(two)
        one.type("echo from-one-$((1 + 1))\r")
        two.wait_for("from-one-2")
        two.type("echo from-two-$((1 + 1))\r")
        one.wait_for("from-two-2")
        detach(one)
        two.type("echo alone-$((1 + 1))\r")
        two.wait_for("alone-2")


def test_keys_reach_the_program(session: Session) -> None:
    with shell(session) as screen:
        prompt(screen)
        screen.type("sleep 1000; echo code-$?\r")
        screen.wait_for("sleep 1000")
        screen.wait_for(lambda _: session.state()["state"] == "prompt" and _pids(session, "sleep 1000"))
        screen.press("C-c")
        screen.wait_for(lambda _: not _pids(session, "sleep 1000"))
        screen.type("cat > /tmp/typed\r")
        screen.wait_for("cat > /tmp/typed")
        screen.type("naïve 漢字 \t tab\r")
        screen.press("C-d")
        prompt(screen)
        screen.press("Up", "Up")
        screen.wait_for("# sleep 1000; echo code-$?")
    assert session.run(["cat", "/tmp/typed"]).text == "naïve 漢字 \t tab\n"


def _pids(session: Session, command: str) -> list[str]:
    return session.run(["sh", "-c", f"ps -eo pid,args | grep '^ *[0-9]* {command}$' || true"]).text.split()


# -- sizes --------------------------------------------------------------------------------------------------------------


def test_window_size_is_followed(session: Session) -> None:
    with shell(session, rows=31, columns=93) as screen:
        prompt(screen)
        screen.type("trap 'echo size: $(stty size)' WINCH; stty size\r")
        screen.wait_for("31 93")
        screen.resize(70, 20)
        screen.type("stty size\r")
        screen.wait_for("20 70")
        detach(screen)
    with shell(session, rows=40, columns=120) as screen:
        screen.wait_for("20 70")
        screen.type("stty size\r")
        screen.wait_for("40 120")


# -- leaving ------------------------------------------------------------------------------------------------------------


def test_other_detach_keys(session: Session) -> None:
    with shell(session, "--detach-keys", "ctrl-p,ctrl-q") as screen:
        prompt(screen)
        screen.type("cat -v\r")
        screen.wait_for("cat -v")
        screen.type("\x1d\x10x\r")
        screen.wait_for("^]^Px\n^]^Px")
        screen.type("\x10")
        screen.type("\x11")
        screen.wait_for("ended with 0")


@pytest.mark.parametrize("keys", ["", "ctrl-", "ctrl-1", "ab", "ctrl-p,", "ä"])
def test_impossible_detach_keys_are_bad_usage(session: Session, keys: str) -> None:
    done = subprocess.run([*CLI, "shell", session.id, "--detach-keys", keys], env=_env(), capture_output=True, timeout=60)
    assert done.returncode == 2
    assert b"detach keys" in done.stderr


def test_needs_a_terminal(session: Session) -> None:
    done = subprocess.run(
        [*CLI, "shell", session.id, "--json"], env=_env(), stdin=subprocess.DEVNULL, capture_output=True, timeout=60
    )
    assert done.returncode == 2
    error = json.loads(done.stderr)["error"]
    assert error["code"] == "usage"
    assert "waypoint exec" in error["message"]


@pytest.mark.parametrize("way", ["key", "SIGTERM", "pause"])
def test_terminal_is_as_before(host_session: Session, tmp_path: Path, way: str) -> None:
    """Raw mode off, main screen, no mouse, paste or keypad mode, a visible cursor: whatever the program on the screen had set."""
    modes = r"printf '\033[?1049h\033[?1000h\033[?1006h\033[?2004h\033[?25l\033[?1h\033=\033[5;20r\033[31mset'; sleep 1000"
    script = f"stty -g >{tmp_path}/before; {' '.join(CLI)} shell {host_session.id}; echo code $?; stty -g >{tmp_path}/after; cat"
    with Screen(["sh", "-c", script]) as screen:
        prompt(screen)
        screen.type(f"{modes}\r")
        screen.wait_for("set")
        assert (screen.fact("alternate_on"), screen.fact("mouse_any_flag")) == ("1", "1")
        if way == "key":
            screen.press("C-]")
        elif way == "SIGTERM":
            pane = int(screen.fact("pane_pid"))
            os.kill(_client(pane), signal.SIGTERM)
        else:
            host_session.pause()
        shown = screen.wait_for("code ")
        assert ("code 125" if way == "pause" else "code 0") in shown
        if way == "pause":
            assert "is paused; `waypoint resume" in shown.replace("\n", "")
        facts = ("alternate_on", "mouse_any_flag", "keypad_cursor_flag", "keypad_flag", "cursor_flag", "scroll_region_upper")
        assert [screen.fact(fact) for fact in facts] == ["0", "0", "0", "0", "1", "0"]
        screen.type("plain\r")
        screen.wait_for("plain\nplain")
    assert (tmp_path / "before").read_text() == (tmp_path / "after").read_text()


def _client(pid: int) -> int:
    """Our own command among the descendants of the terminal's first process."""
    for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if Path(f"/proc/{number}/cmdline").read_text().split("\0")[: len(CLI)] == CLI:
            return int(number)
        with suppress(LookupError):
            return _client(int(number))
    raise LookupError(pid)


def test_hang_up_detaches(session: Session) -> None:
    """The terminal goes away with everything in it; the session's job goes on."""
    with shell(session) as screen:
        prompt(screen)
        screen.type("sleep 1; echo survived >/tmp/hang-up\r")
        screen.wait_for("/tmp/hang-up")
    assert ready(session, "/tmp/hang-up") == "survived\n"


# -- what is drawn again ------------------------------------------------------------------------------------------------


def test_questions_are_not_asked_twice(session: Session) -> None:
    """A program asked where the cursor is and what terminal this is; drawing that again must not type the answers."""
    with shell(session) as screen:
        prompt(screen)
        screen.type(r"clear; printf '\033[6n'; read -rs -d R answer; printf '\033[c'; read -rs -d c answer; echo asked-$((1 + 1))")
        screen.press("Enter")
        screen.wait_for("asked-2")
        before = screen.settled()
        detach(screen)
    with shell(session) as screen:
        screen.wait_for("asked-2")
        assert screen.settled() == before
        screen.type("echo clean\r")
        screen.wait_for("# echo clean\nclean")


def test_modes_outlive_what_is_kept_of_the_screen(session: Session) -> None:
    """More than is kept has been drawn since the program went to the other screen: a new terminal is taken there all the same."""
    with shell(session) as screen:
        prompt(screen)
        screen.type(r"printf '\033[?1049h\033[?1h\033='; seq 100000 200000; echo bottom; sleep 1000")
        screen.press("Enter")
        screen.wait_for("bottom", timeout=60)
        screen.press("C-]")
        screen.wait_for("ended with 0")
    with shell(session) as screen:
        screen.wait_for("bottom")
        facts = ("alternate_on", "keypad_cursor_flag", "keypad_flag")
        assert [screen.fact(fact) for fact in facts] == ["1", "1", "1"]
        assert screen.text.splitlines()[-2:] == ["200000", "bottom"]


# -- programs -----------------------------------------------------------------------------------------------------------


def test_vim(host_session: Session) -> None:
    with shell(host_session) as screen:
        prompt(screen)
        screen.type("vim -u NONE -N /tmp/poem\r")
        screen.wait_for("[New]")
        screen.type("iroses are red\rviolets are")
        screen.press("Escape")
        screen.wait_for(lambda shown: shown.startswith("roses are red\nviolets are\n~") and "INSERT" not in shown)
        before = screen.settled()
        assert screen.fact("alternate_on") == "1"
        detach(screen)
        assert screen.fact("alternate_on") == "0"
    with pytest.raises(Busy):
        host_session.exec("true", wait=False)
    with shell(host_session) as screen:
        screen.wait_for(lambda shown: shown.startswith("roses are red\nviolets are\n~") and "INSERT" not in shown)
        assert screen.settled() == before
        assert screen.fact("alternate_on") == "1"
        screen.resize(60, 15)
        screen.wait_for(lambda shown: len(shown.splitlines()) <= 15 and shown.startswith("roses are red"))
        screen.type("a blue")
        screen.press("Escape")
        screen.type(":wq\r")
        prompt(screen)
    assert host_session.exec("cat /tmp/poem").text == "roses are red\nviolets are blue\n"


def test_tmux_inside(host_session: Session) -> None:
    with shell(host_session) as screen:
        prompt(screen)
        screen.type("tmux -f /dev/null new -s inner\r")
        screen.wait_for("[inner]")
        screen.type("echo in-tmux-$((1 + 1))\r")
        screen.wait_for("in-tmux-2")
        screen.press("C-b", '"')
        screen.wait_for("──────")
        screen.type("echo lower-$((1 + 1))\r")
        screen.wait_for("lower-2")
        detach(screen)
    snapshot = host_session.snapshot()
    host_session.restore(snapshot.id)
    with shell(host_session) as screen:
        shown = screen.wait_for("lower-2")
        assert "in-tmux-2" in shown and "[inner]" in shown
        screen.type("echo again-$((1 + 1))\r")
        screen.wait_for("again-2")
        screen.type("tmux kill-server\r")
        screen.wait_for("[server exited]")
        screen.type("echo outside-$((1 + 1))\r")
        screen.wait_for("outside-2")


def test_python_prompt(host_session: Session) -> None:
    with shell(host_session) as screen:
        prompt(screen)
        screen.type("python3 -q\r")
        screen.wait_for(">>>")
        screen.type("numbers = [3, 4]\r")
        screen.type("sum(numbers)\r")
        screen.wait_for("\n7\n")
        before = screen.settled()
        detach(screen)
    with shell(host_session) as screen:
        screen.wait_for("\n7\n")
        assert screen.settled() == before
        screen.type("len(numbers) * 21\r")
        screen.wait_for("\n42\n")
        screen.press("C-d")
        prompt(screen)


def test_less(host_session: Session) -> None:
    with shell(host_session) as screen:
        prompt(screen)
        screen.type("seq 1 500 >/tmp/numbers; less /tmp/numbers\r")
        screen.wait_for("/tmp/numbers")
        screen.press("Space")
        screen.wait_for(lambda shown: shown.startswith("30\n"))
        before = screen.settled()
        detach(screen)
    with shell(host_session) as screen:
        screen.wait_for(lambda shown: shown.startswith("30\n"))
        assert screen.settled() == before
        screen.type("/")
        screen.wait_for(lambda shown: shown.splitlines()[-1] == "/")
        screen.type("400\r")
        screen.wait_for(lambda shown: shown.startswith("400\n"))
        screen.type("q")
        prompt(screen)


def test_shell_without_bash(engine: Engine, tmp_path: Path, sessions: list[Session]) -> None:
    """A plain sh has no line editor to share: it gets a shell of its own for the terminal, which ends when a command comes."""
    session = engine.new(base=base_from_rootfs(engine.store, busybox_rootfs(tmp_path / "root")))
    session.exec("cd /tmp; export COLOUR=blue")
    with shell(session) as screen:
        prompt(screen)
        screen.type("echo it is $COLOUR in $PWD; echo two-$((1 + 1))\r")
        screen.wait_for("it is blue in /tmp")
        before = screen.settled()
        detach(screen)
    with shell(session) as screen:
        screen.wait_for("two-2")
        assert screen.settled() == before
        detach(screen)
    assert session.exec("echo $COLOUR").text == "blue\n"
    with shell(session) as screen:
        screen.wait_for(lambda shown: shown.count("BusyBox") == 2 and shown.rstrip().endswith("#"))
        screen.type("exit\r")
        screen.wait_for("ended with 0")
    assert session.exec("pwd").text == "/tmp\n"


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE)}
