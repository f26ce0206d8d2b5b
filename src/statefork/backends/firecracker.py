"""Firecracker microVMs: the whole machine comes back. Needs a usable KVM.

Written against Firecracker's public API, and not yet run with a real Firecracker (docs/decisions/microvm.md): the probe
boots, stores and revives a machine before anything is promised, and says what failed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from statefork.backends.microvm.driver import CAPABLE, MicroVmDriver, Options, trial
from statefork.backends.microvm.fc_machine import PROGRAM, Firecracker
from statefork.backends.microvm.kernel import elf_image, find_kernel
from statefork.backends.microvm.vmm import Spec
from statefork.backends.option_values import choice
from statefork.backends.probe_cache import remembered
from statefork.errors import HostUnsupported, WaypointError
from statefork.model import Capabilities
from statefork.registry import Argument, Backend, Method, directory, number, path
from waypoint.kernel.programs import run_program

__all__ = ["BACKEND", "FirecrackerDriver"]

INSTALL = "get `firecracker` from https://github.com/firecracker-microvm/firecracker/releases and put it into the PATH"
_KVM = "use a host whose /dev/kvm this user may write to"


class FirecrackerDriver(MicroVmDriver):
    name = "firecracker"
    vmm = Firecracker()

    def spec(self, accelerator: str) -> Spec:
        kernel = find_kernel(self.options.kernel)
        return replace(super().spec(accelerator), kernel=elf_image(kernel))

    def identity(self) -> Mapping[str, str]:
        program = Path(shutil.which(PROGRAM) or PROGRAM)
        facts = program.stat()
        return {"firecracker": f"{program} {facts.st_size} {facts.st_mtime_ns}"}

    def found(self) -> Capabilities:
        if shutil.which(PROGRAM) is None:
            raise HostUnsupported(f"firecracker is not installed: {INSTALL}", fix=INSTALL)
        if not os.access("/dev/kvm", os.R_OK | os.W_OK):
            raise HostUnsupported(f"Firecracker needs KVM: {_KVM}", fix=_KVM)
        kernel = find_kernel(self.options.kernel)
        return remembered(
            f"firecracker-{kernel.version}", [PROGRAM, str(kernel.image)], lambda: self._try(kernel.version)
        )

    def _try(self, kernel: str) -> Capabilities:
        try:
            trial(self.vmm, self.spec("kvm"))
        except HostUnsupported:
            raise
        except WaypointError as error:
            raise HostUnsupported(
                f"Firecracker cannot boot, store and bring back a machine on this host: {error.message}", fix=_KVM
            ) from error
        said = run_program([PROGRAM, "--version"], timeout=30).check("firecracker --version").text
        return Capabilities(
            backend=self.name,
            restores=CAPABLE,
            pause_releases_memory=True,
            snapshot_during_exec=False,
            versions={"firecracker": said.split()[1].lstrip("v"), "kernel": kernel, "accelerator": "kvm"},
        )


def _build(**options: Any) -> FirecrackerDriver:
    return FirecrackerDriver(Options(**options))


ARGUMENTS = (
    Argument("dockerfile_dir", directory, "a directory with a Dockerfile, built first"),
    Argument("rootfs", path, "a directory or an archive with a root file system"),
    Argument("kernel", path, "a kernel image (vmlinux, or a packed one)"),
    Argument("memory_mib", number, "memory of a machine; default 256"),
    Argument("vcpus", number, "processors of a machine; default 1"),
    Argument("disk_mib", number, "size of the root disk, of which only what is used takes space; default 4096"),
    Argument("network", choice("none", "tap"), "none (default), or tap: outbound connections, needs root"),
)

BACKEND = Backend(
    name="firecracker",
    summary="the whole machine",
    driver=FirecrackerDriver,
    probe=lambda: FirecrackerDriver(Options()).probe(),
    methods=(
        Method("firecracker_build", _build, ARGUMENTS, required=(("dockerfile_dir", "rootfs"), ("kernel",))),
        Method(
            "firecracker_attach",
            _build,
            (Argument("vm_id", path, "the directory that a machine was booted in (docs/backends.md)"),),
            required=(("vm_id",),),
            attach=True,
        ),
    ),
)
