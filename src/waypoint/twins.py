"""Twins: snapshots that are likely to be restored or forked next, brought up ahead and held before their first instruction.

`restore` and `fork` then only have to let one go on. A twin is a whole restored tree with memory of its own, in which nothing has
run yet; CRIU waits with it. It is not in any row: if this process ends, however it ends, its twins end without having run, and
what they had on disk is garbage. Off unless asked for, because each costs the memory of its snapshot.

Not for every snapshot: timers that run would run on in a twin, and a session on the host's network would want its ports twice.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass

from waypoint import bringup
from waypoint.ahead import Stock
from waypoint.counting import counted
from waypoint.errors import WaypointError
from waypoint.kernel import trees
from waypoint.kernel.criu_timers import has_running_timers
from waypoint.model import BaseRecord, SnapshotRecord, new_id
from waypoint.store import locks
from waypoint.store.store import Store

__all__ = ["Budget", "Twins"]

PATIENCE = 0.015
"""After an operation its caller goes on: bringing a twin up at once would take a core from that."""
IDLE_SECONDS = 120.0
_LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Budget:
    """How many twins may wait, and how much memory the snapshots that they are made of may have together."""

    twins: int = 0
    bytes: int = 256 << 20


class _Twin:
    """One thread brings it up and leaves it waiting; whoever adopts it goes on with the rest of the restore."""

    def __init__(self, store: Store, snapshot: SnapshotRecord, stock: Stock) -> None:
        self._store = store
        self._stock = stock
        self.snapshot = snapshot
        self.since = time.monotonic()
        self.session = new_id("s")
        """Under which it can be a session: its directory is there."""
        self._kept = contextlib.ExitStack()
        self._base: BaseRecord | None = None
        self._restoring: bringup.Restoring | None = None
        self._problem: BaseException | None = None
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._bring_up, name=f"twin-{snapshot.id}", daemon=True)
        self._thread.start()

    def _bring_up(self) -> None:
        try:
            with self._store.operation(), self._store.holding(self.snapshot) as now:
                source = counted(self._store, now)  # whoever takes the twin may want it verified
                self._kept.enter_context(locks.shared(self._store.paths.gate))  # gc must not take it for garbage
                self._store.keep(source, self._kept)
                self._store.make_session_directory(self.session)
                self._base = self._store.db.base(source.base)
                restoring = bringup.restore_processes(
                    self._store, self._base, source, source.spec, None, waits=True, guarded=True, stock=self._stock
                )
                while next(restoring) == 0:
                    pass
            self._restoring = restoring
        except BaseException as error:  # noqa: BLE001  whoever takes the twin hears of it
            self._problem = error
            self._kept.close()
            self._store.forget_session_directory(self.session)
        finally:
            self._settled.set()
            self._store.db.close()

    @property
    def waits(self) -> bool:
        return self._restoring is not None

    @property
    def failed(self) -> bool:
        return self._problem is not None

    def adopt(self, verify: bool) -> bringup.Live:
        """It goes on, and is the caller's, as is the directory; raises what went wrong with it.

        Once, by whoever has taken it.
        """
        self._settled.wait()
        with self._kept:
            if self._restoring is None or self._base is None:
                raise self._problem or AssertionError("a twin waits, or something is wrong with it")
            with contextlib.closing(self._restoring):
                bringup.check_base(self._base, self.snapshot)
                return bringup.go_on(self._restoring, verify)

    def let_go(self) -> None:
        """Nobody wants it any more."""
        self._settled.wait()
        with self._kept, contextlib.suppress(WaypointError, OSError):
            if self._restoring is not None:
                self._restoring.close()
            self._store.forget_session_directory(self.session)


def _same(a: SnapshotRecord, b: SnapshotRecord) -> bool:
    """One is as good as the other: snapshots between which nothing has changed share their image."""
    return (a.image, a.layers, a.spec) == (b.image, b.layers, b.spec)


class Twins:
    """Those of one engine. Used by any number of threads."""

    def __init__(self, store: Store, budget: Budget, stock: Stock) -> None:
        self._store = store
        self._stock = stock
        self._budget = budget
        self._change = threading.Condition()
        self._wanted: list[SnapshotRecord] = []
        self._there: list[_Twin] = []
        self._keeper: threading.Thread | None = None
        self._closed = False

    def allow(self, budget: Budget) -> None:
        """From now on; whoever shares this engine and asked for more keeps it."""
        with self._change:
            self._budget = Budget(max(self._budget.twins, budget.twins), max(self._budget.bytes, budget.bytes))

    def want(self, snapshot: SnapshotRecord) -> None:
        """Have a twin of it soon; the newest wishes count."""
        if self._budget.twins < 1 or not snapshot.full or snapshot.spec.network == "host" or snapshot.pinned:
            return
        with self._change:
            if self._closed:
                return
            self._wanted = [snapshot, *(one for one in self._wanted if not _same(one, snapshot))][: self._budget.twins]
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="twins", daemon=True)
                self._keeper.start()
            elif not any(_same(twin.snapshot, snapshot) for twin in self._there):
                self._change.notify_all()

    def has(self, snapshot: SnapshotRecord) -> bool:
        with self._change:
            return any(_same(twin.snapshot, snapshot) and not twin.failed for twin in self._there)

    @property
    def on(self) -> bool:
        return self._budget.twins > 0

    def take(self, snapshot: SnapshotRecord) -> _Twin | None:
        """The caller adopts it, or lets it go. One that is still on its way up is further than a restore that begins now."""
        with self._change:
            for twin in self._there:
                if _same(twin.snapshot, snapshot) and not twin.failed:
                    self._there.remove(twin)
                    return twin
        return None

    def known(self, snapshot: str) -> SnapshotRecord | None:
        """What is remembered of one that has a twin, or had; its row may have changed since."""
        with self._change:
            known = [*self._wanted, *(twin.snapshot for twin in self._there)]
        return next((one for one in known if one.id == snapshot), None)

    def waiting(self) -> list[str]:
        """The snapshots that have a twin which could be adopted at once."""
        with self._change:
            return [twin.snapshot.id for twin in self._there if twin.waits]

    def drop(self, snapshots: list[str] | None = None) -> None:
        """Let go of the twins of these snapshots, or of all, and wait until they are gone."""
        with self._change:
            gone = [twin for twin in self._there if snapshots is None or twin.snapshot.id in snapshots]
            self._there = [twin for twin in self._there if twin not in gone]
            self._wanted = [one for one in self._wanted if snapshots is not None and one.id not in snapshots]
        for twin in gone:
            twin.let_go()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
        self.drop()

    # -- the keeper -------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Ends when nothing is wanted and nothing waits."""
        while True:
            time.sleep(PATIENCE)
            missing, surplus = self._plan()
            for twin in surplus:
                twin.let_go()
            for snapshot in missing:
                self._add(snapshot)
            with self._change:
                if self._closed or not (self._wanted or self._there):
                    self._keeper = None
                    return
                if not missing:
                    self._change.wait(_LOOK_SECONDS)
            if self._store.gc_waits():  # for whatever is being made, and twins always are
                self.drop()

    def _plan(self) -> tuple[list[SnapshotRecord], list[_Twin]]:
        oldest = time.monotonic() - IDLE_SECONDS
        with self._change:
            stale = [twin.snapshot for twin in self._there if twin.since < oldest]
            wanted = [one for one in self._wanted if not any(_same(one, old) for old in stale)]
            self._wanted = self._affordable(wanted)
            kept = [
                twin
                for twin in self._there
                if not twin.failed and any(_same(twin.snapshot, one) for one in self._wanted)
            ]
            surplus = [twin for twin in self._there if twin not in kept]
            self._there = kept
            return [one for one in self._wanted if not any(_same(twin.snapshot, one) for twin in kept)], surplus

    def _affordable(self, wanted: list[SnapshotRecord]) -> list[SnapshotRecord]:
        left = self._budget.bytes
        kept = []
        for snapshot in wanted:
            size = trees.allocated_bytes(self._store.paths.image(snapshot.image))
            if size <= left:
                left -= size
                kept.append(snapshot)
        return kept

    def _add(self, snapshot: SnapshotRecord) -> None:
        suits = False
        with contextlib.suppress(OSError, ValueError):
            suits = not has_running_timers(self._store.paths.image(snapshot.image))
        with self._change:
            if suits and not self._closed:
                self._there.append(_Twin(self._store, snapshot, self._stock))
            else:
                self._wanted = [one for one in self._wanted if one.id != snapshot.id]
