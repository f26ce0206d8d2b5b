"""StateFork's state directory: one directory per snapshot tree, held by a lock that is freed when its owner dies.

    <home>/trees/<tree>/owner                  locked (flock) as long as the process that made the tree lives
    <home>/trees/<tree>/kept                   only for trees of the daemon: its next process takes them over
    <home>/trees/<tree>/<place>/               what a driver keeps for one environment or one stored state
    <home>/probes/                             answers of probes that are worth keeping until the next boot

A pid in a file would be a guess after a crash or a reboot; a lock is not. Nothing here outlives its owner, unless it is
marked as kept: a tree whose lock is free is garbage, and `collect` (the command `statefork gc`) removes it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from statefork.driver import Driver, Place
from statefork.errors import Busy, StoreError

__all__ = ["Grounds", "collect", "default_home", "give_up", "new_tree"]

_KEPT = "kept"


def default_home() -> Path:
    return Path("/var/lib/statefork") if os.geteuid() == 0 else Path.home() / ".local/share/statefork"


class Grounds:
    """The directory of one snapshot tree, and the lock on it. Hands out places."""

    def __init__(self, home: Path, tree: str | None = None, *, kept: bool = False) -> None:
        """`tree` is one whose owner is gone, to go on with; `kept` makes it outlive this process."""
        self.home = home.absolute()
        self.tree = tree or new_tree()
        self._directory = self.home / "trees" / self.tree
        try:
            self._directory.mkdir(parents=True, mode=0o700, exist_ok=tree is not None)
            if kept:
                (self._directory / _KEPT).touch(0o600)
            self._owner = os.open(self._directory / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"cannot write to the state directory {self.home}: {error.strerror}; choose another with home="
            ) from error
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._owner)
            raise Busy(f"{self._directory} belongs to another process that is alive; stop that one first") from error
        os.ftruncate(self._owner, 0)
        os.write(self._owner, f"{os.getpid()}\n".encode())

    def place(self, name: str) -> Place:
        directory = self._directory / name
        directory.mkdir(mode=0o700)
        return Place(name=name, directory=directory, tree=self.tree, home=self.home)

    def known(self, name: str) -> Place:
        """A place that was handed out before."""
        return Place(name=name, directory=self._directory / name, tree=self.tree, home=self.home)

    def places(self) -> list[Place]:
        """All that were handed out and not cleared, whoever did it."""
        return [self.known(entry.name) for entry in sorted(self._directory.iterdir()) if entry.is_dir()]

    def clear(self, place: Place) -> None:
        shutil.rmtree(place.directory, ignore_errors=True)

    def close(self) -> None:
        """Remove the directory, then let go of it: the other way round a collector could meet it half removed."""
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._owner)

    def leave(self) -> None:
        """Let go of it as it is, for another process."""
        os.close(self._owner)


def new_tree() -> str:
    return secrets.token_hex(6)


def give_up(home: Path, tree: str) -> None:
    """Nobody will go on with a tree that was kept: `collect` may have it."""
    (home / "trees" / tree / _KEPT).unlink(missing_ok=True)


def in_use(home: Path, tree: str) -> bool:
    """Whether the process that made this tree is still alive, or another one will go on with it."""
    if (home / "trees" / tree / _KEPT).exists():
        return True
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
