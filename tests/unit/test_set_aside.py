"""Room for a file is taken at once where its file system can do that; where it cannot, the file is written as ever."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from waypoint.kernel.syscalls import set_aside

MIB = 1 << 20


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    place = tmp_path / "disk"
    place.mkdir()

    def mount(*arguments: str) -> Path:
        subprocess.run(["mount", *arguments, "none", str(place)], check=True)
        return place

    yield mount
    subprocess.run(["umount", str(place)], check=True)


def asked(path: Path, size: int) -> int:
    """Its allocated bytes afterwards."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        set_aside(fd, size)
        return os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)


def test_it_is_there_before_anything_is_written(mounted: Callable[..., Path]) -> None:
    place = mounted("-t", "tmpfs", "-o", "size=8m")
    assert asked(place / "file", 4 * MIB) == 4 * MIB
    assert asked(place / "nothing", 0) == 0


def test_where_there_is_not_so_much_it_says_so(mounted: Callable[..., Path]) -> None:
    place = mounted("-t", "tmpfs", "-o", "size=8m")
    with pytest.raises(OSError) as refused:
        asked(place / "file", 16 * MIB)
    assert refused.value.errno == errno.ENOSPC


def test_a_file_system_that_cannot_is_left_alone(mounted: Callable[..., Path]) -> None:
    place = mounted("-t", "ramfs")
    assert asked(place / "file", 4 * MIB) == 0
