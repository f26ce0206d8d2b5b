"""The Driver of both microVM backends: templates, revivals and the probe. What is QEMU's or Firecracker's own is behind `Vmm`."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from statefork.backends.microvm.agent import Agent, Ended, Output
from statefork.backends.microvm.kernel import agent_path, find_kernel, initramfs
from statefork.backends.microvm.live import BROUGHT_BACK, MicroVmLive, Stored
from statefork.backends.microvm.roots import make_disk, root_of
from statefork.backends.microvm.templates import BOOT_TIMEOUT, Template, greet, obtain, sweep_templates
from statefork.backends.microvm.vmm import Machine, Network, Spec, Vmm, kill_machine, machine_processes
from statefork.driver import Captured, Driver, Live, Place
from statefork.errors import KernelError, UsageError
from statefork.model import Capabilities, Capability
from waypoint.build.base import StartState

__all__ = ["MicroVmDriver", "Options", "trial"]

_REVIVE_TIMEOUT = 60.0
_TRIAL_MIB = 96


@dataclass(frozen=True, slots=True)
class Options:
    """How machines are made, or which one is taken."""

    dockerfile_dir: Path | None = None
    rootfs: Path | None = None
    vm_id: Path | None = None
    kernel: Path | None = None
    memory_mib: int = 256
    vcpus: int = 1
    network: Network = "none"
    disk_mib: int = 4096

    def check(self) -> None:
        if not 64 <= self.memory_mib <= 1 << 20:
            raise UsageError(f"memory_mib {self.memory_mib}: at least 64, for less no kernel boots")
        if not 1 <= self.vcpus <= 32:
            raise UsageError(f"vcpus {self.vcpus}: from 1 to 32")
        if not 16 <= self.disk_mib <= 1 << 24:
            raise UsageError(f"disk_mib {self.disk_mib}: at least 16")


class MicroVmDriver(Driver):
    """A subclass says which VMM, and how it is probed."""

    name: ClassVar[str]
    vmm: ClassVar[Vmm]

    def __init__(self, options: Options) -> None:
        options.check()
        self.options = options
        self._template: Template | None = None
        self._lock = threading.Lock()

    @abstractmethod
    def found(self) -> Capabilities:
        """What the probe of this VMM found out; `versions` names the accelerator."""

    @abstractmethod
    def identity(self) -> Mapping[str, str]:
        """What a stored machine depends on: another version of any of these may not take it back."""

    def spec(self, accelerator: str) -> Spec:
        kernel = find_kernel(self.options.kernel)
        return Spec(
            memory_mib=self.options.memory_mib,
            vcpus=self.options.vcpus,
            network=self.options.network,
            kernel=kernel.image,
            initrd=initramfs(kernel, self.vmm.transport),
            accelerator=accelerator,
        )

    # -- the contract -------------------------------------------------------------------------------------------------

    def probe(self) -> Capabilities:
        found = self.found()
        # What was attached to is left as it is, so pausing it cannot mean to end it.
        return replace(found, pause_releases_memory=False) if self.options.vm_id is not None else found

    def start(self, place: Place) -> Live:
        with self._lock:
            if self._template is None:
                root = root_of(self.options.dockerfile_dir, self.options.rootfs)
                spec = self.spec(self.found().versions["accelerator"])
                self._template = obtain(self.vmm, spec, root, self.options.disk_mib, self.identity())
        saved = self._template.saved
        return self._come_up(self.vmm.revive(saved, place.directory), Stored(saved, self._template.start, None))

    def attach(self, place: Place) -> Live:
        assert self.options.vm_id is not None
        machine = self.vmm.attach(self.options.vm_id)
        return self._come_up(machine, None)

    def revive(self, captured: Captured, place: Place) -> Live:
        stored: Stored = captured.handle
        return self._come_up(self.vmm.revive(stored.saved, place.directory), stored)

    def discard(self, captured: Captured) -> None:
        saved = captured.handle.saved
        directory = saved.disks[0].parent
        if (directory / saved.disks[0].name).exists():
            shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        if self._template is not None:
            self._template.release()
            self._template = None

    @classmethod
    def sweep(cls, home: Path, in_use: Callable[[str], bool]) -> Iterable[str]:
        for pid, tree in machine_processes(cls.vmm.program, home / "trees"):
            if not in_use(tree):
                kill_machine(pid)
                yield f"{cls.name} machine, process {pid}"
        yield from sweep_templates(cls.vmm.name, cls.vmm.program)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _come_up(self, machine: Machine, stored: Stored | None) -> Live:
        """Say hello to the agent; the machine is ended (or let go of) if it does not answer."""
        note = stored.shell if stored else None
        start = stored.start if stored else StartState()
        timeout = BOOT_TIMEOUT if stored is None or stored.saved.memory is None else _REVIVE_TIMEOUT
        try:
            agent = Agent(machine.connect(timeout))
            try:
                kept = greet(machine, agent, timeout, note.channel if note else 0)
                return MicroVmLive(machine, agent, start, owned=stored is not None, kept=kept, note=note)
            except BaseException:
                agent.close()
                raise
        except BaseException:
            machine.end()
            raise


def trial(vmm: Vmm, spec: Spec) -> None:
    """Boot a machine that has nothing in it but our agent, store it, bring it back, and ask it something.

    Raises KernelError, or another of our errors, with what went wrong.
    """
    spec = replace(spec, memory_mib=_TRIAL_MIB, vcpus=1, network="none")
    with tempfile.TemporaryDirectory(prefix="statefork-probe-") as scratch, contextlib.ExitStack() as machines:
        places = [Path(scratch, name) for name in ("root", "first", "state", "second")]
        for place in places:
            place.mkdir()
        root, first, state, second = places
        shutil.copy2(agent_path(), root / "answer")
        make_disk([root], Path(scratch, "root.img"), 32)
        machine = vmm.boot(spec, [Path(scratch, "root.img")], first)
        machines.callback(machine.end)
        _ask(machine, BOOT_TIMEOUT)
        again = vmm.revive(machine.save(state, memory=True), second)
        machines.callback(again.end)
        _ask(again, _REVIVE_TIMEOUT)


def _ask(machine: Machine, timeout: float) -> None:
    agent = Agent(machine.connect(timeout))
    try:
        greet(machine, agent, timeout)
        program = agent.start(["/answer", "answer"], {}, "root", "/")
        said = b""
        while isinstance(event := program.next(None), Output):
            said += event.data
        if said != b"here\n" or event != Ended(0):
            raise KernelError(f"the machine came up, but a program in it said {said!r} and ended in {event}")
    finally:
        agent.close()


CAPABLE = frozenset({*BROUGHT_BACK, Capability.SHELL})
