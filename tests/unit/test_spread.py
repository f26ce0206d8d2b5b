"""The hint to ext4, read back as the kernel has it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from waypoint.kernel.spread import spread_children
from waypoint.store.paths import Paths


def attributes(directory: Path) -> str:
    done = subprocess.run(["lsattr", "-d", str(directory)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no such attributes here: {done.stderr}")
    return done.stdout.split()[0]


def test_the_directories_of_a_store_spread_their_children(tmp_path: Path) -> None:
    if "e" not in attributes(tmp_path):
        pytest.skip("not on ext4")
    paths = Paths(tmp_path / "store")
    paths.make()
    for directory in (paths.layers, paths.images, paths.sessions):
        assert "T" in attributes(directory)
    assert "T" not in attributes(paths.home)


def test_other_file_systems_are_left_alone() -> None:
    spread_children("/proc")
