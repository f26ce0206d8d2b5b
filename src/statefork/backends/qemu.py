"""QEMU microVMs: the whole machine comes back. Works with KVM, and without it (slower, as everything is emulated)."""

from __future__ import annotations

import functools
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from statefork.backends.microvm.agent import Agent
from statefork.backends.microvm.driver import CAPABLE, MicroVmDriver, Options, trial
from statefork.backends.microvm.kernel import counter_khz, find_kernel
from statefork.backends.microvm.qemu_machine import PROGRAM, Qemu
from statefork.backends.microvm.roots import make_disk, root_of
from statefork.backends.microvm.templates import BOOT_TIMEOUT, greet
from statefork.backends.microvm.vmm import Spec, kill_machine, machine_processes
from statefork.backends.option_values import choice
from statefork.backends.probe_cache import remembered
from statefork.errors import HostUnsupported, NotFound, WaypointError
from statefork.model import Capabilities
from statefork.registry import Argument, Backend, Method, directory, number, path
from waypoint.kernel.programs import run_program

__all__ = ["BACKEND", "QemuDriver", "boot_machine", "end_machine"]

INSTALL = "apt-get install qemu-system-x86 qemu-utils e2fsprogs gcc libc6-dev"
_TOOLS = ("qemu-system-x86_64", "qemu-img", "mke2fs")


class QemuDriver(MicroVmDriver):
    name = "qemu"
    vmm = Qemu()

    def spec(self, accelerator: str) -> Spec:
        plain = super().spec(accelerator)
        khz = _counter_khz() if accelerator == "tcg" else 0
        return replace(plain, counter_khz=khz)

    def identity(self) -> Mapping[str, str]:
        program = Path(shutil.which(_TOOLS[0]) or _TOOLS[0])
        facts = program.stat()
        return {"qemu": f"{program} {facts.st_size} {facts.st_mtime_ns}", "cpu": _processor()}

    def found(self) -> Capabilities:
        if platform.machine() != "x86_64":
            raise HostUnsupported(f"QEMU's microvm machine is of x86-64, and this host is {platform.machine()}")
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            raise HostUnsupported(f"{', '.join(missing)} not installed: {INSTALL}", fix=INSTALL)
        kernel = find_kernel(self.options.kernel)
        return remembered(f"qemu-{kernel.version}", [*_TOOLS, str(kernel.image)], lambda: self._try(kernel.version))

    def _try(self, kernel: str) -> Capabilities:
        """KVM if it works on this host, from a boot to a revival; otherwise the emulator."""
        refusals = {}
        for accelerator in ("kvm", "tcg") if os.access("/dev/kvm", os.R_OK | os.W_OK) else ("tcg",):
            try:
                trial(self.vmm, self.spec(accelerator))
            except HostUnsupported:
                raise
            except WaypointError as error:
                refusals[accelerator] = error.message
                continue
            return Capabilities(
                backend=self.name,
                restores=CAPABLE,
                pause_releases_memory=True,
                snapshot_during_exec=True,
                versions={"qemu": _version(), "kernel": kernel, "accelerator": accelerator},
            )
        said = "; ".join(f"{accelerator}: {words}" for accelerator, words in refusals.items())
        raise HostUnsupported(f"QEMU cannot boot, store and bring back a machine on this host: {said}", fix=INSTALL)


def boot_machine(directory: Path, **options: Any) -> Path:
    """Boot a machine that belongs to nobody, in an empty directory, for `qemu_attach`; options as for `qemu_build`.

    It runs until `end_machine`, or until it is shut down from inside.
    """
    driver = QemuDriver(Options(**options))
    accelerator = driver.probe().versions["accelerator"]
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    with root_of(driver.options.dockerfile_dir, driver.options.rootfs).layers() as (layers, _):
        make_disk(layers, directory / "root.img", driver.options.disk_mib)
    machine = driver.vmm.boot(driver.spec(accelerator), [directory / "root.img"], directory)
    try:
        agent = Agent(machine.connect(BOOT_TIMEOUT))
        try:
            greet(machine, agent, BOOT_TIMEOUT)
        finally:
            agent.close()
    except BaseException:
        machine.end()
        raise
    machine.release()
    return directory


def end_machine(directory: Path) -> None:
    """End a machine of `boot_machine`, at once; its files stay. NotFound if none runs there."""
    for pid, name in machine_processes(PROGRAM, directory.absolute().parent):
        if name == directory.name:
            kill_machine(pid)
            return
    raise NotFound(f"no machine of QEMU runs in {directory}")


@functools.cache
def _counter_khz() -> int:
    return counter_khz()


@functools.cache
def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith("model name")), "")


def _version() -> str:
    said = run_program([_TOOLS[0], "--version"], timeout=30).check("qemu --version").text
    return said.split("version ", 1)[-1].split()[0]


def _build(**options: Any) -> QemuDriver:
    return QemuDriver(Options(**options))


ARGUMENTS = (
    Argument("dockerfile_dir", directory, "a directory with a Dockerfile, built first"),
    Argument("rootfs", path, "a directory or an archive with a root file system"),
    Argument("kernel", path, "a kernel image; default: the newest that was fetched"),
    Argument("memory_mib", number, "memory of a machine; default 256"),
    Argument("vcpus", number, "processors of a machine; default 1"),
    Argument("disk_mib", number, "size of the root disk, of which only what is used takes space; default 4096"),
    Argument("network", choice("none", "user"), "none (default), or user: outbound connections through QEMU"),
)

BACKEND = Backend(
    name="qemu",
    summary="the whole machine",
    driver=QemuDriver,
    probe=lambda: QemuDriver(Options()).probe(),
    methods=(
        Method("qemu_build", _build, ARGUMENTS, required=(("dockerfile_dir", "rootfs"),)),
        Method(
            "qemu_attach",
            _build,
            (Argument("vm_id", path, "the directory that a machine was booted in (docs/backends.md)"),),
            required=(("vm_id",),),
            attach=True,
        ),
    ),
)
