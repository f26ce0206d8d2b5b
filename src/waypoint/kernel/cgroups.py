"""Limits through whichever cgroup version the host has; one group per session, named after it, removed with it.

On v1 each controller is a tree of its own; on v2 one group carries all. A session without limits gets no group on v1
and a single one on v2 (for usage), so that the common case costs nothing.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from waypoint.errors import HostUnsupported, KernelError
from waypoint.model import Limits

__all__ = ["freezer_group", "frozen", "groups_for", "list_groups", "make_groups", "remove_groups", "thaw"]

_ROOT = Path("/sys/fs/cgroup")
_PARENT = "waypoint"


@dataclass(frozen=True, slots=True)
class _Host:
    version: int
    controllers: tuple[str, ...]
    """v1: mounted controllers; v2: those that can be delegated to a child of the root."""


@lru_cache(maxsize=1)
def _host() -> _Host:
    if (_ROOT / "cgroup.controllers").exists():
        return _Host(2, tuple((_ROOT / "cgroup.controllers").read_text().split()))
    mounted = [name for name in ("memory", "cpu", "pids", "cpuacct") if (_ROOT / name / "cgroup.procs").exists()]
    return _Host(1, tuple(mounted))


def _needed(limits: Limits) -> list[str]:
    wanted = [("memory", limits.memory_bytes), ("cpu", limits.cpus), ("pids", limits.pids)]
    return [name for name, value in wanted if value is not None]


def groups_for(tag: str, session: str, limits: Limits, *, freezer: bool = False) -> tuple[Path, ...]:
    """The directories that the session's processes belong in. HostUnsupported when a limit cannot be had here."""
    if freezer:
        return (*groups_for(tag, session, limits), freezer_group(tag, session))
    if not limits.any:
        return ()
    host = _host()
    for name in _needed(limits):
        if name not in host.controllers:
            raise HostUnsupported(
                f"a {name} limit needs the {name} cgroup controller, which this host does not offer",
                feature="cgroups",
                fix=f"mount the {name} controller, or leave out the limit",
            )
    leaf = f"{_PARENT}/{tag}-{session}"
    if host.version == 2:
        return (_ROOT / leaf,)
    return tuple(_ROOT / name / leaf for name in _needed(limits))


def freezer_group(tag: str, session: str) -> Path:
    """A group whose processes can be stopped as one: on v2 any group can, on v1 the freezer's own tree."""
    leaf = f"{_PARENT}/{tag}-{session}"
    for root in (_ROOT, _ROOT / "freezer", _ROOT / "unified"):
        if (root / "cgroup.procs").exists():
            return root / leaf
    raise HostUnsupported(
        "stopping a session's processes needs a cgroup freezer, which this host does not offer",
        feature="cgroups",
        fix="mount -t cgroup2 none /sys/fs/cgroup",
    )


@contextlib.contextmanager
def frozen(group: Path, timeout: float = 10) -> Iterator[None]:
    """Every process in the group stands still inside; they go on even if this very process is killed meanwhile.

    A frozen group stays frozen whoever dies, so a child waits for the end of a pipe that only we hold, and thaws it then.
    """
    two = (group / "cgroup.freeze").exists()
    control, go, stop = (group / "cgroup.freeze", "0", "1") if two else (group / "freezer.state", "THAWED", "FROZEN")
    guard = subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; echo "$1" > "$2"', "thaw", go, str(control)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        start_new_session=True,
    )
    try:
        control.write_text(stop)
        deadline = time.monotonic() + timeout
        while not _frozen(group, two):
            if time.monotonic() > deadline:
                raise KernelError(f"the processes in {group} could not be stopped within {timeout:g} s; they run on")
            time.sleep(0.001)
        yield
    finally:
        control.write_text(go)
        guard.communicate()


def _frozen(group: Path, two: bool) -> bool:
    if two:
        return "frozen 1" in (group / "cgroup.events").read_text()
    return (group / "freezer.state").read_text().strip() == "FROZEN"


def thaw(group: Path) -> bool:
    """Let a group go on that was left frozen; whether it was."""
    for name, stop, go in (("cgroup.freeze", "1", "0"), ("freezer.state", "FROZEN", "THAWED")):
        control = group / name
        if control.exists() and control.read_text().strip() in (stop, "FREEZING"):
            control.write_text(go)
            return True
    return False


def make_groups(tag: str, session: str, limits: Limits, *, freezer: bool = False) -> tuple[Path, ...]:
    groups = groups_for(tag, session, limits, freezer=freezer)
    try:
        if limits.any and _host().version == 2:
            _delegate(_needed(limits))
        for group in groups:
            group.mkdir(parents=True, exist_ok=True)
            _apply(group, limits)
    except OSError as error:
        remove_groups(groups)
        raise KernelError(f"session {session}: cannot set limits in {error.filename}: {error.strerror}") from error
    return groups


def _delegate(names: list[str]) -> None:
    text = " ".join(f"+{name}" for name in names)
    (_ROOT / "cgroup.subtree_control").write_text(text)
    (_ROOT / _PARENT).mkdir(exist_ok=True)
    (_ROOT / _PARENT / "cgroup.subtree_control").write_text(text)


def _apply(group: Path, limits: Limits) -> None:
    two = _host().version == 2
    controller = "" if two else group.relative_to(_ROOT).parts[0]
    if controller in ("freezer", "unified"):
        return
    if limits.memory_bytes is not None and controller in ("", "memory"):
        (group / ("memory.max" if two else "memory.limit_in_bytes")).write_text(str(limits.memory_bytes))
        with contextlib.suppress(OSError):  # no swap accounting: then there is no swap to limit either
            if two:
                (group / "memory.swap.max").write_text("0")
            else:
                (group / "memory.memsw.limit_in_bytes").write_text(str(limits.memory_bytes))
    if limits.cpus is not None and controller in ("", "cpu"):
        quota = max(1000, int(limits.cpus * 100_000))
        if two:
            (group / "cpu.max").write_text(f"{quota} 100000")
        else:
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text(str(quota))
    if limits.pids is not None and controller in ("", "pids"):
        (group / "pids.max").write_text(str(limits.pids))


def remove_groups(groups: tuple[Path, ...], timeout: float = 5) -> None:
    """Removes empty groups; waits a little for the last process to be gone."""
    deadline = time.monotonic() + timeout
    for group in groups:
        while group.exists():
            try:
                group.rmdir()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise KernelError(f"cgroup {group} is still in use: {error.strerror}") from error
                time.sleep(0.005)
    for parent in {group.parent for group in groups}:
        with contextlib.suppress(OSError):  # another session's group is still in it
            parent.rmdir()


def list_groups(tag: str) -> list[tuple[str, Path]]:
    """(session, directory) of every group that a store made."""
    host = _host()
    roots = [_ROOT] if host.version == 2 else [_ROOT / name for name in (*host.controllers, "freezer", "unified")]
    found = []
    for root in roots:
        for group in (root / _PARENT).glob(f"{tag}-*"):
            found.append((group.name.removeprefix(f"{tag}-"), group))
    return found
