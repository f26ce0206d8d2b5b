"""Children that have nothing left to do but to end: nobody waits for that, and somebody must reap them. And what else can wait.

One thread for all of them, which looks now and then: to start one for each took longer than the restore that it was for.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable

__all__ = ["do", "reap"]

_TICK = 0.04
_IDLE_SECONDS = 10.0

_PATIENCE = 0.015
"""A child that ends takes a processor for that, and the caller's next command is under way."""

_lock = threading.Lock()
_waiting: list[tuple[float, Callable[[], None]]] = []
_ending: list[subprocess.Popen[bytes]] = []
_thread: threading.Thread | None = None


def reap(process: subprocess.Popen[bytes], release: Callable[[], None] | None = None) -> None:
    """When it has ended, some time; `release` is called a little later and lets it end."""
    with _lock:
        _ending.append(process)
        if release is not None:
            _waiting.append((time.monotonic() + _PATIENCE, release))
        _begin()


def do(what: Callable[[], None], seconds: float) -> None:
    """Not before so many seconds have passed, and not at all if this process ends before that."""
    with _lock:
        _waiting.append((time.monotonic() + seconds, what))
        _begin()


def _begin() -> None:
    """Called with the lock held."""
    global _thread
    if _thread is None or not _thread.is_alive():  # after a fork it is not
        _thread = threading.Thread(target=_run, name="reaper", daemon=True)
        _thread.start()


def _run() -> None:
    global _thread
    needed = time.monotonic()
    while True:
        time.sleep(_TICK)
        now = time.monotonic()
        with _lock:
            due = [release for at, release in _waiting if at <= now]
            _waiting[:] = [one for one in _waiting if one[0] > now]
        for release in due:
            release()
        with _lock:
            _ending[:] = [process for process in _ending if process.poll() is None]
            if _ending or _waiting:
                needed = time.monotonic()
            elif time.monotonic() - needed > _IDLE_SECONDS:
                _thread = None
                return
