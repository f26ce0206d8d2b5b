"""File locks: they work between threads and processes alike, and the kernel drops them when their holder dies."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from waypoint.errors import Busy, NotFound

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Doors", "exclusive", "exclusive_on", "open_lock", "shared", "shared_on"]


@contextmanager
def shared(path: Path | str, *, timeout: float | None = None) -> Iterator[int]:
    """Gives the lock's descriptor: a child that inherits it keeps the lock for as long as it lives."""
    with _held(path, fcntl.LOCK_SH, timeout) as fd:
        yield fd


@contextmanager
def exclusive(path: Path | str, *, timeout: float | None = None) -> Iterator[int]:
    with _held(path, fcntl.LOCK_EX, timeout) as fd:
        yield fd


def open_lock(path: Path | str) -> int:
    """A descriptor to lock later, with `shared_on` or `exclusive_on`; a child that inherits it now shares that lock then."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as error:
        raise NotFound(f"{path} is gone: the session has just been removed") from error


@contextmanager
def shared_on(fd: int) -> Iterator[None]:
    fcntl.flock(fd, fcntl.LOCK_SH)
    yield
    fcntl.flock(fd, fcntl.LOCK_UN)


@contextmanager
def exclusive_on(fd: int) -> Iterator[None]:
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield
    fcntl.flock(fd, fcntl.LOCK_UN)


@contextmanager
def _held(path: Path | str, kind: int, timeout: float | None) -> Iterator[int]:
    fd = open_lock(path)
    try:
        if timeout is None:
            fcntl.flock(fd, kind)
        else:
            _poll(fd, kind, timeout, path)
        yield fd
        fcntl.flock(fd, fcntl.LOCK_UN)  # also for a child that inherited it and is only about to end
    finally:
        os.close(fd)


class Doors:
    """One lock file that is passed all the time: what was opened for it is kept for the next. Used by any number of threads."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._free = [open_lock(path)]
        weakref.finalize(self, _close_all, self._free)

    @contextmanager
    def shared(self) -> Iterator[None]:
        try:
            fd = self._free.pop()
        except IndexError:
            fd = open_lock(self._path)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
            self._free.append(fd)

    def close(self) -> None:
        _close_all(self._free)


def _close_all(free: list[int]) -> None:
    while free:
        os.close(free.pop())


def _poll(fd: int, kind: int, timeout: float, path: Path | str) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise Busy(f"{path} is in use by another operation; try again when it has ended") from error
            time.sleep(0.005)
