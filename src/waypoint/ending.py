"""End a session at a snapshot: for pause, and for re-homing, which makes the session's own upper a sealed layer.

That layer is good only if no process writes to it after the instant of the snapshot. Killing the processes and committing
the rows cannot be one step, so an intent is written first, while the tree is frozen. Whoever finds an intent later looks
at the tree: if it lives, its caller died before it was ended, and nothing has happened; if it is gone, the snapshot is
whole and the rows are completed. Until then the snapshot does not exist.
"""

from __future__ import annotations

import contextlib
import shutil
import time

from waypoint import bringup
from waypoint.errors import WaypointError
from waypoint.guest.layer import PRIVATE
from waypoint.kernel import aliases, moved, processes, trees
from waypoint.model import Process, SessionRecord
from waypoint.store.store import Store

__all__ = ["resolve"]


def resolve(store: Store, session: SessionRecord, boot: str) -> SessionRecord:
    """Complete or drop the intent that a caller left behind. The caller holds the session's lock, or the gate alone."""
    intent = store.db.ending(session.id)
    if intent is None:
        return session
    init = Process(session.init_pid, session.init_start)
    if session.boot == boot and _lives(init):
        whole = False
    else:
        # it may have been let go on and have died since: then its files have changed
        upper = store.paths.upper(session.upper or 0)
        whole = moved.begun(upper.parent) or not trees.changed_since(upper, intent.frozen_ns, skip=PRIVATE)
    if whole:
        if moved.begun(upper.parent):
            moved.move(upper.parent)
        store.db.complete_ending(session.id)
        moved.forget(upper.parent)
        live = bringup.Live(init, session.upper or 0, session.layers, session.spec)
        if session.boot == boot:
            bringup.retire(store, live, wait=True)
        work = store.paths.work(live.upper)
        aliases.Hidden(work / "index").forget_files()  # as capture.take does
        trees.discard_tree(work)
    else:
        store.db.drop_ending(session.id)
        shutil.rmtree(store.paths.image(intent.snapshot), ignore_errors=True)
    return store.db.session(session.id)


def _lives(init: Process, timeout: float = 10) -> bool:
    """It answers. A process that was killed may still be seen for an instant."""
    deadline = time.monotonic() + timeout
    while processes.alive(init):
        with contextlib.suppress(WaypointError, TimeoutError):
            bringup.handshake(init, "that was about to end", timeout=2)
            return True
        if time.monotonic() > deadline:
            return True
    return False
