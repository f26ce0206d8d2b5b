"""The TypeScript SDK: its own tests (vitest, against a daemon that they start), with whatever Node.js this host has or gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_its_own_tests_pass() -> None:
    """Types, both builds, and the generated file against docs/openapi.json are part of them."""
    statefork = str(Path(sys.executable).parent / "statefork")
    variables = {**os.environ, "STATEFORK": statefork, "NO_COLOR": "1", "CI": "1"}
    done = subprocess.run(
        [str(ROOT / "scripts/sdk.sh"), "npm", "test"],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
