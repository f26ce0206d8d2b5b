"""Fixtures over the real kernel. Every session lives in a store of the test run, and nothing may be left when it ends."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rootfs import bash_rootfs
from services import (  # noqa: F401  fixtures
    docker,
    docker_bash,
    docker_busybox,
    docker_python,
    podman,
    podman_busybox,
    podman_debian,
)
from waypoint.bases import base_from_rootfs
from waypoint.engine import Engine
from waypoint.kernel import cgroups, nat, processes
from waypoint.model import BaseRecord
from waypoint.session import Session

signal.signal(signal.SIGINT, signal.default_int_handler)
"""Also where the tests run in the background of a script, which has it ignored: what they start would ignore it too."""


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The store of this test run, also for the command line."""
    path = tmp_path_factory.mktemp("waypoint-home")
    os.environ["WAYPOINT_HOME"] = str(path)
    yield path
    with Engine(path) as engine:
        for record in engine.store.db.sessions():
            engine.session(record.id).remove()
        engine.gc()
        leftovers = left_behind(engine)
    shutil.rmtree(path, ignore_errors=True)
    assert not leftovers, f"left behind by the tests: {leftovers}"


def left_behind(engine: Engine) -> list[str]:
    """Mounts, processes, cgroups and links of this store that are still there."""
    tag = engine.store.tag
    found = [f"process {init.pid}" for init in processes.inits(tag)]
    found += [f"cgroup {group}" for _, group in cgroups.list_groups(tag)]
    found += [f"link {key}" for key in nat.nat_keys() if key.startswith(f"{tag}-")]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return found + [line for line in mounts if str(engine.store.paths.home) in line]


@pytest.fixture(scope="session")
def engine(home: Path) -> Iterator[Engine]:
    with Engine(home) as engine:
        yield engine


@pytest.fixture
def eager(home: Path, engine: Engine) -> Iterator[Engine]:
    """Over the same store, with workers started ahead."""
    with Engine(home, ahead=True) as found:
        yield found
        assert found.store.tag == engine.store.tag


@pytest.fixture(scope="session")
def small_rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bash and coreutils in a directory: layers are stacked over it."""
    path = tmp_path_factory.mktemp("rootfs") / "root"
    bash_rootfs(path)
    return path


@pytest.fixture(scope="session")
def small_base(engine: Engine, small_rootfs: Path) -> BaseRecord:
    return base_from_rootfs(engine.store, small_rootfs)


@pytest.fixture
def sessions(engine: Engine) -> Iterator[list[Session]]:
    """Sessions put in here are removed after the test, and so is every session that it made."""
    before = {record.id for record in engine.store.db.sessions()}
    made: list[Session] = []
    yield made
    for record in engine.store.db.sessions():
        if record.id not in before:
            engine.session(record.id).remove()


@pytest.fixture
def session(engine: Engine, small_base: BaseRecord, sessions: list[Session]) -> Session:
    """A fresh session over a small root file system of its own."""
    return engine.new(base=small_base)


@pytest.fixture
def host_session(engine: Engine, sessions: list[Session]) -> Session:
    """A fresh session over this machine's own root."""
    return engine.new()
