"""Probes of what a session may be asked for beyond the default: limits, NAT, a Dockerfile. None is required."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel import cgroups, probe_calls
from waypoint.kernel.nat_probe import probe_nat
from waypoint.kernel.probes import Probe
from waypoint.kernel.programs import run_program
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
    probe_nat()
    return "a packet from behind the host got out, and its answer back"


# -- building ---------------------------------------------------------------------------------------------------------


def _buildah(where: Path) -> str:
    """Make a container in a storage of its own, put a program in, and run it as a Dockerfile's RUN line would be."""
    if shutil.which("buildah") is None:
        raise HostUnsupported("buildah is not installed", fix=_BUILDAH)
    # Its lock files go to /run and its cache to /var/lib/containers: both are ours alone in this mount namespace.
    for private in ("/run", "/var/lib/containers", "/var/tmp"):
        if Path(private).is_dir() and not where.is_relative_to(private):
            probe_calls.mount("tmpfs", private, "tmpfs", 0)
    storage = ["--root", str(where / "root"), "--runroot", str(where / "runroot"), "--storage-driver", "overlay"]
    base = ["buildah", *storage]
    name = run_program([*base, "from", "scratch"], timeout=60).check("buildah from scratch").text
    mounted = Path(run_program([*base, "mount", name], timeout=60).check("buildah mount").text)
    busybox = Path(shutil.which("busybox") or "/nonexistent")
    if not busybox.exists() or b"/ld-linux" in busybox.read_bytes():
        return "containers can be made; RUN lines were not tried, for want of a static busybox"
    shutil.copy(busybox, mounted / "busybox")
    options = ["--runtime", "runc", "--network", "none"]
    ran = run_program([*base, "run", *options, name, "/busybox", "echo", "ran"], timeout=60)
    if ran.check("buildah run").text != "ran":
        raise KernelError(f"buildah ran a program, which did not answer: {ran.tail()}")
    return "RUN lines can be run, on overlay storage"


_CGROUPS = "mount the controller: see `man 7 cgroups`, or boot with cgroup_enable=memory"
_NFTABLES = "apt-get install --no-install-recommends nftables"
_BUILDAH = "apt-get install --no-install-recommends buildah runc"

PROBES = (
    Probe("cgroup-memory", _memory_limit, _CGROUPS, required=False),
    Probe("cgroup-cpu", _cpu_limit, _CGROUPS, required=False),
    Probe("cgroup-pids", _pids_limit, _CGROUPS, required=False),
    Probe("network-nat", _nat, _NFTABLES, required=False),
    Probe("buildah", _buildah, _BUILDAH, required=False, pid_namespace=True),
)
