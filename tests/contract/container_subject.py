"""What the contract suite has to know of container tools."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from statefork import Environment, create_env_manager

NETWORK = ["--network", "none"]


def said(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def containers_and_images(tool: str) -> Callable[[Path], list[str]]:
    def left_behind(home: Path) -> list[str]:
        mark = f"label=statefork.home={home}"
        containers = said(tool, "ps", "-a", "--format", "{{.Names}}", "--filter", mark).split()
        images = said(tool, "images", "--format", "{{.Repository}}:{{.Tag}}", "--filter", mark).split()
        return [*(f"container {name}" for name in containers), *(f"image {name}" for name in images)]

    return left_behind


def attached(
    tool: str, method: str, image: str, **arguments: object
) -> Callable[[Path], AbstractContextManager[Environment]]:
    """Attach to a container that was started by hand, and look that it is still the same afterwards."""
    first = [tool, *(["--cgroup-manager", "cgroupfs", "--runtime", "runc"] if tool == "podman" else [])]
    limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"] if tool == "podman" else []

    @contextmanager
    def attach(home: Path) -> Iterator[Environment]:
        name = f"users-own-{secrets.token_hex(4)}"
        said(*first, "run", "-d", "--name", name, *NETWORK, *limits, image, "sleep", "3600")
        try:
            before = said(tool, "inspect", "-f", "{{.Id}} {{.State.Pid}} {{.State.Running}}", name)
            with create_env_manager(method, home=home, container_name=name, **arguments) as environment:
                yield environment
            assert said(tool, "inspect", "-f", "{{.Id}} {{.State.Pid}} {{.State.Running}}", name) == before
            assert "statefork" not in said(tool, "exec", name, "ls", "-a", "/", "/tmp")
        finally:
            said(tool, "rm", "-f", *(["-t", "0"] if tool == "podman" else []), name)

    return attach
