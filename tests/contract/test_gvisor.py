"""gVisor, by the contract; and what only a sandbox has: a kernel of its own, its platforms, what it cannot store."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootfs import bash_rootfs
from statefork import Environment
from statefork.backends.gvisor_install import fetch_runsc
from statefork.backends.gvisor_sandbox import sandbox_processes
from statefork.testing.contract import BackendContract, Subject


def left_behind(home: Path) -> list[str]:
    return [f"process {pid}" for pid in sandbox_processes(home)]


def spoil(environment: Environment, snapshot: str) -> None:
    (image,) = environment._family._grounds.home.glob(f"trees/*/{snapshot}/image/checkpoint.img")
    image.write_bytes(b"damaged")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fetch_runsc(print)
    return bash_rootfs(tmp_path_factory.mktemp("rootfs") / "root")


class TestGvisor(BackendContract):
    @pytest.fixture(scope="class")
    def subject(self, small: Path) -> Subject:
        return Subject("gvisor_build", {"rootfs": small}, left_behind, spoil=spoil)
