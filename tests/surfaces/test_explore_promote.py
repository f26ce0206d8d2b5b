"""What becomes of a winner: the main environment, files in a directory, a patch that git applies, an image that others load."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon import running, until
from statefork.client import Client
from statefork.environment import Environment
from statefork.errors import Exists, UsageError
from statefork.explore import (
    Budget,
    ExitCode,
    Number,
    Outcome,
    Scripts,
    best_of_n,
    changed_files,
    keep,
    mcts,
    promote,
    write_image,
)
from statefork.factory import create_env_manager
from waypoint.bases import base_from_rootfs
from waypoint.engine import Engine

SETUP = r"""
mkdir -p /app/sub /app/old && cd /app && printf 'one\ntwo\nthree\n' >text && printf '\0\1\2' >binary && echo gone >removed
echo x >old/x; echo y >old/y; echo '#!/bin/sh' >script; ln -s text link; echo same >same; echo 'a b' >'with space'
"""
CHANGE = r"""
printf 'one\n2\nthree\n' >text; printf '\0\3\4\377' >binary; rm removed; rm -r old; chmod +x script; ln -sf same link
mkdir sub/new; echo fresh >sub/new/file; echo 'ä ö' >'ü.txt'; echo more >>'with space'; : >empty; KEPT=yes; echo outside >/outside
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory, small_rootfs: Path) -> Iterator[Environment]:
    home = tmp_path_factory.mktemp("promote")
    with create_env_manager("waypoint_build", home=home, store=home / "store", rootfs=small_rootfs) as env:
        assert env.exec_command(SETUP).ok
        yield env


@pytest.fixture(scope="module")
def outcome(env: Environment) -> Iterator[Outcome]:
    found = best_of_n(env, ["true", CHANGE], ExitCode("test -e /app/empty"), workers=1)
    assert found.solved
    yield found
    found.environment.destroy()


def _copy(env: Environment, outcome: Outcome, target: Path) -> Path:
    """What the search began with, on this host."""
    (before,) = env.fork(1, from_snapshot=outcome.began)
    with before:
        before.download("/app", target)
    return target


def _listing(directory: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = path.readlink()
        elif path.is_file():
            found[name] = (path.read_bytes(), bool(path.stat().st_mode & 0o100))
    return found


def _winners(outcome: Outcome, target: Path) -> dict[str, object]:
    outcome.environment.download("/app", target)
    return _listing(target)


def test_changes_are_applied_to_a_directory(env: Environment, outcome: Outcome, tmp_path: Path) -> None:
    target = _copy(env, outcome, tmp_path / "mine")
    wanted = _winners(outcome, tmp_path / "wanted")
    with changed_files(outcome.environment, outcome.began, "/app") as changes:
        assert "removed" in changes.removed and "empty" in changes.added and "text" in changes.changed
        assert not any("outside" in name for name in changes.added)
        (target / "text").write_text("mine\n")
        with pytest.raises(Exists, match="text"):
            changes.apply(target)
        assert (target / "removed").exists(), "nothing was applied"
        changes.apply(target, force=True)
        assert _listing(target) == wanted
        changes.apply(target)  # what is so already is no clash
        (target / "old").symlink_to("/tmp")
        with pytest.raises(UsageError, match="leads out"):
            changes.apply(target)


def test_a_patch_is_applied_by_git(env: Environment, outcome: Outcome, tmp_path: Path) -> None:
    target = _copy(env, outcome, tmp_path / "mine")
    wanted = _winners(outcome, tmp_path / "wanted")
    with changed_files(outcome.environment, outcome.began, "/app") as changes:
        patch = changes.patch()
    for arguments in (["--check", "-"], ["-"]):
        done = subprocess.run(["git", "apply", *arguments], cwd=target, input=patch, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
    assert _listing(target) == wanted


def test_an_image_of_any_backend(outcome: Outcome, tmp_path: Path, podman: str) -> None:
    archive = tmp_path / "image.tar"
    write_image(outcome.environment, outcome.began, archive, name="localhost/won:1", history=["the change"])
    with tarfile.open(archive) as layout:
        index = json.load(layout.extractfile("index.json"))  # type: ignore[arg-type]
        assert json.load(layout.extractfile("oci-layout")) == {"imageLayoutVersion": "1.0.0"}  # type: ignore[arg-type]
        digest = index["manifests"][0]["digest"].removeprefix("sha256:")
        manifest = json.load(layout.extractfile(f"blobs/sha256/{digest}"))  # type: ignore[arg-type]
        config = json.load(layout.extractfile("blobs/sha256/" + manifest["config"]["digest"][7:]))  # type: ignore[arg-type]
    assert len(manifest["layers"]) == 2 == len(config["rootfs"]["diff_ids"])
    assert config["config"]["WorkingDir"] == "/app"
    assert "the change" in config["history"][1]["created_by"]
    loaded = subprocess.run(["podman", "load", "-i", str(archive)], capture_output=True, text=True)
    assert "localhost/won:1" in loaded.stdout, loaded.stderr
    root = _exported(tmp_path, "podman", "localhost/won:1")
    names = {name for name in root if name.startswith("app")}
    assert {"app/empty", "app/sub/new/file", "app/ü.txt"} <= names
    assert not {"app/removed", "app/old", "app/old/x"} & names
    assert "outside" in root and "usr/bin/bash" in root
    assert not any(name.startswith(".waypoint") for name in root)


def _exported(tmp_path: Path, tool: str, image: str) -> set[str]:
    """Names of all files of an image."""
    made = subprocess.run([tool, "create", image, "true"], check=True, capture_output=True, text=True).stdout.strip()
    files = tmp_path / "files.tar"
    subprocess.run([tool, "export", "-o", str(files), made], check=True)
    subprocess.run([tool, "rm", made], check=True, capture_output=True)
    with tarfile.open(files) as archive:
        return {name.removeprefix("./") for name in archive.getnames()}


@pytest.fixture(scope="module")
def container(docker_busybox: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    with create_env_manager("docker_build", home=tmp_path_factory.mktemp("home"), base_image=docker_busybox) as env:
        yield env


def test_an_image_of_docker_keeps_its_configuration(container: Environment, tmp_path: Path) -> None:
    with container.fork(1)[0] as env:
        env.exec_command("mkdir /app; echo 1 >/app/a")
        outcome = best_of_n(env, ["false", "echo 2 >/app/b; rm /app/a"], ExitCode("test -e /app/b"), workers=1)
        with outcome.environment as live:
            with changed_files(live, outcome.began, "/app") as changes:
                assert (changes.added, changes.removed) == (("b",), ("a",))
                assert (changes.before / "a").read_text() == "1\n"
            write_image(live, outcome.began, tmp_path / "image.tar", name="won")
            assert keep(live, "statefork-test-kept") == "docker exec -it statefork-test-kept sh"
            with pytest.raises(Exists):
                keep(live, "statefork-test-kept")
            promote(outcome, env)
            assert env.exec_command("ls /app").stdout == "b\n"
    marks = ["docker", "inspect", "-f", '{{index .Config.Labels "statefork.home"}}', "statefork-test-kept"]
    assert subprocess.run(marks, capture_output=True, text=True).stdout == "\n", "no collector takes it for ours"
    inside = subprocess.run(["docker", "exec", "statefork-test-kept", "ls", "/app"], capture_output=True, text=True)
    subprocess.run(["docker", "rm", "-f", "-v", "statefork-test-kept"], check=True, capture_output=True)
    assert inside.stdout == "b\n"
    loaded = subprocess.run(["docker", "load", "-i", str(tmp_path / "image.tar")], capture_output=True, text=True)
    assert "won:latest" in loaded.stdout, loaded.stderr
    names = _exported(tmp_path, "docker", "won:latest")
    subprocess.run(["docker", "rmi", "-f", "won:latest"], check=True, capture_output=True)
    assert "app/b" in names and "app/a" not in names


def test_the_winner_goes_on_as_the_main_one(env: Environment) -> None:
    (main,) = env.fork(1)
    with main:
        outcome = best_of_n(main, ["N=1", "N=2; sleep 1000 &"], ExitCode("ps -e | grep -q '[s]leep'"), workers=1)
        outcome.environment.exec_command("N=$((N + 40))")
        promote(outcome, main)
        assert main.exec_command("echo $N; jobs -pr | wc -l").stdout.split() == ["42", "1"]
        assert outcome.environment.state == "destroyed"
        main.restore(main.snapshot())
        assert main.exec_command("echo $N").stdout == "42\n"


def test_somebodys_session_goes_on_as_the_winner(tmp_path: Path, small_rootfs: Path) -> None:
    """A session that a person made stays theirs, under its own id, when the search and all of its snapshots are gone."""
    store = tmp_path / "store"
    with Engine(store) as engine:
        session = engine.new(base=base_from_rootfs(engine.store, small_rootfs), name="mine")
        try:
            session.exec("N=0; cd /tmp")
            with create_env_manager("waypoint_attach", home=tmp_path / "home", session_id="mine", store=store) as env:
                outcome = best_of_n(env, ["N=1; echo 1 >/tmp/n", "N=7; echo 7 >/tmp/n"], ExitCode("grep -q 7 /tmp/n"), workers=1)
                promote(outcome, env)
                assert env.exec_command("echo $N").stdout == "7\n"
            again = engine.session("mine")
            assert again.id == session.id
            assert again.exec("echo $N $PWD; cat n").stdout == b"7 /tmp\n7\n"
            taken = again.snapshot("after")
            again.exec("N=8")
            again.restore(taken.id)
            assert again.exec("echo $N").stdout == b"7\n"
            assert [record.id for record in engine.sessions()] == [session.id]
        finally:
            engine.session("mine").remove()
            engine.gc()


def test_with_files_only_a_search_goes_on_from_what_comes_back(container: Environment) -> None:
    """The worker that made a node still has its shell, but nobody who is restored to the node has: so it is restored, too."""
    with container.fork(1)[0] as env:
        steps = Scripts(["N=7; echo first >/first", "echo ${N:-lost} | tee /second"])
        judge = Number("cat /first /second 2>/dev/null | wc -l", scale=0.5)
        outcome = mcts(env, steps, judge, Budget(nodes=6), workers=1, widening=0.6, exploration=0.0)
        with outcome.environment as live:
            assert outcome.solved
            assert [action.command[:4] for action in outcome.actions] == ["N=7;", "echo"]
            assert live.read_file("/second") == b"lost\n" and outcome.best.output == "lost\n"


def test_over_a_daemon(tmp_path: Path, small_rootfs: Path) -> None:
    """The client's environments have the library's verbs, so a search and what comes of it need nothing else."""
    with running(tmp_path / "d") as daemon, Client(socket=daemon.socket) as client:
        with client.create_env_manager("waypoint_build", rootfs=str(small_rootfs)) as main:
            main.exec_command("N=0; mkdir /app")
            steps = Scripts(["N=$((N + 1)); echo $N | tee /app/n"], once=False)
            outcome = mcts(main, steps, ExitCode("grep -q 2 /app/n"), Budget(nodes=6), workers=1, trace=tmp_path / "t")  # type: ignore[arg-type]
            assert outcome.solved
            with changed_files(outcome.environment, outcome.began, "/app") as changes:
                assert b"+2" in changes.patch()
            promote(outcome, main)  # type: ignore[arg-type]
            assert main.exec_command("echo $N").stdout == "2\n"
        until(lambda: not daemon.leftovers(), what="nothing is left")
