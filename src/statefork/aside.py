"""What is done aside for drivers that answer within milliseconds: places made ahead, and the old stopped after the new has answered.

Nothing depends on it being done. If this process is killed, a place that nobody used and a Live that was only about to be stopped
are what any crash leaves: nobody was told of them, so they are removed by whoever takes the tree over, or by `statefork gc`.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

from statefork.driver import Driver, Live, Place
from statefork.errors import WaypointError
from statefork.home import Grounds
from statefork.tree import mint

__all__ = ["Aside"]

log = logging.getLogger(__name__)
PATIENCE = 0.015
"""The caller's next command is under way: what is done beside it would take a processor from it."""
_KINDS = ("l", "s")
_pool = ThreadPoolExecutor(4, thread_name_prefix="statefork-aside")


class Aside:
    """Of one family. Its methods may be called from several threads."""

    def __init__(self, grounds: Grounds, driver: Driver) -> None:
        self._grounds = grounds
        self._driver = driver
        self._lock = threading.Lock()
        self._spare: dict[str, Place] = {}
        self._stocking = False
        self._retiring: set[Future[None]] = set()
        self._closed = False

    def place(self, kind: str) -> Place:
        """A fresh one, made ahead if there is one."""
        with self._lock:
            found = self._spare.pop(kind, None)
        return found or self._grounds.place(mint(kind))

    def stock(self) -> None:
        """Have places for what comes next, soon."""
        with self._lock:
            if self._stocking or self._closed:
                return
            self._stocking = True
        _pool.submit(self._stock)

    def retire(self, live: Live, place: Place) -> None:
        """Stop it and clear its place."""

        def work() -> None:
            time.sleep(PATIENCE)
            try:
                live.retire()
                self._grounds.clear(place)
            except (WaypointError, OSError) as error:
                log.warning("%s could not be removed: %s", live.description, error)

        future = _pool.submit(work)
        with self._lock:
            self._retiring.add(future)
        future.add_done_callback(self._retired)

    def settle(self) -> None:
        """Whatever was to be stopped has been stopped when this returns."""
        with self._lock:
            waiting = set(self._retiring)
        wait(waiting)

    def close(self) -> None:
        """The same, and no place is made any more."""
        with self._lock:
            self._closed = True
            spare, self._spare = self._spare, {}
        for place in spare.values():
            self._grounds.clear(place)
        self.settle()

    def _retired(self, future: Future[None]) -> None:
        with self._lock:
            self._retiring.discard(future)

    def _stock(self) -> None:
        time.sleep(PATIENCE)
        with suppress(WaypointError, OSError):
            for kind in _KINDS:
                self._make(kind)
        with self._lock:
            self._stocking = False

    def _make(self, kind: str) -> None:
        with self._lock:
            if self._closed or kind in self._spare:
                return
        place = self._grounds.place(mint(kind))
        try:
            self._driver.prepare(place)
        except BaseException:
            self._grounds.clear(place)
            raise
        with self._lock:
            if not self._closed:
                self._spare[kind] = place
                return
        self._grounds.clear(place)
