"""The harness that probes run in: an attempt may raise, die, hang or litter, and the host does not notice."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel import probe_calls
from waypoint.kernel.probes import Probe, in_child


def hang(_: Path) -> NoReturn:
    while True:
        signal.pause()


def test_what_was_seen_comes_back(tmp_path: Path) -> None:
    seen = in_child(lambda where: f"saw {where.name}", tmp_path)
    assert seen == f"saw {tmp_path.name}"


def test_reason_and_fix_come_back(tmp_path: Path) -> None:
    def attempt(_: Path) -> str:
        raise HostUnsupported("no such thing", fix="get one")

    feature = Probe("thing", attempt, "another fix", required=False).run(tmp_path)
    assert (feature.status, feature.why, feature.fix) == ("missing", "no such thing", "get one")
    assert not feature.required


def test_bug_in_a_probe_is_a_line_in_the_table(tmp_path: Path) -> None:
    feature = Probe("thing", lambda _: str(1 // 0), "the fix").run(tmp_path)
    assert (feature.status, feature.fix) == ("missing", "the fix")
    assert "ZeroDivisionError" in feature.why


def test_attempt_that_kills_itself_is_missing(tmp_path: Path) -> None:
    def attempt(_: Path) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return "still alive"

    assert Probe("thing", attempt, "the fix").run(tmp_path).status == "missing"


@pytest.mark.parametrize("pid_namespace", [False, True])
def test_attempt_that_hangs_is_ended(tmp_path: Path, pid_namespace: bool) -> None:
    with pytest.raises(KernelError, match="did not end"):
        in_child(hang, tmp_path, pid_namespace=pid_namespace, timeout=0.3)


def test_processes_of_an_attempt_end_with_it(tmp_path: Path) -> None:
    """The grandchild is in a session of its own, as a daemon would be; a pipe that only it holds must close."""
    reader, writer = os.pipe()

    def attempt(_: Path) -> str:
        subprocess.Popen(["sleep", "1000"], start_new_session=True, pass_fds=[writer])
        return str(os.getpid())

    assert in_child(attempt, tmp_path, pid_namespace=True) == "1"
    os.close(writer)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_mounts_of_an_attempt_are_not_the_hosts(tmp_path: Path) -> None:
    def attempt(where: Path) -> str:
        probe_calls.mount("tmpfs", str(where), "tmpfs", 0)
        (where / "file").write_text("inside")
        return str(os.path.ismount(where))

    assert in_child(attempt, tmp_path) == "True"
    assert not os.path.ismount(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_scratch_directory_is_removed_whatever_is_in_it(tmp_path: Path) -> None:
    def attempt(where: Path) -> str:
        (where / "deep" / "deeper").mkdir(parents=True)
        (where / "deep").chmod(0)
        raise KernelError("and then it failed")

    Probe("thing", attempt, "the fix").run(tmp_path)
    assert list(tmp_path.iterdir()) == []
