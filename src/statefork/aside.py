"""What is done aside for drivers that answer within milliseconds: places made ahead, and the old cleared away after the new has answered.

Nothing depends on it being done. If this process is killed, a place that nobody used and a Live that was only about to be stopped
are what any crash leaves: nobody was told of them, so they are removed by whoever takes the tree over, or by `statefork gc`.
"""

from __future__ import annotations

import itertools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from statefork.driver import Driver, Live, Place
from statefork.errors import WaypointError
from statefork.home import Grounds
from statefork.tree import mint
from waypoint.kernel.chores import Chores

__all__ = ["Aside"]

log = logging.getLogger(__name__)
_KINDS = ("l", "s")
_PATIENCE = 0.06
"""Before the old is cleared away: a fork may follow a restore."""
_pool = ThreadPoolExecutor(4, thread_name_prefix="statefork-aside")
_soon = Chores("statefork-soon")
"""Hands over to the pool when the caller is well on its way; it need not be woken for that, as the pool must be."""


class Aside:
    """Of one family. Its methods may be called from several threads."""

    def __init__(self, grounds: Grounds, driver: Driver) -> None:
        self._grounds = grounds
        self._driver = driver
        self._change = threading.Condition()
        self._spare: dict[str, Place] = {}
        self._stocking = False
        self._count = itertools.count()
        self._doomed: dict[int, tuple[Live, Place]] = {}
        self._stopping = 0
        self._closed = False

    def place(self, kind: str) -> Place:
        """A fresh one, made ahead if there is one."""
        with self._change:
            found = self._spare.pop(kind, None)
        return found or self._grounds.place(mint(kind))

    def stock(self) -> None:
        """Have places for what comes next, soon."""
        with self._change:
            if self._stocking or self._closed:
                return
            self._stocking = True
        _soon.later(lambda: _pool.submit(self._stock), lazily=True)

    def retire(self, live: Live, place: Place) -> None:
        """Nothing of it runs any more when this returns; what else there is to stop and to clear is, or soon will be."""
        later = live.halt()
        with self._change:
            number = next(self._count)
            self._doomed[number] = (live, place)
        if later:
            _soon.later(lambda: _pool.submit(self._stop, number), _PATIENCE, lazily=True)
        else:
            self._stop(number)

    def settle(self) -> None:
        """Whatever was to be stopped has been stopped when this returns."""
        while True:
            with self._change:
                number = next(iter(self._doomed), None)
                if number is None:
                    self._change.wait_for(lambda: not self._stopping)
                    return
            self._stop(number)

    def close(self) -> None:
        """The same, and no place is made any more."""
        with self._change:
            self._closed = True
            spare, self._spare = self._spare, {}
        for place in spare.values():
            self._grounds.clear(place)
        self.settle()

    def _stop(self, number: int) -> None:
        with self._change:
            found = self._doomed.pop(number, None)
            if found is None:
                return
            self._stopping += 1
        live, place = found
        try:
            live.retire()
            self._grounds.clear(place)
        except (WaypointError, OSError) as error:
            log.warning("%s could not be removed: %s", live.description, error)
        finally:
            with self._change:
                self._stopping -= 1
                self._change.notify_all()

    def _stock(self) -> None:
        with suppress(WaypointError, OSError):
            for kind in _KINDS:
                self._make(kind)
        with self._change:
            self._stocking = False

    def _make(self, kind: str) -> None:
        with self._change:
            if self._closed or kind in self._spare:
                return
        place = self._grounds.place(mint(kind))
        try:
            self._driver.prepare(place)
        except BaseException:
            self._grounds.clear(place)
            raise
        with self._change:
            if not self._closed:
                self._spare[kind] = place
                return
        self._grounds.clear(place)
