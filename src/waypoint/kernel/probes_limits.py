"""Probes of what a session may be asked for beyond the default: limits, NAT, a Dockerfile. None is required."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from waypoint.errors import KernelError
from waypoint.kernel import cgroups, probe_calls
from waypoint.kernel.buildah import FIX, Storage
from waypoint.kernel.buildah_probe import isolation_of
from waypoint.kernel.nat_probe import probe_nat
from waypoint.kernel.probes import Probe
from waypoint.model import Limits

__all__ = ["PROBES"]


# -- cgroups ----------------------------------------------------------------------------------------------------------


@contextmanager
def _limited(limits: Limits) -> Iterator[tuple[Path, ...]]:
    """Groups of the engine's own making, and never of a name that a store could use."""
    groups = cgroups.make_groups("probe", str(os.getpid()), limits)
    try:
        yield groups
    finally:
        cgroups.remove_groups(groups)


def _life_in(groups: tuple[Path, ...], life: Callable[[], int]) -> int:
    """The wait status of a child that joined the groups and then ran `life`."""
    child = os.fork()
    if child == 0:
        try:
            probe_calls.die_with_parent()
            for group in groups:
                (group / "cgroup.procs").write_text(str(os.getpid()))
            os._exit(life())
        finally:
            os._exit(99)
    return os.waitpid(child, 0)[1]


def _memory_limit(_: Path) -> str:
    """Twice the limit is touched; the kernel must kill."""

    def life() -> int:
        size_bytes = 64 << 20
        return 0 if len(bytearray(b"x") * size_bytes) == size_bytes else 1

    with _limited(Limits(memory_bytes=32 << 20)) as groups:
        status = _life_in(groups, life)
    if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
        raise KernelError("a process that took twice its memory limit was not killed")
    return "--memory is enforced"


def _cpu_limit(_: Path) -> str:
    """A fifth of a CPU: a short spin must be throttled."""

    def life() -> int:
        spin_until = time.process_time() + 0.04
        while time.process_time() < spin_until:
            pass
        return 0

    with _limited(Limits(cpus=0.2)) as groups:
        status = _life_in(groups, life)
        said = dict(line.split() for line in (groups[0] / "cpu.stat").read_text().splitlines())
    if status != 0 or int(said.get("nr_throttled", "0")) == 0:
        raise KernelError("a process that spun beyond its cpu limit was not throttled")
    return "--cpus is enforced"


def _pids_limit(_: Path) -> str:
    def life() -> int:
        children = []
        try:
            for _ in range(8):
                child = os.fork()
                if child == 0:
                    signal.pause()
                children.append(child)
        except BlockingIOError:
            return 42
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        return 0

    with _limited(Limits(pids=4)) as groups:
        status = _life_in(groups, life)
    if os.waitstatus_to_exitcode(status) != 42:
        raise KernelError("a process could start 8 others under a limit of 4")
    return "--pids is enforced"


# -- network ----------------------------------------------------------------------------------------------------------


def _nat(_: Path) -> str:
    logging.getLogger("waypoint.kernel.nat_host").setLevel(logging.ERROR)  # in this child: forwarding is off again at once
    probe_nat()
    return "a packet from behind the host got out, and its answer back"


# -- building ---------------------------------------------------------------------------------------------------------


def _buildah(where: Path) -> str:
    """Build a Dockerfile with a RUN line, in a storage that is thrown away."""
    storage = Storage(where / "builder")
    storage.create()
    isolation = isolation_of(storage)
    return f"a Dockerfile's RUN lines work, isolated by {isolation.runtime or isolation.kind}"


_CGROUPS = "mount the controller: see `man 7 cgroups`, or boot with cgroup_enable=memory"
_NFTABLES = "apt-get install --no-install-recommends nftables"

PROBES = (
    Probe("cgroup-memory", _memory_limit, _CGROUPS, required=False),
    Probe("cgroup-cpu", _cpu_limit, _CGROUPS, required=False),
    Probe("cgroup-pids", _pids_limit, _CGROUPS, required=False),
    Probe("network-nat", _nat, _NFTABLES, required=False),
    Probe("buildah", _buildah, FIX, required=False, pid_namespace=True),
)
