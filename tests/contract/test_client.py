"""The Python client, by the contract of the library: what a remote environment does is what a local one does.

Not of the contract: CrashContract. It kills the process that owns an environment, and a client owns none; that they stay, and
can be come back to, is tested here instead. The two processes of ForkContract are two clients of one daemon.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from daemon import Daemon, running
from rootfs import bash_rootfs
from statefork.client import Client, RemoteEnvironment
from statefork.errors import NotFound
from statefork.testing.contract import (
    CommandContract,
    EndingContract,
    FileContract,
    ForkContract,
    ProgramContract,
    RecordContract,
    StateContract,
    Subject,
)
from waypoint.engine import Engine

_SECOND_CLIENT = """
import sys
from statefork.client import Client
with Client(socket=sys.argv[1]) as client, client.create_env_manager("waypoint_build", rootfs=sys.argv[2]) as environment:
    environment.exec_command("who=second")
    snapshot = environment.snapshot("same-name")
    environment.restore(snapshot)
    (fork,) = environment.fork(1)
    print(fork.exec_command("echo fine").stdout, end="")
    fork.destroy()
"""


@dataclass(frozen=True, slots=True)
class RemoteSubject(Subject):
    """Environments of one daemon. What no environment of it accounts for was left behind by one that is gone."""

    daemon: Daemon | None = None
    client: Client | None = None
    trees: dict[Path, set[str]] = field(default_factory=dict)

    def create(self, home: Path) -> Any:
        assert self.client is not None
        environment = self.client.create_env_manager(self.method, **self.fresh_arguments())
        self.trees.setdefault(home, set()).add(environment.info().tree)
        return environment

    def traces(self, home: Path) -> list[str]:
        return self.left_behind(home)

    def left(self, home: Path) -> list[str]:
        assert self.daemon is not None
        listed = self.daemon.listed().values()
        found = [f"environment {one['id']}" for one in listed if one["tree"] in self.trees.get(home, ())]
        trees, sessions = {one["tree"] for one in listed}, {one["description"] for one in listed}
        found += [f"tree {path.name}" for path in (self.daemon.home / "trees").glob("*") if path.name not in trees]
        snapshots = self.daemon.call("GET", "/v1/snapshots?limit=1000")["items"]
        with Engine(self.daemon.home / "waypoint") as engine:
            found += [f"session {one.id}" for one in engine.store.db.sessions() if one.id not in sessions]
            stored = engine.snapshots()
        return found + [f"{len(stored)} stored states of {len(snapshots)} snapshots"] * (len(stored) > len(snapshots))


class TestClient(
    CommandContract, EndingContract, ProgramContract, FileContract, StateContract, ForkContract, RecordContract
):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
        rootfs = bash_rootfs(tmp_path_factory.mktemp("rootfs") / "root")
        place = tmp_path_factory.mktemp("daemon")
        with running(place, expected="Magic doesn't match") as daemon, Client(socket=daemon.socket) as client:

            @contextmanager
            def own_session(home: Path) -> Iterator[RemoteEnvironment]:
                """Attach to a session that was started with the engine, and look that it is still the same afterwards."""
                with Engine(home / "users-own") as engine:
                    session = engine.new()
                    try:
                        arguments = {"session_id": session.id, "store": home / "users-own"}
                        with client.create_env_manager("waypoint_attach", **arguments) as environment:
                            yield environment
                        assert session.exec("echo $mine").stdout == b"1\n"
                        assert [record.id for record in engine.sessions()] == [session.id]
                        assert engine.snapshots() == []
                    finally:
                        session.remove()

            def spoil(environment: RemoteEnvironment, snapshot: str) -> None:
                """No other environment of this daemon has snapshots."""
                for image in (daemon.home / "waypoint").glob("**/*.img"):
                    image.write_bytes(b"damaged")

            subject = RemoteSubject(
                "waypoint_build",
                {"rootfs": rootfs},
                lambda home: subject.left(home),
                attach=own_session,
                spoil=spoil,
                daemon=daemon,
                client=client,
            )
            yield subject

    def test_two_processes_side_by_side(self, fresh: Any, subject: Any, tmp_path: Path) -> None:
        fresh.exec_command("who=first")
        fresh.snapshot("same-name")
        argv = [sys.executable, "-c", _SECOND_CLIENT, str(subject.daemon.socket), str(subject.arguments["rootfs"])]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
        assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr
        assert fresh.exec_command("echo $who").stdout == "first\n"

    def test_another_client_comes_back_by_id(self, fresh: Any, subject: Any) -> None:
        """Whoever made it may be gone: the environment belongs to the daemon."""
        fresh.exec_command("kept=here")
        with Client(socket=subject.daemon.socket) as second:
            again = second.environment(fresh.id[:-2])
            assert again.id == fresh.id
            assert again.exec_command("echo $kept").stdout == "here\n"
            again.destroy()
        with pytest.raises(NotFound):
            fresh.exec_command("true")
