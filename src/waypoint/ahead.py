"""CRIU workers that are started before they are needed: starting and linking one takes a third of a small snapshot's time.

A worker waits on its socket and does nothing; when this process ends, however it ends, its workers find their socket closed and
end too. What they hold meanwhile is a mount namespace of their own (and a dumper its session's network namespace), so a worker
that nobody needs is let go after a while.

The locks: a worker must keep the caller's locks should the caller die in the middle. A lock belongs to an open file, and that is
shared with the worker when it starts; it is locked when the work begins.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from waypoint.errors import NotFound, WaypointError
from waypoint.identity import write_identity
from waypoint.kernel import criu, processes
from waypoint.kernel.chores import Chores
from waypoint.model import Process, SessionRecord, new_id
from waypoint.store import locks
from waypoint.store.spares import Spares
from waypoint.store.store import Store

__all__ = ["Ready", "Restorer", "Stock"]

MOST_DUMPERS = 4
MOST_RESTORERS = 2
IDLE_SECONDS = 30.0
PATIENCE = 0.008
"""The caller's next command is under way when a worker is started: together they would share the interpreter."""
_ENOUGH_PATIENCE, _MOST_PATIENCE = 0.05, 0.1
"""Nor is one started beside a restore that wants both processors, for so long: if none is left for the next, and if one is."""
_FIRST_COMMAND = 0.006
"""That long after a restore its first command is under way, which is slower than those after it."""


@dataclass(slots=True)
class Ready:
    """The locks of one snapshot, and a worker that was started for it while there was other work to do."""

    lock: int
    gate: int
    init: Process
    ahead: bool
    """The engine lives on: it may do what makes a snapshot quicker."""
    _dumper: criu.Dumper | None
    _staging: Path | None = None
    since: float = field(default_factory=time.monotonic)

    def dumper(self, init: Process, *, own_network: bool, written: bool = False) -> criu.Dumper:
        """For one dump of `init`'s tree: the waiting one, if it waits for that, else a new one."""
        waiting, self._dumper = self._dumper, None
        if waiting is not None:
            if self.init == init and waiting.written == written and waiting.there():
                return waiting
            waiting.close()
        return criu.Dumper(init.pid, own_network=own_network, hold=[self.gate, self.lock], written=written)

    def make_staging(self, images: Path) -> None:
        staging = images / f".{new_id('p')}"
        with contextlib.suppress(OSError):  # then it is the snapshot's to make, and to say what is wrong
            staging.mkdir()
            self._staging = staging

    def staging(self, images: Path, snapshot: str) -> Path:
        """A directory for CRIU to write to: the one that was made, if gc has left it."""
        made, self._staging = self._staging, None
        staging = made or images / f".{snapshot}"
        staging.mkdir(exist_ok=made is not None)
        return staging

    def usable(self, init: Process) -> bool:
        return self.init == init and self._dumper is not None and self._dumper.there()

    @property
    def pid(self) -> int:
        return 0 if self._dumper is None else self._dumper.pid

    def close(self) -> None:
        if self._dumper is not None:
            self._dumper.close()
        if self._staging is not None:
            with contextlib.suppress(OSError):
                self._staging.rmdir()
        os.close(self.gate)
        os.close(self.lock)


@dataclass(frozen=True, slots=True)
class Restorer:
    """A worker that can restore any session without cgroups of its own, and the lock that it shares."""

    waiting: criu.Waiting
    gate: int
    since: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        self.waiting.close()
        os.close(self.gate)


class Stock:
    """What one engine has waiting. Used by any number of threads."""

    def __init__(self, store: Store, *, on: bool, tracks: Callable[[str], bool] = lambda _: False) -> None:
        """`tracks`: of which sessions the next snapshot is a delta."""
        self._store = store
        self._paths = store.paths
        self.spares = Spares(store, write_identity)
        self._tracks = tracks
        self.on = on
        self._lock = threading.Lock()
        self._dumpers: dict[str, Ready] = {}
        self._restorers: list[Restorer] = []
        self._restoring = 0
        self._restored = 0.0
        """When the last restore was done."""
        self._watched = False
        self._later = Chores("refill", store.db.close)

    def ready(self, session: SessionRecord) -> Ready:
        """For a snapshot of this session; the caller closes it."""
        init = Process(session.init_pid, session.init_start)
        with self._lock:
            waiting = self._dumpers.pop(session.id, None)
        if waiting is not None:
            if waiting.usable(init):
                return waiting
            waiting.close()
        return self._make_ready(session, init)

    def _make_ready(self, session: SessionRecord, init: Process) -> Ready:
        with contextlib.ExitStack() as undo:
            lock = locks.open_lock(self._paths.session_lock(session.id))
            undo.callback(os.close, lock)
            gate = locks.open_lock(self._paths.gate)
            undo.callback(os.close, gate)
            own_network = session.spec.network != "host"
            dumper = None
            if not session.spec.files_only:
                written = self._tracks(session.id)
                dumper = criu.Dumper(init.pid, own_network=own_network, hold=[gate, lock], written=written)
            undo.pop_all()
        return Ready(lock, gate, init, self.on, dumper)

    def restorer(self) -> Restorer | None:
        """One that waits, if there is one; the caller closes its gate when the worker is used up."""
        while True:
            with self._lock:
                found = self._restorers.pop() if self._restorers else None
            if found is None or found.waiting.waits():
                return found
            found.close()

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """While a caller waits for a restore."""
        with self._lock:
            self._restoring += 1
        try:
            yield
        finally:
            with self._lock:
                self._restoring -= 1
                self._restored = time.monotonic()

    def refill(self, session: str | None) -> None:
        """After an operation: have a worker for the next snapshot of this session, and one for the next restore or fork."""
        if not self.on:
            return
        if session is not None:
            self._add(lambda: self._keep_ready(session))
        self._add(self._add_restorer, for_restore=True)

    def _add(self, start: Callable[[], None], *, for_restore: bool = False, asked: float | None = None) -> None:
        """Soon, but not at once, and not beside a restore for as long as there is patience."""
        asked = asked or time.monotonic()

        def add() -> None:
            with self._lock:
                patience = _MOST_PATIENCE if for_restore and self._restorers else _ENOUGH_PATIENCE
                now = time.monotonic()
                busy = self._restoring > 0 or now < self._restored + _FIRST_COMMAND
                waits = busy and now < asked + patience
            if waits:
                self._add(start, for_restore=for_restore, asked=asked)
            elif self.on:
                with contextlib.suppress(WaypointError, OSError):
                    start()

        self._later.later(add, PATIENCE)

    def _add_restorer(self) -> None:
        with self._lock:
            enough = len(self._restorers) >= MOST_RESTORERS
        if not enough:
            gate = locks.open_lock(self._paths.gate)
            self._keep_restorer(Restorer(criu.start_restorer([gate]), gate))
        with self._store.operation():
            self.spares.add()

    def _keep_ready(self, wanted: str) -> None:
        """Of a session that has gone by now nothing is kept."""
        session = self._store.db.session(wanted)
        init = Process(session.init_pid, session.init_start)
        if session.spec.files_only or not processes.alive(init):  # ended, and about to be removed
            return
        with self._lock:
            there = self._dumpers.get(session.id)
            if session.state != "live" or (there is not None and there.usable(init)):
                return
        fresh = self._make_ready(session, init)
        with self._store.operation():
            fresh.make_staging(self._paths.images)
        with self._lock:
            old = [self._dumpers.pop(session.id, None)]
            self._dumpers[session.id] = fresh
            while len(self._dumpers) > MOST_DUMPERS:
                old.append(self._dumpers.pop(next(iter(self._dumpers))))
            self._watch()
        self._close(*old)
        try:
            self._store.db.session(session.id)
        except NotFound:  # it was removed meanwhile: whoever did that has not seen this one
            self.drop(session.id)

    def _keep_restorer(self, fresh: Restorer) -> None:
        with self._lock:
            self._restorers.append(fresh)
            self._watch()

    def drop(self, session: str) -> None:
        """The session is ended: nothing of ours may keep its namespaces."""
        with self._lock:
            waiting = self._dumpers.pop(session, None)
        self._close(waiting)

    def close(self) -> None:
        with self._lock:
            self.on = False
        self._later.close()
        with contextlib.suppress(WaypointError, OSError):
            self.spares.drop()
        with self._lock:
            waiting: list[Ready | Restorer] = [*self._dumpers.values(), *self._restorers]
            self._dumpers.clear()
            self._restorers.clear()
        self._close(*waiting)

    def waiting(self) -> list[int]:
        """The workers' pids."""
        with self._lock:
            dumpers = [one.pid for one in self._dumpers.values()]
            return [*dumpers, *(one.waiting.worker.pid for one in self._restorers)]

    def _close(self, *waiting: Ready | Restorer | None) -> None:
        for one in waiting:
            if one is not None:
                one.close()

    def _watch(self) -> None:
        """Called with the lock held."""
        if not self._watched:
            self._watched = True
            threading.Thread(target=self._let_go, name="let-go", daemon=True).start()

    def _let_go(self) -> None:
        """Ends when nothing waits any more."""
        while True:
            time.sleep(IDLE_SECONDS / 4)
            oldest = time.monotonic() - IDLE_SECONDS
            with contextlib.suppress(WaypointError, OSError):
                self.spares.drop(oldest)
            with self._lock:
                stale: list[Ready | Restorer] = [one for one in self._dumpers.values() if one.since < oldest]
                stale += [one for one in self._restorers if one.since < oldest]
                self._dumpers = {key: one for key, one in self._dumpers.items() if one.since >= oldest}
                self._restorers = [one for one in self._restorers if one.since >= oldest]
                spare = self.spares.waiting() or self.spares.waiting_sessions()
                if not self._dumpers and not self._restorers and not spare:
                    self._watched = False
            self._close(*stale)
            if not self._watched:
                self._store.db.close()
                return
