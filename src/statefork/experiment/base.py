"""The one image that all tasks are built from, made here from Debian packages; each container storage gets its own copy.

A task's Dockerfile says `FROM localhost/statefork-tasks:1`. Nothing is asked of a registry. A change of the packages takes a
new number, here and in the Dockerfiles.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from statefork.backends.containers import ContainerTool
from statefork.errors import NotFound
from statefork.testing.images import debian_archive
from waypoint.bases import base_from_dockerfile
from waypoint.engine import Engine

__all__ = ["IMAGE", "PACKAGES", "base_archive", "give_to_container_tool", "give_to_waypoint"]

_TAG = "statefork-tasks:1"
IMAGE = f"localhost/{_TAG}"
PACKAGES = (
    "python3",
    "git",
    "sqlite3",
    "make",
    "tcc",
    "libc6-dev",
    "tmux",
    "bc",
    "ed",
    "procps",
    "redis-server",
)
_LEAN = tuple(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale"))
_DOCKERFILE = 'FROM scratch\nADD base.tar /\nCMD ["/bin/bash"]\n'


def base_archive() -> Path:
    """The root file system as a tar archive: about 240 MB, made once per machine and cached."""
    return debian_archive(packages=PACKAGES, more_options=_LEAN)


def give_to_waypoint(engine: Engine) -> None:
    """Into the storage that this engine builds Dockerfiles with, unless it is there."""
    try:
        engine.store.db.base(_TAG)
    except NotFound:
        with tempfile.TemporaryDirectory(prefix="statefork-tasks-", dir=engine.store.paths.home) as scratch:
            archive, place = base_archive(), Path(scratch) / "base.tar"
            try:
                os.link(archive, place)
            except OSError:  # another file system
                shutil.copyfile(archive, place)
            (Path(scratch) / "Dockerfile").write_text(_DOCKERFILE)
            base_from_dockerfile(engine.store, Path(scratch), name=_TAG)


def give_to_container_tool(tool: ContainerTool) -> None:
    """Into the storage of docker or podman, unless it is there."""
    if tool.call("image", "inspect", IMAGE).exit_code != 0:
        tool.ask(f"importing the tasks' base into {tool.program}", "import", str(base_archive()), IMAGE)
