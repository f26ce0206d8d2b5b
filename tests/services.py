"""Real services for tests: a Docker daemon of our own, podman with storage of its own, images made here."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rootfs import bash_rootfs, python_rootfs
from statefork.testing.images import busybox_archive, debian_archive

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """DOCKER_HOST leads to a daemon that is there for this test run alone."""
    directory = tmp_path_factory.mktemp("docker")
    script = str(ROOT / "scripts/services/dockerd")
    started = subprocess.run([script, "start", str(directory)], check=True, capture_output=True, text=True)
    with _variable("DOCKER_HOST", started.stdout.strip()):
        yield "docker"
    subprocess.run([script, "stop", str(directory)], check=True)


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("podman")
    configuration = directory / "storage.conf"
    configuration.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{directory}/graph"\nrunroot = "{directory}/run"\n'
    )
    with _variable("CONTAINERS_STORAGE_CONF", str(configuration)):
        yield "podman"
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(f"{directory}/")), reverse=True):
        subprocess.run(["umount", mount], check=True)


@pytest.fixture(scope="session")
def docker_busybox(docker: str) -> str:
    return _imported(docker, "statefork-busybox", busybox_archive())


@pytest.fixture(scope="session")
def docker_bash(docker: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tenth of Debian's size, and bash all the same."""
    root = bash_rootfs(tmp_path_factory.mktemp("image") / "root")
    return _imported(docker, "statefork-bash", _packed(root))


@pytest.fixture(scope="session")
def docker_python(docker: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    root = python_rootfs(tmp_path_factory.mktemp("image") / "root")
    return _imported(docker, "statefork-python", _packed(root))


@pytest.fixture(scope="session")
def podman_busybox(podman: str) -> str:
    return _imported(podman, "statefork-busybox", busybox_archive())


@pytest.fixture(scope="session")
def podman_debian(podman: str) -> str:
    return _imported(podman, "statefork-debian", debian_archive())


def _packed(root: Path) -> Path:
    archive = root.with_suffix(".tar")
    subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
    return archive


def _imported(tool: str, name: str, archive: Path) -> str:
    subprocess.run([tool, "import", str(archive), f"{name}:test"], check=True, capture_output=True)
    return f"{name}:test"


class _variable:
    """An environment variable for the tools that the backends start, as long as their tests run."""

    def __init__(self, name: str, value: str) -> None:
        self._name, self._value = name, value

    def __enter__(self) -> None:
        self._before = os.environ.get(self._name)
        os.environ[self._name] = self._value

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del os.environ[self._name]
        else:
            os.environ[self._name] = self._before
