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

__all__ = ["Chores"]

log = logging.getLogger(__name__)
PATIENCE = 0.015
IDLE_SECONDS = 10.0


class Chores:
    """One thread, which is there while there is something to do. Any thread may give it more."""

    def __init__(self, name: str, done: Callable[[], None] = lambda: None) -> None:
        """`done` is called on the thread before it ends."""
        self._name = name
        self._done = done
        self._change = threading.Condition()
        self._count = itertools.count()
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def later(self, work: Callable[[], None], patience: float = PATIENCE) -> bool:
        """False: it will not be done, as the owner is closing."""
        with self._change:
            if self._closed:
                return False
            heapq.heappush(self._waiting, (time.monotonic() + patience, next(self._count), work))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            elif self._waiting[0][2] is work:
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

    def _next(self) -> Callable[[], None] | None:
        with self._change:
            while True:
                if not self._waiting:
                    if self._closed or not self._change.wait_for(self._called, IDLE_SECONDS):
                        self._thread = None
                        return None
                    continue
                left = self._waiting[0][0] - time.monotonic()
                if left <= 0 or self._closed:
                    return heapq.heappop(self._waiting)[2]
                self._change.wait(left)

    def _called(self) -> bool:
        return bool(self._waiting) or self._closed
