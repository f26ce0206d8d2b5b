"""QEMU microVMs, by the contract; and what only a whole machine has. Every environment begins as a copy of one boot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rootfs import busybox_rootfs
from statefork import Environment, create_env_manager
from statefork.backends.microvm.kernel import fetch_kernel
from statefork.backends.microvm.vmm import machine_processes
from statefork.backends.qemu import boot_machine, end_machine
from statefork.testing.contract import BackendContract, Subject

PROGRAM = "qemu-system-x86_64"


def machines(home: Path) -> list[str]:
    return [f"machine in {tree}, process {pid}" for pid, tree in machine_processes(PROGRAM, home / "trees")]


def spoil(environment: Environment, snapshot: str) -> None:
    for file in environment._family._grounds.home.glob(f"trees/*/{snapshot}/devices"):
        file.write_bytes(b"damaged" + file.read_bytes()[7:])


def programs_in(environment: Environment) -> int:
    """Kernel threads have no executable."""
    return len(environment.run(["sh", "-c", "ls -l /proc/[0-9]*/exe 2>/dev/null"]).stdout.split("->"))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel is fetched if no other test run has."""
    fetch_kernel(print)
    return busybox_rootfs(tmp_path_factory.mktemp("machine") / "root")


@pytest.fixture(scope="session")
def users_own(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A machine that was booted by hand."""
    directory = boot_machine(tmp_path_factory.mktemp("users-own"), rootfs=small, memory_mib=96, disk_mib=64)
    yield directory
    end_machine(directory)


class TestQemu(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, small: Path, users_own: Path) -> Subject:
        @contextmanager
        def attach(home: Path) -> Iterator[Environment]:
            before = (users_own / "machine.json").read_text()
            with create_env_manager("qemu_attach", home=home, vm_id=users_own) as environment:
                programs = programs_in(environment)
                yield environment
            assert (users_own / "machine.json").read_text() == before
            with create_env_manager("qemu_attach", home=home, vm_id=users_own) as environment:
                assert "statefork" not in environment.exec_command("ls -a / /tmp").stdout
                assert programs_in(environment) == programs

        return Subject(
            "qemu_build", {"rootfs": small, "memory_mib": 96, "disk_mib": 64}, machines, attach=attach, spoil=spoil
        )
