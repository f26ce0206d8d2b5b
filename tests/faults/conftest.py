"""A store for the tests that wreck things, so that nobody else's sessions stand in the way of its checks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from wreck import leftovers, remove_all

from waypoint.bases import base_from_rootfs
from waypoint.engine import Engine
from waypoint.model import BaseRecord


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    home = tmp_path_factory.mktemp("faults-home")
    with Engine(home) as engine:
        yield engine
        remove_all(engine)
        engine.gc()
        left = leftovers(engine)
    shutil.rmtree(home, ignore_errors=True)
    assert not left, left


@pytest.fixture(scope="module")
def floor(ground: Engine, small_rootfs: Path) -> BaseRecord:
    """The base of most sessions here; it has a name, so that gc keeps it."""
    return base_from_rootfs(ground.store, small_rootfs, name="floor")
