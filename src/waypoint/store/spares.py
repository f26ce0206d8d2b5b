"""Directories that are made before they are needed, because on a disk that is busy one takes milliseconds: uppers, sessions' and images'.

No row but an upper's own names them: gc may take one at any time, and takes what a killed process leaves.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from waypoint.model import new_id
from waypoint.store.store import Store

__all__ = ["Spares"]

MOST = 2


class Spares:
    """Those of one engine. Used by any number of threads."""

    def __init__(self, store: Store, fill: Callable[[Path], object]) -> None:
        """`fill`: what every upper has in it, whatever it is for."""
        self._store = store
        self._fill = fill
        self._lock = threading.Lock()
        self._there: list[tuple[int, float]] = []
        self._directories: list[tuple[str, float]] = []
        self._images: list[tuple[Path, float]] = []

    def add(self) -> None:
        """One more of each, if there are not enough; inside an operation."""
        with self._lock:
            uppers, directories, images = len(self._there), len(self._directories), len(self._images)
        if uppers < MOST:
            upper = self._store.make_upper(self._store.new_uppers(1)[0], None)
            self._fill(self._store.paths.upper(upper))
            with self._lock:
                self._there.append((upper, time.monotonic()))
        if directories < MOST:
            session = new_id("s")
            self._store.make_session_directory(session)
            with self._lock:
                self._directories.append((session, time.monotonic()))
        if images < MOST:
            image = self._store.paths.images / f".{new_id('p')}"
            image.mkdir()
            with self._lock:
                self._images.append((image, time.monotonic()))

    def take(self, n: int) -> list[int]:
        """At most `n` of them, now the caller's; inside an operation, so that gc takes none meanwhile."""
        taken: list[int] = []
        with self._lock:
            while self._there and len(taken) < n:
                upper, _ = self._there.pop(0)
                if self._store.is_made(upper):
                    taken.append(upper)
        return taken

    def take_sessions(self, n: int) -> list[str]:
        """Ids for `n` new sessions; the first of them have a directory already, as far as there are any. Like `take`."""
        taken: list[str] = []
        with self._lock:
            while self._directories and len(taken) < n:
                session, _ = self._directories.pop(0)
                if self._store.paths.session(session).is_dir():
                    taken.append(session)
        return [*taken, *(new_id("s") for _ in range(n - len(taken)))]

    def take_image(self, otherwise: Path) -> Path:
        """An empty directory for CRIU to write to, or that other one; the caller sees to it that it is there. Like `take`."""
        with self._lock:
            return self._images.pop(0)[0] if self._images else otherwise

    def waiting(self) -> list[int]:
        """The uppers."""
        with self._lock:
            return [upper for upper, _ in self._there]

    def waiting_sessions(self) -> list[str]:
        """Those that have a directory and nothing else."""
        with self._lock:
            return [session for session, _ in self._directories]

    def any_waiting(self) -> bool:
        with self._lock:
            return bool(self._there or self._directories or self._images)

    def drop(self, oldest: float | None = None) -> None:
        """All of them, or those that have waited since before `oldest`."""
        with self._lock:
            gone = [upper for upper, since in self._there if oldest is None or since < oldest]
            self._there = [(upper, since) for upper, since in self._there if upper not in gone]
            empty = [session for session, since in self._directories if oldest is None or since < oldest]
            self._directories = [one for one in self._directories if one[0] not in empty]
            images = [image for image, since in self._images if oldest is None or since < oldest]
            self._images = [one for one in self._images if one[0] not in images]
        for image in images:
            with contextlib.suppress(OSError):
                image.rmdir()
        for session in empty:
            self._store.forget_session_directory(session)
        if gone:
            self._store.discard_layers(gone)
