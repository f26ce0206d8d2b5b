"""Podman, by the contract."""

from __future__ import annotations

import pytest
from container_subject import NETWORK, attached, containers_and_images, said

from statefork import Environment
from statefork.testing.contract import BackendContract, Subject


def spoil(environment: Environment, snapshot: str) -> None:
    said("podman", "rmi", "-f", f"statefork-snapshot:{snapshot}")


class TestPodman(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, podman: str, podman_busybox: str) -> Subject:
        return Subject(
            method="podman_build",
            arguments={"base_image": podman_busybox, "extra_args": NETWORK},
            left_behind=containers_and_images("podman"),
            attach=attached("podman", "podman_attach", podman_busybox, base_image=podman_busybox, extra_args=NETWORK),
            spoil=spoil,
        )
