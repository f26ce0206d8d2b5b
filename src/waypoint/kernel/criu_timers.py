"""Whether a saved tree has timers that run. In a tree that is brought up and held back they would run on, and fire too early."""

from __future__ import annotations

from pathlib import Path

from waypoint.kernel.wire_format import Field, messages, unpack

__all__ = ["has_running_timers"]

_TASK, _TIMERS, _POSIX = 3, 7, 4  # core_entry.tc, task_core_entry.timers, task_timers_entry.posix
_ITIMERS = (1, 2, 3)
_ITIMER_LEFT, _POSIX_LEFT, _TIMERFD_LEFT = (3, 4), (9, 10), (7, 8)
_TIMERFD = 12  # file_entry.tfd


def has_running_timers(images: Path) -> bool:
    for image in images.glob("core-*.img"):
        for message in messages(image):
            for task in _inner(message, _TASK):
                for timers in _inner(task, _TIMERS):
                    if any(_runs(one, _ITIMER_LEFT) for kind in _ITIMERS for one in _inner(timers, kind)):
                        return True
                    if any(_runs(one, _POSIX_LEFT) for one in _inner(timers, _POSIX)):
                        return True
    files = [entry for message in messages(images / "files.img") for entry in _inner(message, _TIMERFD)]
    return any(_runs(entry, _TIMERFD_LEFT) for entry in files)


def _inner(message: bytes, number: int) -> list[bytes]:
    return [value for key, value in _fields(message) if key == number and isinstance(value, bytes)]


def _runs(timer: bytes, left: tuple[int, int]) -> bool:
    return any(value for key, value in _fields(timer) if key in left)


def _fields(message: bytes) -> list[Field]:
    return unpack(message)
