"""`waypoint demo`: it ends well on this host, leaves nothing behind, and does not end well when a step is wrong."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cli_runner import Cli
from terminal_screen import CLI, SOURCE
from waypoint.cli.demo import Teller
from waypoint.engine import Engine
from waypoint.errors import VerifyFailed

pytestmark = pytest.mark.timeout(200)


def test_in_a_store_of_its_own() -> None:
    """As `make demo` calls it, on a machine with nothing prepared."""
    env = {name: value for name, value in os.environ.items() if name != "WAYPOINT_HOME"} | {"PYTHONPATH": str(SOURCE)}
    before = set(Path("/var/tmp").glob("waypoint-demo-*"))
    done = subprocess.run([*CLI, "demo"], env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == 10 and "✗" not in done.stdout
    assert "take the mean of the middle two: passed" in done.stdout
    assert done.stdout.count(": failed") == 2
    assert " ready  " in done.stdout and " fixed  " in done.stdout, "the tree"
    assert "ms" in done.stdout.partition("Times")[2]
    assert set(Path("/var/tmp").glob("waypoint-demo-*")) == before
    assert "waypoint-demo" not in Path("/proc/self/mounts").read_text()


def test_in_a_store_that_is_in_use(engine: Engine, home: Path) -> None:
    sessions = {record.id for record in engine.sessions()}
    snapshots = {record.id for record in engine.snapshots()}
    document = Cli(home).ok("demo", "--json", timeout=180).json
    assert document["ok"] is True
    assert all(step["duration_ms"] > 0 for step in document["steps"])
    assert sum(len(step["checks"]) for step in document["steps"]) > 15
    assert {record.id for record in engine.sessions()} == sessions
    assert {record.id for record in engine.snapshots()} == snapshots


def test_wrong_answer_ends_it() -> None:
    teller = Teller(quiet=True)
    with pytest.raises(VerifyFailed, match="expected '2', found '1'"), teller.step("something"):
        teller.check("the count", "1", "2")
    assert teller.steps == []


def test_failure_in_the_middle_cleans_up(home: Path, engine: Engine, tmp_path: Path) -> None:
    """A project whose fix does not pass: the demo must say so, end badly, and still remove everything."""
    sessions = {record.id for record in engine.sessions()}
    code = (
        "import sys; from waypoint.cli import demo_story; demo_story.RIGHT_FIX = 0; "
        "sys.argv = ['waypoint', 'demo', '--json']; from waypoint.cli.main import main; main()"
    )
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "WAYPOINT_HOME": str(home)}
    done = subprocess.run([CLI[0], "-c", code], env=env, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout) == (125, "")
    assert "verify_failed" in done.stderr and "one fix passes" in done.stderr
    assert {record.id for record in engine.sessions()} == sessions
