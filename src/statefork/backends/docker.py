"""Docker: snapshots by `docker commit`, files only."""

from __future__ import annotations

from statefork.backends.container_methods import container_methods
from statefork.backends.containers import ContainerTool, Source
from statefork.backends.durable_containers import DurableContainerDriver
from statefork.registry import Backend

__all__ = ["BACKEND", "DockerDriver"]


class DockerDriver(DurableContainerDriver):
    """Talks to whichever daemon the `docker` command of the caller talks to (DOCKER_HOST, contexts)."""

    name = "docker"

    @classmethod
    def make_tool(cls) -> ContainerTool:
        return ContainerTool("docker", install="apt-get install docker.io, and start dockerd")


BACKEND = Backend(
    name="docker",
    summary="files",
    driver=DockerDriver,
    probe=lambda: DockerDriver(Source()).probe(),
    methods=container_methods(DockerDriver),
)
