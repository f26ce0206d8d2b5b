"""Waypoint, by the contract: over a small root and over this machine's own; and what only sessions of the engine have."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rootfs import bash_rootfs, busybox_rootfs
from statefork import Environment, create_env_manager
from statefork.errors import BuildError, HostUnsupported, NotFound, UsageError
from statefork.home import collect
from statefork.registry import backends
from statefork.testing.contract import BackendContract, Subject
from statefork.testing.contract.subject import eventually
from waypoint.engine import Engine
from waypoint.kernel import cgroups, nat, processes


def sessions_and_snapshots(store: Path) -> list[str]:
    if not (store / "store.db").exists():
        return []
    with Engine(store) as engine:
        tag = engine.store.tag
        found = [f"session {record.id}" for record in engine.sessions()]
        found += [f"snapshot {record.id}" for record in engine.snapshots()]
        found += [f"process {init.pid}" for init in processes.inits(tag)]
        found += [f"cgroup {group}" for _, group in cgroups.list_groups(tag)]
        found += [f"link {key}" for key in nat.nat_keys() if key.startswith(f"{tag}-")]
    return found


def left_behind(home: Path) -> list[str]:
    return sessions_and_snapshots(home / "waypoint")


@contextmanager
def own_session(home: Path) -> Iterator[Environment]:
    """Attach to a session that was started with the engine, and look that it is still the same afterwards."""
    store = home / "users-own"
    with Engine(store) as engine:
        session = engine.new()
        try:
            session.exec("mine=theirs; cd /usr")
            with create_env_manager("ckpt_attach", home=home, session_id=session.id, store=store) as environment:
                yield environment
            assert engine.settle(session.record).state == "live"
            assert session.exec("echo $mine; pwd").stdout == b"1\n/usr\n"
            assert [record.id for record in engine.sessions()] == [session.id]
            assert engine.snapshots() == []
        finally:
            session.remove()


def spoil(environment: Environment, snapshot: str) -> None:
    store = environment._family._grounds.home / "waypoint"
    with Engine(store) as engine:
        stored = environment._family.tree.find(snapshot).captured.handle.snapshot
        for image in engine.store.paths.image(stored).glob("*.img"):
            image.write_bytes(b"damaged")


class TestWaypoint(BackendContract):
    @pytest.fixture(scope="class")
    def subject(self, tmp_path_factory: pytest.TempPathFactory) -> Subject:
        rootfs = bash_rootfs(tmp_path_factory.mktemp("rootfs") / "root")
        return Subject("waypoint_build", {"rootfs": rootfs}, left_behind, attach=own_session, spoil=spoil)


class TestWaypointOverTheHost(BackendContract):
    @pytest.fixture(scope="class")
    def subject(self) -> Subject:
        return Subject("ckpt_build", {}, left_behind)


class TestWaypointWithoutBash(BackendContract):
    @pytest.fixture(scope="class")
    def subject(self, tmp_path_factory: pytest.TempPathFactory) -> Subject:
        rootfs = busybox_rootfs(tmp_path_factory.mktemp("rootfs") / "root")
        return Subject("waypoint_build", {"rootfs": rootfs}, left_behind)
