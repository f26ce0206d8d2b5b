"""Methods, their arguments, and the errors that say what a method takes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from statefork import create_env_manager
from statefork.errors import UsageError
from statefork.registry import backends, find_method, methods

TABLE = {
    "docker_build": ({"dockerfile_dir", "base_image"}, {"extra_args"}),
    "podman_build": ({"dockerfile_dir", "base_image"}, {"extra_args"}),
    "docker_attach": ({"container_name", "base_image"}, {"extra_args"}),
    "podman_attach": ({"container_name", "base_image"}, {"extra_args"}),
    "criu_build": ({"command"}, {"work_dir"}),
    "criu_attach": ({"target_pid"}, {"work_dir"}),
    "hybrid_build": ({"dockerfile_dir", "base_image", "container_name"}, {"export_dir", "extra_args"}),
    "hybrid_attach": ({"container_name"}, {"export_dir"}),
    "waypoint_attach": ({"session_id"}, {"store"}),
    "ckpt_attach": ({"session_id"}, {"store"}),
    "gvisor_build": ({"dockerfile_dir", "rootfs"}, {"platform"}),
    "gvisor_attach": ({"container_name"}, {"platform", "root"}),
    "qemu_build": ({"dockerfile_dir", "rootfs"}, {"kernel", "memory_mib", "vcpus", "disk_mib", "network"}),
    "qemu_attach": ({"vm_id"}, set()),
    "firecracker_build": ({"dockerfile_dir", "rootfs", "kernel"}, {"memory_mib", "vcpus", "disk_mib", "network"}),
    "firecracker_attach": ({"vm_id"}, set()),
}
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str) -> None:
    method = find_method(name)
    needed = {argument for choice in method.required for argument in choice}
    assert needed == TABLE[name][0]
    assert {argument.name for argument in method.arguments} - needed == TABLE[name][1]
    assert method.attach == name.endswith("_attach")


def test_every_method_and_backend_is_in_the_documents() -> None:
    methods_page, readme = ((ROOT / name).read_text() for name in ("docs/backends.md", "README.md"))
    table = [line for line in methods_page.splitlines() if line.startswith("| `")]
    for backend, method in methods():
        (row,) = [line for line in table if f"`{method.name}`" in line.split("|")[1]]
        assert all(f"`{argument.name}`" in row for argument in method.arguments), row
        assert f"| {backend.name} | {backend.summary} |" in readme


def test_an_unknown_method_lists_all() -> None:
    with pytest.raises(UsageError) as caught:
        create_env_manager("docker_biuld")
    assert all(method.name in caught.value.message for _, method in methods())


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("docker_build", {}, ["needs dockerfile_dir or base_image", "optional: extra_args"]),
        ("docker_build", {"base_image": "a", "image": "b"}, ["does not take image", "dockerfile_dir or base_image"]),
        ("docker_build", {"base_image": "a", "dockerfile_dir": "/"}, ["only one of"]),
        ("docker_build", {"dockerfile_dir": "/surely/not/there"}, ["dockerfile_dir", "not a directory"]),
        ("docker_build", {"base_image": ""}, ["base_image"]),
        ("docker_attach", {"container_name": "a"}, ["needs base_image"]),
        ("hybrid_build", {"base_image": "a"}, ["needs container_name"]),
        ("criu_attach", {"target_pid": "abc"}, ["target_pid", "whole number"]),
        ("criu_attach", {"target_pid": None}, ["needs target_pid"]),
        ("criu_build", {"command": ["ls"]}, ["command"]),
    ],
)
def test_wrong_arguments_say_what_the_method_takes(method: str, arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        create_env_manager(method, **arguments)
    assert all(word in caught.value.message for word in [*words, method, "it takes"])


def test_a_backend_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real distribution on the path, with a real entry point; and one whose module is missing, which is left out."""
    (tmp_path / "their_backend.py").write_text(
        "from statefork.backends.criu import CriuDriver\n"
        "from statefork.registry import Argument, Backend, Method, text\n"
        "BACKEND = Backend('theirs', 'nothing', CriuDriver, lambda: None,\n"
        "                  (Method('theirs_build', CriuDriver, (Argument('command', text, ''),), (('command',),)),))\n"
    )
    information = tmp_path / "theirs-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        "[statefork.backends]\ntheirs = their_backend:BACKEND\nbroken = surely_not_there:BACKEND\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    backends.cache_clear()
    try:
        assert backends()["theirs"].summary == "nothing"
        assert "broken" not in backends()
        with pytest.raises(UsageError, match="theirs_build needs command"):
            create_env_manager("theirs_build")
    finally:
        backends.cache_clear()
