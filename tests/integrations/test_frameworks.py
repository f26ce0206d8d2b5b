"""The agent frameworks themselves, unmodified, over our adapters. Each runs in a process of its own with the Python of
`.frameworks` (scripts/frameworks.sh): they need a newer Python than the project, and their dependencies are their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from statefork.backends.waypoint import WaypointDriver
from statefork.home import collect

ROOT = Path(__file__).parents[2]
INSIDE = Path(__file__).parent / "inside"
PYTHON = ROOT / ".frameworks/bin/python"
FRAMEWORKS = sorted(path.stem.removeprefix("check_") for path in INSIDE.glob("check_*.py"))

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no .frameworks: scripts/frameworks.sh found no Python 3.12"),
    pytest.mark.timeout(420),
]


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "home"
    yield home
    left = [line for line in collect(home, [WaypointDriver]) if line.startswith(("waypoint session", "directory"))]
    assert not left, "left behind by the adapter"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_framework(framework: str, state: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "CHECK_HOME": str(state),
        "HOME": str(tmp_path),  # they keep settings and logs there
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # litellm would fetch its price list
        "MSWEA_SILENT_STARTUP": "1",
        "OTEL_SDK_DISABLED": "true",
    }
    environment.pop("WAYPOINT_HOME", None)
    ended = subprocess.run(
        [PYTHON, "-m", "pytest", "-c", INSIDE / "pytest.ini", INSIDE / f"check_{framework}.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=400,
    )
    assert ended.returncode == 0, ended.stdout[-20_000:]
