"""Docker: snapshots by `docker commit`, files only."""

from __future__ import annotations

from statefork.backends.containers import ContainerDriver, ContainerTool

__all__ = ["DockerDriver"]


class DockerDriver(ContainerDriver):
    """Talks to whichever daemon the `docker` command of the caller talks to (DOCKER_HOST, contexts)."""

    name = "docker"

    @classmethod
    def make_tool(cls) -> ContainerTool:
        return ContainerTool("docker", install="apt-get install docker.io, and start dockerd")
