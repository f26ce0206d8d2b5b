"""What an operation leaves to be done that its caller need not wait for. A moment later, because the caller's next command is
under way at once, and would share processors and interpreter with it.

Nothing may depend on a chore being done: a process that is killed never does them, and what is left is garbage for gc.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

__all__ = ["PATIENCE", "Chores"]

log = logging.getLogger(__name__)
PATIENCE = 0.015
_TICK = 0.03
"""A thread that had something to do lately looks by itself whether there is more: to wake it takes its waker longer than to ask."""
_AWAKE_SECONDS = 10.0
_IDLE_SECONDS = 60.0


class Chores:
    """One thread, which is there while there is something to do. Any thread may give it more."""

    def __init__(self, name: str, done: Callable[[], None] = lambda: None) -> None:
        """`done` is called on the thread before it ends."""
        self._name = name
        self._done = done
        self._change = threading.Condition()
        self._count = itertools.count()
        self._waiting: list[tuple[float, int, Callable[[], object]]] = []
        self._thread: threading.Thread | None = None
        self._looks_by = 0.0
        """When the thread will look again by itself."""
        self._closed = False

    def later(self, work: Callable[[], object], patience: float = PATIENCE, *, lazily: bool = False) -> bool:
        """False: it will not be done, as the owner is closing. `lazily`: it may take some hundredths of a second more."""
        due = time.monotonic() + patience
        with self._change:
            if self._closed:
                return False
            heapq.heappush(self._waiting, (due, next(self._count), work))
            if self._thread is None or not self._thread.is_alive():  # after a fork it is not
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            elif self._looks_by > (due + _TICK if lazily else due):
                self._change.notify()
        return True

    def close(self) -> None:
        """All that was asked for is done when this returns."""
        with self._change:
            self._closed = True
            self._change.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        try:
            while True:
                work = self._next()
                if work is None:
                    return
                try:
                    work()
                except Exception:  # nobody waits who could be told
                    log.warning("%s: a chore failed", self._name, exc_info=True)
        finally:
            self._done()

    def _next(self) -> Callable[[], object] | None:
        """The next chore when it is due; None when there has been none for long."""
        began = time.monotonic()
        with self._change:
            while True:
                now = time.monotonic()
                if self._waiting and (self._closed or self._waiting[0][0] <= now):
                    return heapq.heappop(self._waiting)[2]
                if self._waiting:
                    pause = min(self._waiting[0][0] - now, _TICK)
                elif self._closed or now - began > _IDLE_SECONDS:
                    self._thread = None
                    return None
                else:
                    pause = _TICK if now - began < _AWAKE_SECONDS else _IDLE_SECONDS
                self._looks_by = now + pause
                self._change.wait(pause)
