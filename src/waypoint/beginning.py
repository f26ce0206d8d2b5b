"""A restore that is begun before it is known whether it may be: CRIU reads the images and the root is mounted, and nothing runs.

What is known of a snapshot may be a moment old. If it is not that any more, all of this comes to nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from waypoint import bringup, faults
from waypoint.ahead import Stock
from waypoint.errors import WaypointError
from waypoint.model import SnapshotRecord
from waypoint.store.store import Store

__all__ = ["Beginning", "Recent", "beginning"]

_RECENT = 8


class Recent:
    """Snapshots as they were a moment ago: whoever uses one looks at its row all the same when it is held."""

    def __init__(self) -> None:
        self._known: dict[str, SnapshotRecord] = {}

    def note(self, snapshot: SnapshotRecord) -> None:
        self._known[snapshot.id] = snapshot
        if len(self._known) > _RECENT:
            with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # another thread has done it
                del self._known[next(iter(self._known))]

    def get(self, snapshot: str) -> SnapshotRecord | None:
        return self._known.get(snapshot)


@dataclass(frozen=True, slots=True)
class Beginning:
    """It is on its way, or there is none."""

    known: SnapshotRecord | None = None
    restoring: bringup.Restoring | None = None

    def of(self, snapshot: SnapshotRecord) -> bringup.Restoring | None:
        """If it is of this snapshot as it is now."""
        known = self.known
        if known is None or _what(known) != _what(snapshot):
            return None
        return self.restoring


def _what(snapshot: SnapshotRecord) -> tuple[object, ...]:
    return snapshot.image, snapshot.layers, snapshot.full, snapshot.base, snapshot.spec


@contextlib.contextmanager
def beginning(store: Store, stock: Stock, known: SnapshotRecord | None, log_dir: Path) -> Iterator[Beginning]:
    """Inside an operation. `log_dir`: see `bringup.restore_tree`."""
    if known is None or not known.full or stock.template is None:
        yield Beginning()
        return
    begun = Beginning()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, WaypointError):  # something is gone: the caller finds out what
            base = store.base(known.base)
            restoring = bringup.restore_processes(store, base, known, known.spec, log_dir, waits=False, stock=stock)
            stack.enter_context(contextlib.closing(restoring))
            next(restoring)
            begun = Beginning(known, restoring)
            faults.point("restore-begun")
        yield begun
