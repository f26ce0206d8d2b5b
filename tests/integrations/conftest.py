"""The agent frameworks themselves, unmodified, over our adapters. Each runs in a process of its own with the Python of
`.frameworks` (scripts/frameworks.sh): they need a newer Python than the project, and their dependencies are their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from statefork.backends.waypoint import WaypointDriver
from statefork.home import collect

INSIDE = Path(__file__).parent / "inside"
PYTHON = Path(__file__).parents[2] / ".frameworks/bin/python"


@pytest.fixture
def check(tmp_path: Path) -> Callable[[str], None]:
    """Run inside/check_NAME.py with pytest; afterwards nothing may be left of it."""
    if not PYTHON.exists():
        pytest.skip("no .frameworks: scripts/frameworks.sh found no Python 3.12")
    home = tmp_path / "home"
    environment = {
        **os.environ,
        "CHECK_HOME": str(home),
        "HOME": str(tmp_path),  # they keep settings and logs there
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # litellm would fetch its price list
        "HARBOR_TELEMETRY": "0",
        "MSWEA_SILENT_STARTUP": "1",
        "OTEL_SDK_DISABLED": "true",
    }
    environment.pop("WAYPOINT_HOME", None)

    def run(name: str) -> None:
        ended = subprocess.run(
            [PYTHON, "-m", "pytest", "-c", INSIDE / "pytest.ini", INSIDE / f"check_{name}.py"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=860,
        )
        left = [line for line in collect(home, [WaypointDriver]) if line.startswith(("waypoint session", "directory"))]
        assert ended.returncode == 0, ended.stdout[-20_000:]
        assert not left, "left behind by the adapter"

    return run
