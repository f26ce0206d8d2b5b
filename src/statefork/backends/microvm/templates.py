"""Machines that were booted once and stored, in a cache: an environment begins as a revival of one, not as a boot.

A template is known by all that went into it: the VMM, the kernel, the agent, the size of the machine and the root. Who
uses one holds a shared lock on it, and makes new ones under an exclusive lock; the kernel frees locks of the dead. The
ones that were not used for longest make room for new ones.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from statefork.backends.microvm.agent import PATH, Agent, Output
from statefork.backends.microvm.kernel import cache_directory
from statefork.backends.microvm.roots import BUILDS, Root, make_disk
from statefork.backends.microvm.vmm import Machine, Saved, Spec, Vmm, kill_machine, machine_processes
from statefork.errors import KernelError, SessionDead, WaypointError
from waypoint.build.base import StartState
from waypoint.build.dockerfile import remove_image

__all__ = ["BOOT_TIMEOUT", "Template", "greet", "obtain", "sweep_templates"]

log = logging.getLogger(__name__)

BOOT_TIMEOUT = 180.0
"""An emulated machine boots in three seconds; on a host that has other things to do, it may take a while."""
KEPT = 8
_NOTE = "template.json"
_MADE = 2
"""How templates are made: those of an older way are not used any more."""


def greet(machine: Machine, agent: Agent, timeout: float, keep: int = 0) -> Any:
    """Raises KernelError with what the machine said last, if its agent does not answer."""
    try:
        return agent.greet(timeout, keep)
    except SessionDead as error:
        raise KernelError(f"the machine did not come up: {error.message}\n{machine.last_words()}") from error


@dataclass(frozen=True, slots=True)
class Template:
    saved: Saved
    start: StartState
    lock: int

    def release(self) -> None:
        os.close(self.lock)


def obtain(vmm: Vmm, spec: Spec, root: Root, disk_mib: int, tools: Mapping[str, str]) -> Template:
    """The template for this machine and root, made if there is none. `tools` are what the VMM itself is."""
    facts = {"spec": {**spec.row(), "counter_khz": 0}, "root": root.key, "disk_mib": disk_mib, "tools": dict(tools), "made": _MADE}
    key = f"{vmm.name}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]}"
    cache = cache_directory() / "templates"
    cache.mkdir(parents=True, exist_ok=True)
    directory = cache / key
    while True:
        lock = _locked(cache / f"{key}.lock", fcntl.LOCK_SH)
        try:
            if (directory / _NOTE).exists():
                os.utime(lock)
                return _load(directory, lock)
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        lock = _locked(cache / f"{key}.lock", fcntl.LOCK_EX)
        try:
            if not (directory / _NOTE).exists():
                _make(vmm, spec, root, disk_mib, directory)
        finally:
            os.close(lock)
        _make_room(cache, key)


def _make(vmm: Vmm, spec: Spec, root: Root, disk_mib: int, directory: Path) -> None:
    staging = directory.with_name(f".staging-{directory.name}")
    _clear(vmm.program, staging)
    shutil.rmtree(directory, ignore_errors=True)
    staging.mkdir()
    try:
        with root.layers() as (layers, start):
            make_disk(layers, staging / "root.img", disk_mib)
        machine_directory = staging / "machine"
        machine_directory.mkdir()
        machine = vmm.boot(spec, [staging / "root.img"], machine_directory)
        try:
            agent = Agent(machine.connect(BOOT_TIMEOUT))
            try:
                greet(machine, agent, BOOT_TIMEOUT)
                _warm_up(agent, start.workdir)
                saved = machine.save(staging, memory=True)
            finally:
                agent.close()
        finally:
            machine.end()
        shutil.rmtree(machine_directory)
        row = {"saved": _row(_moved(saved, staging, directory)), "start": asdict(start), "image": root.image}
        (staging / _NOTE).write_text(json.dumps(row))
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _warm_up(agent: Agent, workdir: str) -> None:
    """Have the shell read from the disk once: every machine made from the template then has it in its memory.

    A Dockerfile's WORKDIR need not be in the image; where the shell begins there has to be a directory.
    """
    script = 'mkdir -p -- "$1"; command -v bash >/dev/null && exec bash -c :'
    program = agent.start(["sh", "-c", script, "sh", workdir], {"PATH": PATH}, "root", "/")
    program.end_stdin()
    while isinstance(program.next(time.monotonic() + BOOT_TIMEOUT), Output):
        pass


def _moved(saved: Saved, old: Path, new: Path) -> Saved:
    def move(path: Path) -> Path:
        return new / path.relative_to(old)

    state = {name: str(move(Path(value))) for name, value in saved.state.items()}
    return replace(
        saved, disks=tuple(map(move, saved.disks)), memory=move(saved.memory) if saved.memory else None, state=state
    )


def _row(saved: Saved) -> dict[str, Any]:
    return {
        "spec": saved.spec.row(),
        "disks": [str(path) for path in saved.disks],
        "memory": str(saved.memory),
        "state": dict(saved.state),
    }


def _load(directory: Path, lock: int) -> Template:
    row = json.loads((directory / _NOTE).read_text())
    kept, start = row["saved"], row["start"]
    saved = Saved(
        spec=Spec.of(kept["spec"]),
        disks=tuple(map(Path, kept["disks"])),
        memory=Path(kept["memory"]),
        state=kept["state"],
        files_bytes=0,
        memory_bytes=0,
        paused_ms=0.0,
    )
    env = tuple((name, value) for name, value in start["env"])
    return Template(saved, StartState(env, start["workdir"], start["user"], tuple(start["argv"])), lock)


def _locked(path: Path, kind: int) -> int:
    """A descriptor that holds the lock; a lock file that was removed meanwhile is no lock."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, kind)
            if path.exists() and os.fstat(lock).st_ino == path.stat().st_ino:
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _make_room(cache: Path, newest: str) -> None:
    locks = sorted(cache.glob("*.lock"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [path for path in locks if path.stem != newest][KEPT - 1 :]:
        try:
            lock = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        try:
            _remove(cache / path.stem)
            path.unlink()
        finally:
            os.close(lock)


def _remove(directory: Path) -> None:
    try:
        image = json.loads((directory / _NOTE).read_text()).get("image")
        if image:
            remove_image(cache_directory() / BUILDS, image)
    except (OSError, ValueError, WaypointError) as error:
        log.info("template %s: its image could not be removed: %s", directory.name, error)
    shutil.rmtree(directory, ignore_errors=True)


def _clear(program: str, staging: Path) -> None:
    for pid, _ in machine_processes(program, staging):
        kill_machine(pid)
    shutil.rmtree(staging, ignore_errors=True)


def sweep_templates(vmm: str, program: str) -> Iterator[str]:
    """What a process left that died while it made a template."""
    cache = cache_directory() / "templates"
    for staging in cache.glob(f".staging-{vmm}-*"):
        key = staging.name.removeprefix(".staging-")
        try:
            lock = _locked(cache / f"{key}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        try:
            _clear(program, staging)
            yield f"{vmm} template {key}"
        finally:
            os.close(lock)
