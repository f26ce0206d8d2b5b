"""The host side of starting things: the launcher's command lines for a new session and for CRIU."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from waypoint.errors import DiskFull, KernelError
from waypoint.kernel import processes, tools
from waypoint.model import Process

STAGE = "/run/root"
"""Where the launcher puts a root together, in its private mount namespace."""

ID_BASE = 0x70000000
"""Root of a session is this kuid: above the ranges that distributions hand out, below 2^31."""

__all__ = ["ID_BASE", "STAGE", "IdmapRefused", "Overlay", "Surroundings", "launch_argv", "start_init"]


class IdmapRefused(KernelError):
    """The file system under a layer does not take idmapped mounts; the caller falls back to the identity map."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """One session's root: named relative to `layers`, so that option strings stay short whatever the store's path."""

    layers: Path
    lower: tuple[str, ...]
    base: tuple[Path, ...]
    upper: str
    work: str
    idmap: int

    def options(self) -> list[str]:
        out = ["--layers", str(self.layers), "--upper", self.upper, "--work", self.work]
        for name in self.lower:
            out += ["--lower", name]
        for path in self.base:
            out += ["--base", str(path)]
        if self.idmap:
            out += ["--idmap", str(self.idmap)]
        return out


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is around a session: its network kind, its cgroups, its confinement."""

    network: str
    hostname: str
    cgroups: tuple[Path, ...]
    capabilities: int
    seccomp: Path | None
    masked: tuple[str, ...]
    readonly: tuple[str, ...]
    merge: bool = False

    def options(self) -> list[str]:
        out = ["--network", self.network, "--hostname", self.hostname, "--caps", f"{self.capabilities:x}"]
        for path in self.masked:
            out += ["--mask", path.lstrip("/")]
        for path in self.readonly:
            out += ["--readonly", path.lstrip("/")]
        if self.seccomp is not None:
            out += ["--seccomp", str(self.seccomp)]
        return [*out, "--merge"] if self.merge else out


def launch_argv(verb: str, options: Sequence[str], cgroups: Sequence[Path], program: Sequence[str]) -> list[str]:
    out = [str(tools.launch_path()), verb, *options]
    for path in cgroups:
        out += ["--cgroup", str(path)]
    return [*out, "--", *program]


def start_init(
    overlay: Overlay,
    surroundings: Surroundings,
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    hold: Sequence[int] = (),
    timeout: float = 30,
) -> Process:
    """Start PID 1 of a new session and return it once it serves its socket.

    `hold`: descriptors of locks that are kept until init itself runs, whatever becomes of the caller.
    """
    command = launch_argv("new", [*overlay.options(), *surroundings.options()], surroundings.cgroups, argv)
    reading, writing = os.pipe()
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=writing,
            env=dict(env),
            pass_fds=hold,
            start_new_session=True,
        )
    finally:
        os.close(writing)
    with os.fdopen(reading, "rb") as errors:
        try:
            said, _ = child.communicate(timeout=timeout)
            # init closes its end of this pipe when it is ready, and says what is wrong before it dies
            complaint = errors.read().decode(errors="replace").strip()
        except subprocess.TimeoutExpired as error:
            child.kill()
            child.wait()
            raise KernelError(f"the launcher did not finish within {timeout:g} s") from error
    if child.returncode != 0 or complaint or not said.strip():
        if "idmap refused" in complaint:
            raise IdmapRefused(complaint)
        if os.strerror(errno.ENOSPC) in complaint:
            raise DiskFull(f"no space for a new session: {complaint}; nothing was lost")
        raise KernelError(f"the session could not be started: {complaint or f'launcher ended in {child.returncode}'}")
    return processes.identify(int(said))
