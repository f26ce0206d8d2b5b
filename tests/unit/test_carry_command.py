"""Init's file for commands is there before the first command of a restored session, and nothing else gets out of a layer that way."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from waypoint.guest.layer import PRIVATE, carry_command


@pytest.fixture
def layers(tmp_path: Path) -> tuple[Path, Path]:
    below, upper = tmp_path / "below", tmp_path / "upper"
    (below / PRIVATE / "run").mkdir(parents=True)
    (upper / PRIVATE).mkdir(parents=True)
    return below, upper


def command(layer: Path) -> Path:
    return layer / PRIVATE / "run" / "c"


def test_as_it_was(layers: tuple[Path, Path]) -> None:
    below, upper = layers
    command(below).write_text("echo ä")
    command(below).chmod(0o600)
    os.chown(command(below), 1234, 70_000)
    carry_command(below, upper)
    found = command(upper).stat()
    assert command(upper).read_text() == "echo ä"
    assert (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (0o600, 1234, 70_000)
    assert (upper / PRIVATE / "run").stat().st_mode & 0o7777 == 0o711
    assert [path.name for path in (upper / PRIVATE / "run").iterdir()] == ["c"]


def through_a_link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def below_a_link(path: Path, secret: Path) -> None:
    path.parent.rmdir()
    path.parent.symlink_to(secret.parent)


def a_fifo(path: Path, secret: Path) -> None:
    os.mkfifo(path, 0o600)


def a_directory(path: Path, secret: Path) -> None:
    path.mkdir(0o600)


def big(path: Path, secret: Path) -> None:
    path.touch(0o600)
    os.truncate(path, 1 << 40)


def open_to_all(path: Path, secret: Path) -> None:
    path.write_text("x")
    path.chmod(0o4755)


def nothing(path: Path, secret: Path) -> None:
    pass


@pytest.mark.parametrize("make", [through_a_link, below_a_link, a_fifo, a_directory, big, open_to_all, nothing])
def test_what_is_not_inits_own_is_left_alone(
    layers: tuple[Path, Path], tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    below, upper = layers
    secret = tmp_path / "host" / "c"
    secret.parent.mkdir()
    secret.write_text("secret")
    secret.chmod(0o600)
    make(command(below), secret)
    carry_command(below, upper)
    assert not list((upper / PRIVATE).iterdir())
