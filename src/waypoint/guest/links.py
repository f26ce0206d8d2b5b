"""Connections to inits that nobody uses at the moment. Whoever comes next need not look for the session and its socket.

A link leads to what was the session when it was made. Whoever puts another state in a session's place says so before (`Store.written`),
and kills the old init afterwards, unless he is killed himself: so a link from before that is not used, whether it is open or not.
A snapshot closes every connection.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass

from waypoint.guest.connection import Connection, connect
from waypoint.outcomes import Process

__all__ = ["Links", "Locked"]

_MOST = 16


class Links:
    """One for each session at most. Used by any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[Connection, int]] = {}
        self._closed = False
        _all.add(self)

    def keep(self, session: str, connection: Connection, epoch: int) -> None:
        """`epoch` is that of the state that it leads to; the connection knows what was `written` when that was the session."""
        if self._closed:
            connection.close()
            return
        with self._lock:
            old = [self._kept.pop(session, None)]
            self._kept[session] = (connection, epoch)
            if len(self._kept) > _MOST:
                old.append(self._kept.pop(next(iter(self._kept))))
        for one in old:
            if one is not None:
                one[0].close()

    def take(self, session: str, written: int) -> tuple[Connection, int] | None:
        """It is the caller's, who holds the session's lock; `written` is what the store says now."""
        with self._lock:
            found = self._kept.pop(session, None)
        if found is None:
            return None
        if found[0].written != written or not found[0].is_open():
            found[0].close()
            return None
        return found

    def drop(self, session: str) -> None:
        with self._lock:
            found = self._kept.pop(session, None)
        if found is not None:
            found[0].close()

    def close(self) -> None:
        self._closed = True
        with self._lock:
            kept, self._kept = self._kept, {}
        for one in kept.values():
            one[0].close()

    def forget_others(self) -> None:
        """In a process that was forked, before anything else runs in it; its parent's other threads are not there."""
        self._lock = threading.Lock()
        kept, self._kept = self._kept, {}
        for one in kept.values():
            one[0].close()


@dataclass(slots=True)
class Locked:
    """How to reach a session whose lock the caller holds."""

    session: str
    init: Process
    epoch: int
    written: int
    links: Links

    def connect(self) -> tuple[Connection, int]:
        found = self.links.take(self.session, self.written)
        if found is None:
            found = connect(self.init, self.session), self.epoch
            found[0].written = self.written
        return found

    def leave(self, connection: Connection, epoch: int) -> None:
        self.links.keep(self.session, connection, epoch)


_all: weakref.WeakSet[Links] = weakref.WeakSet()


def _forked() -> None:
    """Two processes that talk over one connection would have each other's answers."""
    for links in list(_all):
        links.forget_others()


os.register_at_fork(after_in_child=_forked)
