"""Waypoint, by the contract: over a small root and over this machine's own; and what only sessions of the engine have."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rootfs import bash_rootfs
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
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Subject:
        rootfs = bash_rootfs(tmp_path_factory.mktemp("rootfs") / "root")
        return Subject("waypoint_build", {"rootfs": rootfs}, left_behind, attach=own_session, spoil=spoil)


class TestWaypointOverTheHost(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> Subject:
        return Subject("ckpt_build", {}, left_behind)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bash_rootfs(tmp_path_factory.mktemp("rootfs") / "root")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, small: Path) -> Path:
    """A directory with a Dockerfile that needs no registry."""
    directory = tmp_path_factory.mktemp("task")
    subprocess.run(["tar", "-C", str(small), "-cf", str(directory / "root.tar"), "."], check=True)
    (directory / "note").write_text("from the context\n")
    (directory / "Dockerfile").write_text(
        "FROM scratch\nADD root.tar /\nENV PATH=/usr/bin MODE=test\nWORKDIR /srv\nCOPY note .\n"
        "RUN mkdir made && chown 1000 made\nUSER 1000\n"
    )
    return directory


class TestBases:
    def test_a_dockerfile_is_the_start_state(self, task: Path, tmp_path: Path) -> None:
        with create_env_manager("ckpt_build", home=tmp_path, dockerfile_dir=task) as environment:
            result = environment.exec_command('cat note; echo "$MODE"; id -u; touch made/x')
            assert (result.stdout, result.exit_code, result.cwd) == ("from the context\ntest\n1000\n", 0, "/srv")
            environment.restore(environment.snapshot())
            again = environment.exec_command('ls made; echo "$MODE"; id -u')
            assert (again.stdout, again.cwd) == ("x\ntest\n1000\n", "/srv")
        assert left_behind(tmp_path) == []
        with create_env_manager("ckpt_build", home=tmp_path, dockerfile_dir=task, build=False) as environment:
            assert environment.exec_command("cat note").stdout == "from the context\n"
        drivers = [backend.driver for backend in backends().values()]
        assert "waypoint bases: 1" in list(collect(tmp_path, drivers))
        assert list(collect(tmp_path, drivers)) == []

    def test_what_was_not_built_cannot_be_used(self, task: Path, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="not been built"):
            create_env_manager("waypoint_build", home=tmp_path, dockerfile_dir=task, build=False)

    def test_a_dockerfile_that_fails_shows_why(self, task: Path, tmp_path: Path) -> None:
        context = tmp_path / "context"
        context.mkdir()
        (context / "root.tar").hardlink_to(task / "root.tar")
        (context / "Dockerfile").write_text(
            "FROM scratch\nADD root.tar /\nENV PATH=/usr/bin\nRUN echo 'the reason' >&2; exit 9\n"
        )
        with pytest.raises(BuildError, match="the reason"):
            create_env_manager("waypoint_build", home=tmp_path / "home", dockerfile_dir=context)
        assert left_behind(tmp_path / "home") == []

    def test_an_archive(self, task: Path, tmp_path: Path) -> None:
        with create_env_manager("waypoint_build", home=tmp_path, rootfs=task / "root.tar") as environment:
            assert environment.exec_command("ls /srv 2>&1 | wc -l; whoami").stdout == "1\nroot\n"

    def test_options_reach_the_session(self, small: Path, tmp_path: Path) -> None:
        options = {"rootfs": small, "env": {"COLOUR": "a b"}, "user": "user", "workdir": "/usr", "pids": 40}
        with create_env_manager("waypoint_build", home=tmp_path, **options) as environment:
            result = environment.exec_command('echo "$COLOUR"; whoami; pwd')
            assert result.stdout == "a b\nuser\n/usr\n"
            assert environment.run(["sh", "-c", 'echo "$COLOUR"; whoami; pwd']).stdout == result.stdout
            many = ["dash", "-c", "for n in $(seq 60); do sleep 5 & done"]
            assert "Cannot fork" in environment.run(many).stderr
            eventually("they have ended", lambda: "sleep" not in environment.run(["ps", "-e"]).stdout)
            (fork,) = environment.fork()
            with fork:
                assert "Cannot fork" in fork.run(many).stderr

    def test_each_has_its_own_network(self, small: Path, tmp_path: Path) -> None:
        with create_env_manager("waypoint_build", home=tmp_path, rootfs=small, network="nat") as environment:
            address = "sed -n 2p /proc/net/route | cut -f 1"
            before = environment.exec_command(address).stdout
            assert before.strip()
            (fork,) = environment.fork()
            with fork:
                assert fork.exec_command(address).stdout == before
        assert left_behind(tmp_path) == []


class TestWrongArguments:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"rootfs": "/", "dockerfile_dir": "/"}, "only one"),
            ({"memory": "lots"}, "512M"),
            ({"cpus": 0}, "0.5"),
            ({"network": "wifi"}, "nat"),
            ({"build": "perhaps"}, "True"),
            ({"env": "A=1"}, "mapping"),
            ({"container_name": "x"}, "it takes"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_they_are_named(self, arguments: dict[str, Any], said: str, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=said):
            create_env_manager("waypoint_build", home=tmp_path, **arguments)
        assert not (tmp_path / "trees").exists()

    def test_a_session_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="session_id"):
            create_env_manager("waypoint_attach", home=tmp_path)
        with pytest.raises(NotFound, match="waypoint ls"):
            create_env_manager("waypoint_attach", home=tmp_path, session_id="s00000000", store=tmp_path / "none")
        assert not (tmp_path / "none").exists()

    def test_a_host_that_is_not_set_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WAYPOINT_TOOLS", str(tmp_path / "empty"))
        with pytest.raises(HostUnsupported) as caught:
            create_env_manager("waypoint_build", home=tmp_path / "home")
        assert caught.value.details["fix"] == "waypoint setup"


class TestWaypointOnly:
    def test_a_running_command_goes_on_in_a_fork(self, small: Path, tmp_path: Path) -> None:
        with create_env_manager("waypoint_build", home=tmp_path, rootfs=small) as environment:
            begun = threading.Event()
            script = "echo begun; while ! [ -e /tmp/gate ]; do sleep 0.05; done; done=yes"
            running = threading.Thread(
                target=environment.exec_command, args=(script,), kwargs={"on_output": lambda *_: begun.set()}
            )
            running.start()
            assert begun.wait(30)
            (fork,) = environment.fork()
            with fork:
                fork.run(["touch", "/tmp/gate"])
                assert fork.exec_command("echo $done", timeout=30).stdout == "yes\n"
                assert running.is_alive()
                environment.run(["touch", "/tmp/gate"])
                running.join(30)
                assert not running.is_alive()

    def test_the_last_status_comes_back(self, small: Path, tmp_path: Path) -> None:
        with create_env_manager("waypoint_build", home=tmp_path, rootfs=small) as environment:
            environment.exec_command("(exit 7)")
            (fork,) = environment.fork()
            with fork:
                assert fork.exec_command("echo $?").stdout == "7\n"

    def test_only_files_if_asked(self, small: Path, tmp_path: Path) -> None:
        with create_env_manager("waypoint_build", home=tmp_path, rootfs=small) as environment:
            environment.exec_command("echo kept >/tmp/kept; lost=1; sleep 600 &")
            snapshot = environment.snapshot(mode="files")
            assert environment.snapshots()[0].captured == ("files",)
            assert environment.stats.memory_bytes == 0
            assert environment.restore(snapshot).shell_restarted
            result = environment.exec_command('cat /tmp/kept; echo "lost=$lost"')
            assert (result.stdout, result.shell_restarted) == ("kept\nlost=\n", True)

    def test_processes_are_named(self, small: Path, tmp_path: Path) -> None:
        with create_env_manager("waypoint_build", home=tmp_path, rootfs=small) as environment:
            environment.snapshot("before")
            environment.exec_command("sleep 611 &")
            environment.snapshot("after")
            assert environment.diff("before", "after").processes_added == ("sleep 611",)

    def test_a_snapshot_taken_by_hand_outlives_ours(self, small: Path, tmp_path: Path) -> None:
        """Of a session that was attached to: ours are cut out of its chain."""
        with Engine(tmp_path / "users-own") as engine:
            session = engine.new()
            first = session.snapshot("first")
            arguments = {"session_id": session.id, "store": tmp_path / "users-own"}
            with create_env_manager("waypoint_attach", home=tmp_path / "home", **arguments) as environment:
                environment.snapshot()
                last = session.snapshot("last")
            assert {record.id: record.parent for record in engine.snapshots()} == {first.id: None, last.id: first.id}
            session.restore("last")
            session.remove()

    def test_the_users_own_store(self, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WAYPOINT_HOME", str(tmp_path / "store"))
        with create_env_manager("waypoint_build", home=tmp_path / "home", rootfs=small) as environment:
            with Engine(tmp_path / "store") as engine:
                session = engine.session(environment.description)
                assert session.exec("echo seen").stdout == b"seen\n"
            with create_env_manager(
                "waypoint_attach", home=tmp_path / "home", session_id=environment.description
            ) as again:
                again.pause()
                assert session_state(tmp_path / "store", environment.description) == "paused"
            assert session_state(tmp_path / "store", environment.description) == "live"
        assert sessions_and_snapshots(tmp_path / "store") == []


def session_state(store: Path, session: str) -> str:
    with Engine(store) as engine:
        return engine.settle(engine.session(session).record).state
