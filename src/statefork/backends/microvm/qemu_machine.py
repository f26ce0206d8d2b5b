"""QEMU: machines of its `microvm` kind, stored and brought back by way of its monitor and its address space.

A snapshot is taken while the machine stands still, in three steps that no crash can tear apart: the devices' state
(`xen-save-devices-state`, a few kilobytes), the memory that differs from the file it was mapped from (memory.py), and
the disk, where a new layer goes on top and the old one becomes the snapshot's. A revival maps the same memory file
privately, so forks share what they have not written to, and loads the devices' state as an incoming migration.
docs/decisions/microvm.md says why not `migrate`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from statefork.backends.microvm import memory as pages
from statefork.backends.microvm import qemu_disks
from statefork.backends.microvm.qmp import Monitor
from statefork.backends.microvm.vmm import Machine, Process, Saved, Spec, Vmm, bound_socket, connected_socket
from statefork.errors import Busy, KernelError, NotFound, SessionDead, StoreError

__all__ = ["PROGRAM", "Qemu"]

PROGRAM = "qemu-system-x86_64"
_QMP, _AGENT = "qmp.socket", "agent.socket"
_NOTE, _LOG, _CONSOLE = "machine.json", "qemu.log", "console.log"
_START_TIMEOUT = 60.0
_ATTACH_TIMEOUT = 3.0
_DISK = "disk"

_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
"""QEMU's own filter of system calls."""

_COMMON = "console=ttyS0 quiet loglevel=1 panic=-1 reboot=t edd=off audit=0 lsm= mitigations=off cryptomgr.notests"
_USER_NETWORK = (
    "statefork.address=10.0.2.15 statefork.mask=255.255.255.0 statefork.gateway=10.0.2.2 statefork.resolver=10.0.2.3"
)


def _kernel_line(spec: Spec) -> str:
    """An emulated machine cannot measure its counter against another clock; left alone it takes seconds to fail."""
    words = [_COMMON]
    if spec.accelerator == "tcg":
        words.append(f"tsc_early_khz={spec.counter_khz} tsc=reliable lpj={spec.counter_khz * 4} no_timer_check")
    if spec.network == "user":
        words.append(_USER_NETWORK)
    return " ".join(words)


def _argv(spec: Spec, memory: Path, disk: dict[str, Any], qmp: int, agent: int, *, incoming: bool) -> list[str]:
    machine = "microvm,acpi=on,rtc=on,pcie=off,usb=off,memory-backend=ram,suppress-vmdesc=on,mem-merge=off"
    argv = [
        *(PROGRAM, "-machine", machine, "-accel", spec.accelerator, "-cpu", "max", "-smp", str(spec.vcpus)),
        *("-m", str(spec.memory_mib), "-object"),
        f"memory-backend-file,id=ram,size={spec.memory_mib}M,mem-path={_comma(memory)},share=off",
        # The state of the devices alone comes without this section, and is refused if it is expected.
        *("-global", "migration.send-configuration=off"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-S", "-sandbox", _SANDBOX),
        *("-kernel", str(spec.kernel), "-initrd", str(spec.initrd), "-append", _kernel_line(spec)),
        *("-blockdev", json.dumps(disk), "-device", f"virtio-blk-device,id=root,drive={_DISK}"),
        *("-device", "virtio-serial-device", "-chardev", f"socket,id=agent,fd={agent},server=on,wait=off"),
        *("-device", "virtserialport,chardev=agent,name=statefork.agent"),
        *("-chardev", f"file,id=console,path={_CONSOLE}", "-serial", "chardev:console"),
        *("-chardev", f"socket,id=qmp,fd={qmp},server=on,wait=off", "-mon", "chardev=qmp,mode=control"),
    ]
    if spec.network == "user":
        argv += ["-netdev", "user,id=net", "-device", "virtio-net-device,netdev=net"]
    if incoming:
        argv += ["-incoming", "defer"]
    return argv


def _comma(path: Path) -> str:
    return str(path).replace(",", ",,")


class QemuMachine(Machine):
    """`disks` is the chain as QEMU has it open; `mapped` the file that its memory was mapped from."""

    def __init__(self, spec: Spec, directory: Path, process: Process, disks: list[Path], mapped: Path) -> None:
        self.directory = directory
        self._spec = spec
        self._process = process
        self._disks = disks
        self._mapped = mapped
        self._reference: Path | None = None
        self._owned = True
        self._layer = 0
        self._node = _DISK
        self._lower_nodes: list[str] = []
        self._still = threading.Lock()
        self._monitor: Monitor | None = None
        self._agent: socket.socket | None = None
        self._devices = -1

    # -- coming up ----------------------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls, spec: Spec, below: Sequence[Path], directory: Path, mapped: Path, devices: Path | None = None
    ) -> QemuMachine:
        """A QEMU that stands still; `load` and `go_on` come next."""
        top = directory / "disk-0.qcow2"
        qemu_disks.blank(top, qemu_disks.size_of(below))
        disks = [top, *below]
        with contextlib.ExitStack() as opened:
            descriptors = [opened.enter_context(bound_socket(directory, name)).fileno() for name in (_QMP, _AGENT)]
            argv = _argv(spec, mapped, qemu_disks.node(disks, _DISK), *descriptors, incoming=devices is not None)
            if devices is not None:
                descriptors.append(opened.enter_context(open(devices, "rb")).fileno())
            process = Process.start(argv, directory, directory / _LOG, descriptors)
        machine = cls(spec, directory, process, disks, mapped)
        machine._devices = descriptors[-1]
        with ended_on_failure(machine):
            # Before the machine runs: its port is then held on our side, as it was when its state was stored.
            machine._agent = connected_socket(directory, _AGENT)
            machine._connect_monitor(_START_TIMEOUT)
            machine._write_note()
        return machine

    @classmethod
    def attach(cls, directory: Path) -> QemuMachine:
        try:
            row = json.loads((directory / _NOTE).read_text())
            running = Path(f"/proc/{row['pid']}/cwd").samefile(directory)
        except (OSError, ValueError, KeyError):
            running = False
        if not running:
            raise NotFound(f"no machine of QEMU runs in {directory}; give the directory that one was booted in")
        disks = [Path(path) for path in row["disks"]]
        process = Process(row["pid"], directory / _LOG)
        machine = cls(Spec.of(row["spec"]), directory, process, disks, Path(row["mapped"]))
        machine._owned = False
        with ended_on_failure(machine):
            machine._connect_monitor(_ATTACH_TIMEOUT)
        return machine

    def load(self, differences: Path | None) -> None:
        """Memory first: the devices look into it when they are loaded."""
        if differences is not None:
            pages.read_differences(self._process.pid, self._mapped, differences)
        self._call("migrate-incoming", uri=f"fd:{self._devices}")
        deadline = time.monotonic() + _START_TIMEOUT
        while (status := self._call("query-migrate").get("status")) != "completed":
            if status == "failed" or time.monotonic() > deadline:
                raise StoreError(f"QEMU does not take the stored state back ({status}): {self._process.said()}")
            time.sleep(0.001)
        self._reference = self._mapped

    def go_on(self) -> None:
        self._call("cont")

    def stand_still(self) -> None:
        self._call("stop")

    def _connect_monitor(self, timeout: float) -> None:
        """QEMU takes one client at a time: a second one is let in, but never answered."""
        try:
            self._monitor = Monitor(connected_socket(self.directory, _QMP), f"machine {self.directory.name}", timeout)
        except TimeoutError as error:
            raise Busy(f"machine {self.directory.name} is in use by another client, or hangs") from error
        except (OSError, SessionDead) as error:
            raise KernelError(f"QEMU did not come up: {self._process.said() or error}") from error

    def connect(self, timeout: float) -> socket.socket:
        held, self._agent = self._agent, None
        if held is not None:
            return held
        try:
            return connected_socket(self.directory, _AGENT)
        except OSError as error:
            raise SessionDead(f"machine {self.directory.name}: {error.strerror}") from error

    # -- storing ------------------------------------------------------------------------------------------------------

    def save(self, into: Path, *, memory: bool) -> Saved:
        with self._still:
            began = time.perf_counter()
            self._call("stop")
            try:
                state = self._save_memory(into) if memory else {}
                disks, files_bytes = self._save_disk(into) if self._owned else self._copy_disk(into)
            finally:
                self._call("cont")
            paused_ms = (time.perf_counter() - began) * 1000
        base = Path(state["base"]) if memory else None
        memory_bytes = sum(pages.stored_bytes(Path(path)) for path in into.glob("memory*"))
        if base is not None and base.parent == into:
            self._reference = base
        return Saved(self._spec, disks, base, state, files_bytes, memory_bytes, paused_ms)

    def _save_memory(self, into: Path) -> dict[str, str]:
        devices = into / "devices"
        self._call("xen-save-devices-state", filename=str(devices), live=False)
        reference = self._reference
        if reference is not None and reference.exists():
            differences = into / "memory.pages"
            pages.save_differences(self._process.pid, self._mapped, reference, differences)
            return {"devices": str(devices), "base": str(reference), "differences": str(differences)}
        whole = into / "memory"
        pages.save_whole(self._process.pid, self._mapped, whole, self._spec.memory_bytes)
        return {"devices": str(devices), "base": str(whole)}

    def _save_disk(self, into: Path) -> tuple[tuple[Path, ...], int]:
        """The top layer becomes the snapshot's, under a name there; QEMU opens it again by the old one, read-only."""
        old, kept = self._disks[0], into / "disk.qcow2"
        deep = len(self._disks) > qemu_disks.DEEPEST
        if deep:
            qemu_disks.flatten(self._disks, kept)
        else:
            os.link(old, kept)
        below = [kept] if deep else [kept, *self._disks[1:]]
        self._layer += 1
        top = self.directory / f"disk-{self._layer}.qcow2"
        name = f"{_DISK}-{self._layer}"
        try:
            qemu_disks.blank(top, qemu_disks.size_of(below))
            self._call("blockdev-add", **{**qemu_disks.node([top], name), "backing": None})
            self._call("blockdev-snapshot", node=self._node, overlay=name)
        except BaseException:
            top.unlink(missing_ok=True)
            kept.unlink(missing_ok=True)
            raise
        self._lower_nodes.insert(0, self._node)
        self._node, self._disks = name, [top, *below]
        if deep:
            self._exchange_lower(top, name, kept)
        old.unlink()
        self._write_note()
        return tuple(below), pages.stored_bytes(kept)

    def _exchange_lower(self, top: Path, name: str, flat: Path) -> None:
        """Have QEMU read from the flat copy, and close the many layers that it was made from."""
        lower = f"{name}-flat"
        self._call("blockdev-add", **qemu_disks.node([flat], lower, read_only=True))
        self._call("blockdev-reopen", options=[{**qemu_disks.node([top], name), "backing": lower}])
        for node in self._lower_nodes:  # top-most first: one that another lies upon cannot be closed
            self._call("blockdev-del", **{"node-name": node})
        self._lower_nodes = [lower]

    def _copy_disk(self, into: Path) -> tuple[tuple[Path, ...], int]:
        """Of a machine that belongs to somebody else: its files are left as they are."""
        kept = into / "disk.qcow2"
        qemu_disks.flatten(self._disks, kept)
        return (kept,), pages.stored_bytes(kept)

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        if self._agent is not None:
            self._agent.close()
        if self._owned:
            self._process.kill()
        self._process.close()

    def release(self) -> None:
        """Let it run on without us."""
        self._owned = False
        self.end()

    def last_words(self) -> str:
        said = self._process.said()
        with contextlib.suppress(OSError):
            said += "\n" + (self.directory / _CONSOLE).read_bytes()[-1000:].decode(errors="replace")
        return said.strip()

    def _call(self, command: str, **arguments: Any) -> Any:
        assert self._monitor is not None
        return self._monitor.call(command, **arguments)

    def _write_note(self) -> None:
        """For whoever attaches."""
        row = {
            "spec": self._spec.row(),
            "pid": self._process.pid,
            "disks": [str(path) for path in self._disks],
            "mapped": str(self._mapped),
        }
        (self.directory / _NOTE).write_text(json.dumps(row))


class Qemu(Vmm):
    name = "qemu"
    program = PROGRAM
    transport = "serial"

    def boot(self, spec: Spec, disks: Sequence[Path], directory: Path) -> QemuMachine:
        mapped = directory / "ram"
        with open(mapped, "wb") as file:
            file.truncate(spec.memory_bytes)
        machine = QemuMachine.start(spec, disks, directory, mapped)
        with ended_on_failure(machine):
            machine.go_on()
        return machine

    def revive(self, saved: Saved, directory: Path) -> QemuMachine:
        if saved.memory is None:
            return self.boot(saved.spec, saved.disks, directory)
        missing = [path for path in (saved.memory, *saved.disks) if not path.exists()]
        if missing:
            raise StoreError(f"the stored state is damaged: {missing[0]} is missing")
        devices, differences = Path(saved.state["devices"]), saved.state.get("differences")
        machine = QemuMachine.start(saved.spec, saved.disks, directory, saved.memory, devices)
        with ended_on_failure(machine):
            try:
                machine.load(Path(differences) if differences else None)
                machine.go_on()
            except SessionDead as error:
                said = machine.last_words() or error.message
                raise StoreError(f"QEMU does not take the stored state back: {said}") from error
        return machine

    def attach(self, directory: Path) -> QemuMachine:
        return QemuMachine.attach(directory)


@contextlib.contextmanager
def ended_on_failure(machine: QemuMachine) -> Iterator[None]:
    try:
        yield
    except BaseException:
        machine.end()
        raise
