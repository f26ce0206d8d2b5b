"""System calls that other processes are made to make: they must not notice, whatever they are at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel import inject
from waypoint.kernel.inject import Injection, inside
from waypoint.kernel.written import Watch

GETPID = 39
pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="only there can calls be injected")


@contextmanager
def program(text: str) -> Iterator[subprocess.Popen[str]]:
    """It has said that it is up."""
    found = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert found.stdout is not None
        assert found.stdout.readline() == "up\n"
        yield found
    finally:
        found.kill()
        found.communicate()


def getpid(process: Injection) -> int:
    return process.call(GETPID)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_signals_come_later_and_all_of_them_once() -> None:
    text = """
import signal, sys
got = 0
def count(*_):
    global got
    got += 1
signal.signal(signal.SIGUSR1, count)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
print("up", flush=True)
for line in sys.stdin:
    print(got, flush=True)
"""
    with program(text) as found:
        assert found.stdin is not None
        assert found.stdout is not None
        for n in range(1, 51):
            assert inside(found.pid, getpid) == found.pid
            found.send_signal(signal.SIGUSR1)
            assert inside(found.pid, getpid) == found.pid
            said = -1
            while said < n:
                found.stdin.write("\n")
                found.stdin.flush()
                said = int(found.stdout.readline())
            assert said == n


def test_a_stopped_process_stays_stopped() -> None:
    with program("print('up', flush=True); input()") as found:
        found.send_signal(signal.SIGSTOP)
        until(lambda: state(found.pid) == "T")
        assert inside(found.pid, getpid) == found.pid
        until(lambda: state(found.pid) == "T")
        with pytest.raises(KernelError, match="stopped"):
            Watch(found.pid)


def test_one_that_cannot_be_interrupted_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vfork whose child blocks: it stops when that has gone on, and must not stay so."""
    monkeypatch.setattr(inject, "_PATIENCE", 0.2)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    text = f"""
import os
print("up", flush=True)
pid = os.posix_spawn("/bin/true", ["true"], {{}}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, {str(fifo)!r}, os.O_RDONLY, 0)])
os.waitpid(pid, 0)
print("done", flush=True)
input()
"""
    with program(text) as found:
        until(lambda: state(found.pid) == "D")
        with pytest.raises(KernelError, match="interrupted"):
            inside(found.pid, getpid)
        with open(fifo, "w"):
            assert found.stdout is not None
            assert found.stdout.readline() == "done\n"


def test_one_that_is_traced_already(tmp_path: Path) -> None:
    with program("print('up', flush=True); input()") as found:
        with Injection(found.pid), pytest.raises((OSError, HostUnsupported)):
            inside(found.pid, getpid)
        assert inside(found.pid, getpid) == found.pid
