"""Signals that a surface acts on: Ctrl-C while a command runs, and a terminal that changes its size."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["HANGUP", "INTERRUPT", "RESIZED", "TERMINATE", "handled", "noticed"]

HANGUP = int(signal.SIGHUP)
INTERRUPT = int(signal.SIGINT)
TERMINATE = int(signal.SIGTERM)
RESIZED = int(signal.SIGWINCH)


@contextlib.contextmanager
def handled(number: int, handler: Callable[[], None]) -> Iterator[None]:
    """Call `handler` in the main thread, between two of its steps, when the signal arrives; what it raises is raised there."""
    before = signal.signal(number, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def noticed(*numbers: int) -> Iterator[int]:
    """A descriptor that becomes readable when one of the signals arrives, and then holds its number as a byte.

    For a loop that must not be interrupted half-way through what it writes, as a handler would.
    """
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before: dict[int, Any] = {number: signal.signal(number, lambda *_: None) for number in numbers}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)
