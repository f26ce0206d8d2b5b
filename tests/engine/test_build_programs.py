"""The one wrapper around helper programs: its deadline, its streams, and that nothing of a killed tree stays."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel.programs import run_program


def gone(pid: int) -> bool:
    """Dead, or a zombie that its reaper has not met yet."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        os.sched_yield()
    return False


def test_streams_and_exit_code() -> None:
    finished = run_program(["sh", "-c", "cat; echo err >&2; exit 3"], timeout=30, stdin=b"in\0put")
    assert (finished.exit_code, finished.stdout, finished.stderr) == (3, b"in\0put", b"err\n")
    with pytest.raises(KernelError, match=r"doing it.*ended in 3"):
        finished.check("doing it")


def test_missing_program_and_missing_directory_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(HostUnsupported, match="no-such-program is not installed"):
        run_program(["no-such-program"], timeout=5)
    with pytest.raises(KernelError, match="no such directory") as caught:
        run_program(["true"], timeout=5, cwd=tmp_path / "absent")
    assert not isinstance(caught.value, HostUnsupported)


def test_deadline_kills_the_whole_group_and_keeps_what_was_said(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="half a word") as caught:
        script = f"sleep 1000 & echo $! > {tmp_path}/pid; echo half a word; wait"
        run_program(["sh", "-c", script], timeout=0.5)
    assert caught.value.details["timed_out"]
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_daemon_that_keeps_the_output_open_does_not_delay_the_return(tmp_path: Path) -> None:
    finished = run_program(["sh", "-c", f"setsid sleep 1000 & echo $! > {tmp_path}/pid; echo done"], timeout=100)
    pid = int((tmp_path / "pid").read_text())
    try:
        assert finished.stdout == b"done\n"
    finally:
        os.kill(pid, 9)


def test_chunks_are_taken_only_as_the_program_reads() -> None:
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"x" * 65536

    finished = run_program(["head", "-c", "100000"], timeout=30, stdin=endless())
    assert len(finished.stdout) == 100_000
    assert taken < 100


def test_output_arrives_while_the_program_runs_and_memory_stays_bounded() -> None:
    seen = 0

    def count(data: bytes) -> None:
        nonlocal seen
        seen += len(data)

    script = "import sys\nfor _ in range(2000): sys.stdout.buffer.write(b'y' * 10000)"
    finished = run_program([sys.executable, "-c", script], timeout=60, on_output=count, keep_bytes=1000)
    assert seen == 20_000_000
    assert finished.stdout == b"y" * 1000


def test_an_exception_in_the_callback_ends_the_program(tmp_path: Path) -> None:
    def refuse(data: bytes) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        run_program(["sh", "-c", f"echo $$ > {tmp_path}/pid; echo go; sleep 1000"], timeout=60, on_output=refuse)
    assert gone(int((tmp_path / "pid").read_text()))
