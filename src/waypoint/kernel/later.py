"""Children that have nothing left to do but to end: nobody waits for that, and somebody must reap them. And what else can wait.

One thread for all of them: to start one for each took longer than the restore that it was for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from waypoint.kernel.chores import Chores

__all__ = ["Child", "do", "reap"]

_AGAIN_SECONDS = 0.04
_chores = Chores("reaper")


class Child(Protocol):
    """A child of this process."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


def reap(process: Child, release: Callable[[], None] | None = None) -> None:
    """When it has ended, some time; `release` is called a little later and lets it end."""
    if release is not None:
        _chores.later(release, lazily=True)
    do(lambda: _look(process), _AGAIN_SECONDS)


def _look(process: Child) -> None:
    if process.poll() is None:
        do(lambda: _look(process), _AGAIN_SECONDS)


def do(what: Callable[[], None], seconds: float) -> None:
    """Not before so many seconds have passed, and not at all if this process ends before that."""
    _chores.later(what, seconds, lazily=True)
