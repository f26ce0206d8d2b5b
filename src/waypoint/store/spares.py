"""Uppers that are made before they are needed: on a disk that is busy a directory takes milliseconds.

No row but their own names them: gc may take one at any time, and takes what a killed process leaves.
"""

from __future__ import annotations

import threading
import time

from waypoint.store.store import Store

__all__ = ["Spares"]

MOST = 2


class Spares:
    """Those of one engine. Used by any number of threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._there: list[tuple[int, float]] = []

    def add(self) -> None:
        """One more, if there are not enough; inside an operation."""
        with self._lock:
            if len(self._there) >= MOST:
                return
        upper = self._store.make_upper(self._store.new_uppers(1)[0], None)
        with self._lock:
            self._there.append((upper, time.monotonic()))

    def take(self, n: int) -> list[int]:
        """At most `n` of them, now the caller's; inside an operation, so that gc takes none meanwhile."""
        taken: list[int] = []
        with self._lock:
            while self._there and len(taken) < n:
                upper, _ = self._there.pop(0)
                if self._store.is_made(upper):
                    taken.append(upper)
        return taken

    def waiting(self) -> list[int]:
        with self._lock:
            return [upper for upper, _ in self._there]

    def drop(self, oldest: float | None = None) -> None:
        """All of them, or those that have waited since before `oldest`."""
        with self._lock:
            gone = [upper for upper, since in self._there if oldest is None or since < oldest]
            self._there = [(upper, since) for upper, since in self._there if upper not in gone]
        if gone:
            self._store.discard_layers(gone)
