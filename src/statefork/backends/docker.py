"""Docker: snapshots by `docker commit`, files only."""

from __future__ import annotations

from typing import ClassVar

from statefork.backends.containers import ContainerDriver, ContainerTool
from statefork.model import Capabilities

__all__ = ["DockerDriver"]


class DockerDriver(ContainerDriver):
    """Talks to whichever daemon the `docker` command of the caller talks to (DOCKER_HOST, contexts)."""

    name = "docker"
    _probed: ClassVar[dict[tuple[str, ...], Capabilities]] = {}

    @classmethod
    def make_tool(cls) -> ContainerTool:
        return ContainerTool("docker", install="apt-get install docker.io, and start dockerd")
