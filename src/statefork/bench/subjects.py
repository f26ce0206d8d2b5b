"""One environment maker per backend, all over the same root file system; a backend that is not there says why."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statefork.environment import Environment
from statefork.errors import WaypointError
from statefork.factory import create_env_manager
from statefork.registry import backends
from statefork.testing.images import debian_archive
from waypoint.kernel.programs import run_program

__all__ = ["BACKENDS", "Subject", "find_subjects"]

BACKENDS = ("waypoint", "docker", "podman", "hybrid", "gvisor", "qemu", "firecracker")
"""The `criu` backend has the host's files and no root of its own; `criu` here is the bare command line, see raw.py."""
_IMAGE = "statefork-bench:latest"


@dataclass(frozen=True, slots=True)
class Subject:
    """A backend that works here."""

    name: str
    make: Callable[..., Environment]
    """With a process of so many MiB in mind, if any: a machine of its own has to have room for it."""
    claims: frozenset[str]
    ahead: Subject | None = None
    """The same backend with what it can do while an agent thinks turned on, where it has that."""
    merged: Subject | None = None
    """The same backend with equal memory shared, where it has that."""


def find_subjects(
    home: Path,
    names: Sequence[str],
    packages: Sequence[str],
    on_progress: Callable[[str], None],
    *,
    ksm: bool = False,
) -> tuple[list[Subject], dict[str, str]]:
    """Those that work, and why each of the others does not. All have one root, with these Debian packages.

    `ksm`: the host's may be turned on to share equal memory.
    """
    on_progress("making the root file system")
    archive = debian_archive(packages=packages)
    found: list[Subject] = []
    missing: dict[str, str] = {}
    known = backends()
    for name in names:
        on_progress(f"trying {name}")
        try:
            capabilities = known[name].probe()
            make = _maker(name, home, archive)
            with make() as trial:
                trial.exec_command("true")
            claims = frozenset(str(one) for one in capabilities.restores)
            ahead = merged = None
            if name == "waypoint":
                ahead = Subject(f"{name}, ahead", _maker(name, home / "ahead", archive, twins=2, drafts=True), claims)
                if ksm:
                    merged = Subject(f"{name}, merged", _maker(name, home / "merged", archive, merge=True), claims)
            found.append(Subject(name, make, claims, ahead, merged))
        except WaypointError as error:
            missing[name] = error.message
    return found, missing


def _maker(name: str, home: Path, archive: Path, **more: Any) -> Callable[..., Environment]:
    arguments: dict[str, Any]
    if name in ("docker", "podman", "hybrid"):
        tool = "docker" if name == "docker" else "podman"
        run_program([tool, "import", str(archive), _IMAGE], timeout=300).check(f"{tool} import")
        arguments = {"base_image": _IMAGE if tool == "docker" else f"localhost/{_IMAGE}"}
        if tool == "docker":
            arguments["extra_args"] = "--network none"
    else:
        arguments = {"rootfs": archive}

    def make(memory_mib: int = 0) -> Environment:
        own: dict[str, Any] = {}
        if name == "hybrid":
            own = {"container_name": f"statefork-bench-{secrets.token_hex(4)}"}
        elif name in ("qemu", "firecracker"):
            own = {"memory_mib": 512 + memory_mib * 5 // 4}
        return create_env_manager(f"{name}_build", home=home, **arguments, **own, **more)

    return make


@contextmanager
def destroyed(environments: Sequence[Environment]) -> Iterator[None]:
    try:
        yield
    finally:
        for environment in environments:
            environment.destroy()
