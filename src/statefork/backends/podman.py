"""Podman: snapshots by `podman commit`, files only. No daemon; the user's own storage and configuration are used."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from statefork.backends.container_methods import container_methods
from statefork.backends.containers import ContainerTool, Source
from statefork.backends.durable_containers import DurableContainerDriver
from statefork.registry import Backend

__all__ = ["BACKEND", "PodmanDriver", "podman_tool", "ulimit_options"]

INSTALL = "apt-get install podman runc"


def podman_tool(runtime: str | None = None) -> ContainerTool:
    """Without systemd there is nobody to make cgroups for podman, so it has to make them itself."""
    first = [] if Path("/run/systemd/system").is_dir() else ["--cgroup-manager", "cgroupfs"]
    # crun refuses hosts where both cgroup versions have controllers; runc works on them.
    if runtime is None and not Path("/sys/fs/cgroup/cgroup.controllers").exists() and shutil.which("runc"):
        runtime = "runc"
    return ContainerTool("podman", [*first, *(["--runtime", runtime] if runtime else [])], install=INSTALL)


def ulimit_options() -> list[str]:
    """Podman's own default (1048576 open files) is above the hard limit of a root without CAP_SYS_RESOURCE, it lowers
    its own process limit to 32768, and `--ulimit host` knows of neither."""
    files, processes = (resource.getrlimit(limit)[1] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    most = 1048576
    files = min(files, most) if files != resource.RLIM_INFINITY else most
    processes = min(processes, 32768) if processes != resource.RLIM_INFINITY else 32768
    return ["--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={processes}:{processes}"]


class PodmanDriver(DurableContainerDriver):
    name = "podman"
    version_format = "{{.Client.Version}}"
    has_daemon = False

    @classmethod
    def make_tool(cls) -> ContainerTool:
        return podman_tool()

    def run_options(self) -> list[str]:
        return ulimit_options()


BACKEND = Backend(
    name="podman",
    summary="files",
    driver=PodmanDriver,
    probe=lambda: PodmanDriver(Source()).probe(),
    methods=container_methods(PodmanDriver),
)
