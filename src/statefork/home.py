"""StateFork's state directory: one directory per snapshot tree, held by a lock that is freed when its owner dies.

    <home>/trees/<tree>/owner                  locked (flock) as long as the process that made the tree lives
    <home>/trees/<tree>/<place>/               what a driver keeps for one environment or one stored state
    <home>/probes/                             answers of probes that are worth keeping until the next boot

A pid in a file would be a guess after a crash or a reboot; a lock is not. Nothing here outlives its owner: a tree whose
lock is free is garbage, and `collect` (the command `statefork gc`) removes it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from statefork.driver import Driver, Place
from statefork.errors import StoreError

__all__ = ["Grounds", "collect", "default_home"]


def default_home() -> Path:
    return Path("/var/lib/statefork") if os.geteuid() == 0 else Path.home() / ".local/share/statefork"


class Grounds:
    """The directory of one snapshot tree, and the lock on it. Hands out places."""

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()
        self.tree = secrets.token_hex(6)
        self._directory = self.home / "trees" / self.tree
        try:
            self._directory.mkdir(parents=True, mode=0o700)
            self._owner = os.open(self._directory / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"cannot write to the state directory {self.home}: {error.strerror}; choose another with home="
            ) from error
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        os.write(self._owner, f"{os.getpid()}\n".encode())

    def place(self, name: str) -> Place:
        directory = self._directory / name
        directory.mkdir(mode=0o700)
        return Place(name=name, directory=directory, tree=self.tree, home=self.home)

    def clear(self, place: Place) -> None:
        shutil.rmtree(place.directory, ignore_errors=True)

    def close(self) -> None:
        """Remove the directory, then let go of it: the other way round a collector could meet it half removed."""
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._owner)


def in_use(home: Path, tree: str) -> bool:
    """Whether the process that made this tree is still alive."""
    try:
        owner = os.open(home / "trees" / tree / "owner", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(owner)
    return False


def collect(home: Path, drivers: Iterable[type[Driver]]) -> Iterator[str]:
    """Remove what crashed processes left behind; yields a line for each thing removed."""
    home = home.absolute()
    for driver in drivers:
        yield from driver.sweep(home, lambda tree: in_use(home, tree))
    trees = home / "trees"
    for directory in sorted(trees.iterdir()) if trees.is_dir() else ():
        # A tree that is just being made has its directory before its lock: leave those that have no owner file yet.
        if (directory / "owner").exists() and not in_use(home, directory.name):
            shutil.rmtree(directory, ignore_errors=True)
            yield f"directory {directory}"
