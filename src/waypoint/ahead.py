"""What an engine that lives on has ready before it is needed: CRIU workers (kernel/template.py) and directories (store/spares.py).

When this process ends, however it ends, the workers find their sockets closed and end too, and what is left of the directories is
garbage for gc. What nobody needs is let go after a while: a worker has a mount namespace of its own, a copy of the host's.

A worker must keep the caller's locks should the caller die in the middle. A lock belongs to an open file, and that is shared with
the worker when it starts; it is locked when the work begins.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from waypoint.errors import WaypointError
from waypoint.guest.layer import make_run
from waypoint.identity import write_identity
from waypoint.kernel import criu, tools
from waypoint.kernel.chores import Chores
from waypoint.kernel.template import Template
from waypoint.model import Process
from waypoint.store import locks
from waypoint.store.spares import Spares
from waypoint.store.store import Store

__all__ = ["Ready", "Stock"]

IDLE_SECONDS = 30.0
PATIENCE = 0.008
"""The caller's next command is under way when more is made: together they would share the interpreter."""
_MOST_PATIENCE = 0.1
"""Nor is it made beside a restore that wants both processors, for so long."""
_FIRST_COMMAND = 0.006
"""That long after a restore its first command is under way, which is slower than those after it."""


def _ready_upper(upper: Path) -> None:
    write_identity(upper)
    make_run(upper)


@dataclass(slots=True)
class Ready:
    """The locks of one snapshot, which are not locked yet, and what there is for it."""

    lock: int
    gate: int
    ahead: bool
    """The engine lives on: it may do what makes a snapshot quicker."""
    _stock: Stock

    def dumper(self, init: Process, *, own_network: bool, written: bool = False) -> criu.Dumper:
        """For one dump of `init`'s tree. It keeps the locks."""
        hold = [self.gate, self.lock]
        return criu.Dumper(init.pid, own_network=own_network, hold=hold, written=written, template=self._stock.template)

    def staging(self, images: Path, snapshot: str) -> Path:
        """A directory for CRIU to write to: one that was made ahead, if gc has left it; the caller sees to it that it is there."""
        return self._stock.spares.take_image(images / f".{snapshot}")

    def close(self) -> None:
        os.close(self.gate)
        os.close(self.lock)


class Stock:
    """What one engine has ready. Used by any number of threads."""

    def __init__(self, store: Store, *, on: bool) -> None:
        self._store = store
        self._paths = store.paths
        self.spares = Spares(store, _ready_upper)
        self.template = Template(criu.cached_kernel_options) if on else None
        self.on = on
        self._lock = threading.Lock()
        self._restoring = 0
        self._restored = 0.0
        """When the last restore was done."""
        self._watched = self._expected = False
        self._later = Chores("refill", store.db.close)

    def ready(self, session: str) -> Ready:
        """For a snapshot of this session; the caller closes it."""
        lock = locks.open_lock(self._paths.session_lock(session))
        try:
            return Ready(lock, locks.open_lock(self._paths.gate), self.on, self)
        except BaseException:
            os.close(lock)
            raise

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

    def refill(self) -> None:
        """After an operation: soon, but not at once, and not beside a restore for as long as there is patience."""
        if self.on:
            self._refill_later(time.monotonic())

    def expect(self) -> None:
        """A command has ended, and somebody may want more than that next: what was let go of is made again."""
        if not (self._watched or self._expected):
            self._expected = True
            self.refill()

    def _refill_later(self, asked: float) -> None:
        def refill() -> None:
            with self._lock:
                now = time.monotonic()
                busy = self._restoring > 0 or now < self._restored + _FIRST_COMMAND
            if busy and now < asked + _MOST_PATIENCE:
                self._refill_later(asked)
            elif self.on:
                with contextlib.suppress(WaypointError, OSError):
                    self._refill()

        self._later.later(refill, PATIENCE)

    def _refill(self) -> None:
        self._expected = False
        own = tools.engine_criu()
        if self.template is not None and tools.is_quick(own):
            self.template.fill(own)
        with self._store.operation():
            self.spares.add()
        self._watch()

    def waiting(self) -> list[int]:
        """The workers' pids."""
        return [] if self.template is None else self.template.waiting()

    def close(self) -> None:
        with self._lock:
            self.on = False
        self._later.close()
        with contextlib.suppress(WaypointError, OSError):
            self.spares.drop()
        if self.template is not None:
            self.template.close()

    def _watch(self) -> None:
        with self._lock:
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
            if self.template is not None:
                self.template.drop(oldest)
            with self._lock:
                self._watched = self.spares.any_waiting() or bool(self.waiting())
            if not self._watched:
                self._store.db.close()
                return
