"""Every example, as a newcomer would start it: on Waypoint, and some where files are all that comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(script.parent.name for script in (ROOT / "examples").glob("*/branch.py"))

pytestmark = pytest.mark.timeout(300)

# Stores files only, and says that it stores everything.
BOASTER = """
from dataclasses import replace
from statefork.backends.waypoint import BACKEND, WaypointDriver, WaypointOptions
from statefork.registry import Method

class Boaster(WaypointDriver):
    name = "boaster"

    def start(self, place):
        live = super().start(place)
        capture, promised = live.capture, tuple(self.probe().restores)
        live.capture = lambda place, mode, parent: replace(capture(place, "files", parent), captured=promised)
        return live

BACKEND = replace(
    BACKEND, name="boaster", driver=Boaster, methods=(Method("boaster_build", lambda: Boaster(WaypointOptions()), ()),)
)
"""


def branch(example: str, home: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "WAYPOINT_HOME"}
    environment |= {"STATEFORK_HOME": str(home), **variables}
    argv = [sys.executable, "-m", f"examples.{example}.branch", *words]
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)


def test_none_is_missing() -> None:
    assert EXAMPLES == ["cpp_program", "data_cleaning", "fastapi_server", "kv_store", "stateful_logger"]
    assert all((ROOT / "examples" / name / "README.md").exists() for name in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_on_waypoint_everything_comes_back(example: str, tmp_path: Path) -> None:
    done = branch(example, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "waypoint brings back: files, memory, processes, shell, terminal" in done.stdout
    assert done.stdout.count("\n   ok ") >= 2
    assert done.stdout.endswith("\nall as it should be\n")
    assert list((tmp_path / "trees").iterdir()) == []


@pytest.mark.parametrize(("example", "image"), [("stateful_logger", "docker_busybox"), ("kv_store", "docker_python")])
def test_where_only_files_come_back_the_loss_is_shown(
    example: str, image: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base = request.getfixturevalue(image)
    done = branch(example, tmp_path, "--backend", "docker", f"base_image={base}", "extra_args=--network none")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "only files came back" in done.stdout
    assert "the shell and all programs are gone" in done.stdout
    assert list((tmp_path / "trees").iterdir()) == []


def test_what_came_back_wrong_is_said_and_the_exit_code_tells(tmp_path: Path) -> None:
    """On a backend that boasts."""
    (tmp_path / "boaster.py").write_text(BOASTER)
    information = tmp_path / "boaster-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: boaster\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[statefork.backends]\nboaster = boaster:BACKEND\n")
    done = branch("stateful_logger", tmp_path / "home", "--backend", "boaster", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG  the logger still runs: False, not True" in done.stdout
    assert list((tmp_path / "home/trees").iterdir()) == []


def test_wrong_words(tmp_path: Path) -> None:
    assert branch("kv_store", tmp_path, "--surely-not").returncode == 2
    assert "there is no method 'surely_build'" in branch("kv_store", tmp_path, "--backend", "surely").stderr
    assert "it takes" in branch("kv_store", tmp_path, "--backend", "docker", "image=x").stderr
    refused = branch("kv_store", tmp_path, "--backend", "criu", "command=sleep 600")
    assert (refused.returncode, "keeps no files" in refused.stderr) == (2, True)
