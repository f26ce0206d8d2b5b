"""`waypoint setup`: what it makes, that it makes it once, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from waypoint.kernel import tools

SETUP = [sys.executable, "-c", "from waypoint.cli.setup import setup; setup()"]


def run_setup(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([*SETUP, *arguments], env=env, capture_output=True, text=True, timeout=280)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A prefix with the host's real CRIU in it, and our own, and no program compiled: nothing is downloaded, no CRIU is built."""
    where = tmp_path / "tools"
    where.mkdir()
    for root in tools.prefix().glob("criu-*"):
        (where / root.name).symlink_to(root)
    own = tools.program_path(tools.QUICK)
    (where / "bin").mkdir()
    (where / "bin" / own.name).symlink_to(own)
    return where


def test_second_run_finds_all_there(prefix: Path) -> None:
    first = run_setup("--json", WAYPOINT_TOOLS=str(prefix))
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    assert document["changed"] is True
    assert document["prefix"] == str(prefix)
    for path in document["programs"].values():
        assert os.access(path, os.X_OK)
    before = sorted((path, path.lstat().st_mtime_ns) for path in prefix.rglob("*"))
    second = run_setup("--json", WAYPOINT_TOOLS=str(prefix))
    assert second.stderr == "", "nothing to report"
    assert json.loads(second.stdout)["changed"] is False
    assert sorted((path, path.lstat().st_mtime_ns) for path in prefix.rglob("*")) == before


def test_words_for_people(prefix: Path) -> None:
    first = run_setup(WAYPOINT_TOOLS=str(prefix))
    assert first.returncode == 0, first.stderr
    assert "compiling init.c" in first.stderr
    lines = run_setup(WAYPOINT_TOOLS=str(prefix)).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["criu", *(program.name for program in tools.PROGRAMS), "own"]
    assert all("was ready" in line for line in lines)


def test_two_at_once_agree(prefix: Path) -> None:
    env = {**os.environ, "WAYPOINT_TOOLS": str(prefix)}
    both = [subprocess.Popen([*SETUP, "--json"], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    documents = [json.loads(one.communicate(timeout=280)[0]) for one in both]
    assert [one.returncode for one in both] == [0, 0]
    assert documents[0]["programs"] == documents[1]["programs"]
    made = [path for path in (prefix / "bin").iterdir() if path.is_file() and not path.is_symlink()]
    assert len(made) == len(tools.PROGRAMS)


def test_installed_packages_are_left_alone(prefix: Path) -> None:
    done = run_setup("--system-packages", "--json", WAYPOINT_TOOLS=str(prefix))
    assert done.returncode == 0, done.stderr
    packages = json.loads(done.stdout)["done"][0]
    assert packages == {"what": "packages", "detail": "all installed", "changed": False}
