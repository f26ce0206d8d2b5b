"""Docker, by the contract; and what only containers have: Dockerfiles, volumes, users."""

from __future__ import annotations

from pathlib import Path

import pytest
from container_subject import NETWORK, attached, containers_and_images, said

from statefork import Environment, create_env_manager
from statefork.errors import BuildError, HostUnsupported, NotFound
from statefork.testing.contract import BackendContract, CommandContract, EndingContract, Subject


def spoil(environment: Environment, snapshot: str) -> None:
    said("docker", "rmi", "-f", f"statefork-snapshot:{snapshot}")


class TestDocker(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, docker: str, docker_busybox: str) -> Subject:
        return Subject(
            method="docker_build",
            arguments={"base_image": docker_busybox, "extra_args": NETWORK},
            left_behind=containers_and_images("docker"),
            attach=attached("docker", "docker_attach", docker_busybox, base_image=docker_busybox, extra_args=NETWORK),
            spoil=spoil,
        )


class TestDockerWithBash(CommandContract, EndingContract):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, docker: str, docker_bash: str) -> Subject:
        return Subject(
            "docker_build", {"base_image": docker_bash, "extra_args": NETWORK}, containers_and_images("docker")
        )

    def test_bash_is_what_runs(self, shared: Environment) -> None:
        shared.exec_command("declare -A colour=([sky]=blue); shopt -s nullglob")
        assert shared.exec_command('echo "${colour[sky]}" ${BASH_VERSION:+bash} /none*').stdout == "blue bash\n"


class TestDockerfiles:
    def test_a_dockerfile_is_the_start_state(self, docker_busybox: str, tmp_path: Path) -> None:
        task = tmp_path / "task"
        task.mkdir()
        (task / "note").write_text("from the context\n")
        (task / "Dockerfile").write_text(
            f"FROM {docker_busybox}\nENV MODE=test\nWORKDIR /srv\nCOPY note .\nRUN mkdir made && chown 1000 made\nUSER 1000\n"
        )
        with create_env_manager(
            "docker_build", home=tmp_path / "home", dockerfile_dir=task, extra_args=NETWORK
        ) as environment:
            result = environment.exec_command('cat note; echo "$MODE"; id -u; touch made/x')
            assert (result.stdout, result.exit_code, result.cwd) == ("from the context\ntest\n1000\n", 0, "/srv")
            environment.restore(environment.snapshot())
            again = environment.exec_command('ls made; echo "$MODE"; id -u')
            assert (again.stdout, again.cwd) == ("x\ntest\n1000\n", "/srv")
        assert containers_and_images("docker")(tmp_path / "home") == []

    def test_a_dockerfile_that_fails_shows_why(self, docker_busybox: str, tmp_path: Path) -> None:
        (tmp_path / "Dockerfile").write_text(f"FROM {docker_busybox}\nRUN echo 'the reason' >&2; exit 9\n")
        with pytest.raises(BuildError, match="the reason"):
            create_env_manager("docker_build", home=tmp_path / "home", dockerfile_dir=tmp_path)
        assert containers_and_images("docker")(tmp_path / "home") == []

    def test_volumes_are_named_as_not_captured(self, docker_busybox: str, tmp_path: Path) -> None:
        arguments = {"base_image": docker_busybox, "extra_args": "--network none -v /data"}
        with create_env_manager("docker_build", home=tmp_path, **arguments) as environment:
            environment.snapshot()
            assert "volume /data" in environment.snapshots()[0].not_captured

    def test_an_image_that_is_not_there(self, docker: str, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="docker images"):
            create_env_manager("docker_build", home=tmp_path, base_image="surely/not:there")

    def test_a_container_that_is_not_there(self, docker_busybox: str, tmp_path: Path) -> None:
        with pytest.raises(NotFound):
            create_env_manager("docker_attach", home=tmp_path, container_name="surely-not", base_image=docker_busybox)

    def test_an_image_without_a_shell(self, docker: str, tmp_path: Path) -> None:
        (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
        with pytest.raises(Exception, match="/bin/sh"):
            create_env_manager("docker_build", home=tmp_path / "home", dockerfile_dir=tmp_path)
        assert containers_and_images("docker")(tmp_path / "home") == []

    def test_a_daemon_that_is_not_there(self, docker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
        with pytest.raises(HostUnsupported) as caught:
            create_env_manager("docker_build", home=tmp_path, base_image="any")
        assert "dockerd" in caught.value.details["fix"]
