"""A session that was ended at a snapshot comes back over its own upper, which is the snapshot's layer from then on (sealing.py)."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

from waypoint import bringup, faults
from waypoint.ahead import Stock
from waypoint.errors import WaypointError
from waypoint.kernel import moved
from waypoint.model import BaseRecord, SessionRecord, SnapshotRecord
from waypoint.store.store import Store

__all__ = ["Rehoming"]


class Rehoming:
    """The caller holds the session's lock, and closes this."""

    def __init__(
        self, store: Store, base: BaseRecord, session: SessionRecord, below: tuple[int, ...], stock: Stock | None
    ) -> None:
        """While the session stands still: its next upper is made, over its own and those `below`."""
        self._store = store
        self._base = base
        self._session = session
        self._stock = stock
        self._upper: int | None = bringup.next_upper(store, base, (session.upper or 0, *below), stock)
        self._begun: bringup.Restoring | None = None
        self._completed = False

    def begin(self, record: SnapshotRecord) -> None:
        """The images are there, and the old processes may be, too: the root, which is theirs, is mounted later."""
        begun = bringup.restore_processes(
            self._store, self._base, record, self._session.spec, self._store.paths.session(self._session.id),
            waits=False, upper=self._upper, stock=self._stock, filled=True, beside=self._complete, rooted=False,
        )  # fmt: skip
        self._upper = None  # it is discarded if that fails
        with contextlib.suppress(OSError, WaypointError):
            next(begun)
            self._begun = begun
            faults.point("rehome-begun")

    def come_back(self, record: SnapshotRecord, since: float) -> tuple[SnapshotRecord, bringup.Live]:
        """If that fails the session is paused at the snapshot: nothing is lost.

        The rows of the snapshot are completed beside it; if this process dies before, whoever finds the intent completes them.
        """
        store, session = self._store, self._session
        try:
            try:
                upper, self._upper = self._upper, None
                live = bringup.restore_tree(
                    store, self._base, record, session.spec, store.paths.session(session.id), {},
                    stock=self._stock, upper=upper, filled=upper is not None, beside=self._complete, begun=self._begun,
                )  # fmt: skip
            finally:
                self._complete()
            faults.point("rehome-up")
            self._take_place(live)
        except WaypointError as error:
            error.message += (
                f"; snapshot {record.id} is whole and the session is paused at it: `waypoint resume {session.id}`"
            )
            raise
        record = replace(record, paused_ms=(time.perf_counter() - since) * 1000)
        with contextlib.suppress(WaypointError):  # all else is there
            store.db.update_snapshot(record.id, paused_ms=record.paused_ms)
        return record, live

    def _take_place(self, live: bringup.Live) -> None:
        if live.link is not None:  # as after any snapshot
            live.link.close()
        try:
            self._store.db.update_session(self._session.id, **live.columns(), state="live", pause=None)
        except BaseException:  # it is paused, and is not to run beside what it is resumed as
            with contextlib.suppress(OSError, WaypointError):
                bringup.retire(self._store, live, wait=True)
                self._store.discard_layers([live.upper])
            raise
        faults.point("rehome-committed")

    def _complete(self) -> None:
        if not self._completed:
            self._store.db.complete_ending(self._session.id)
            self._completed = True
            faults.point("snapshot-committed")
            moved.forget(self._store.paths.layer(self._session.upper or 0))

    def close(self) -> None:
        """What has not become the session's is garbage."""
        with contextlib.suppress(OSError, WaypointError):  # what is left then is for gc
            if self._begun is not None:
                self._begun.close()
            if self._upper is not None:
                self._store.discard_layers([self._upper])
