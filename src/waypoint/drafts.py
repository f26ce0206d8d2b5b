"""Snapshots ahead of the asking, and none where nothing has changed.

An agent thinks between its commands. With drafts on, the state after each command is saved meanwhile; `snapshot` then only has to
give it a row. The draft is the session as it was a moment after its last command, and it is used only if nobody has talked to the
session since, from this process or any other, nothing was written into it from outside, and its own processes have not run for
longer than `slack`. Otherwise a snapshot is taken as ever. Without a row a draft is garbage, and is gone with this process.

The same marks tell that nothing has happened since the last snapshot at all: then the next one is a second row for the same image.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from waypoint.capture import Taken
from waypoint.errors import SessionDead, WaypointError
from waypoint.guest import frames
from waypoint.guest.connection import Connection, connect
from waypoint.guest.links import Links
from waypoint.kernel import pulse
from waypoint.kernel.chores import Chores
from waypoint.model import Process, SessionRecord, SnapshotRecord
from waypoint.store import locks
from waypoint.store.rows import manifest_text
from waypoint.store.store import Store

if TYPE_CHECKING:
    from waypoint.session import Session

__all__ = ["Drafting", "Drafts"]

_SETTLE = 0.003
"""CRIU lets the processes go one by one; by then each is back where it waited."""
_MOST = 8
_TRIES = 10
_IDLE_SECONDS = 120.0
_LOOK_SECONDS = 0.03
"""To be woken would take its waker longer."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """Whether and when to save ahead."""

    on: bool = False
    delay: float = 0.02
    """Commands that follow each other faster than this are not saved in between."""
    bytes: int = 256 << 20
    """Sessions whose processes have more memory than this are not saved unless somebody asks."""
    slack: float = 0.005
    """Seconds of processor time that background processes may have had since, for a draft to be used all the same."""


@dataclass(slots=True)
class _Standing:
    """The newest capture of one session, and by which to tell whether it is still what the session is."""

    record: SnapshotRecord
    taken: Taken
    init: Process
    epoch: int
    named: bool
    kept: ExitStack
    since: float = field(default_factory=time.monotonic)
    settled: bool = False
    clocks: pulse.Clocks | None = None
    """Since it had settled."""
    still: bool = False
    """Between the capture and that no process has read or written anything."""
    manifest: str = ""
    """As its row will have it."""
    link: Connection | None = None
    """To the session's init, by which to ask it later."""
    _settling: threading.Lock = field(default_factory=threading.Lock)

    def settle(self) -> None:
        """Once, when CRIU has let all of them go."""
        with self._settling:
            if self.settled or self.taken.marks is None:
                return
            self.clocks = pulse.Clocks(self.init.pid)
            before = {pid: counts for pid, counts in self.taken.marks.io.items() if pid != self.init.pid}
            self.still = pulse.io_counts(before) == before
            self.manifest = "" if self.named else manifest_text(self.record)
            with contextlib.suppress(SessionDead, OSError):
                self.link = connect(self.init, self.record.session, 1)
                self.link.written = self.taken.marks.written
            self.settled = True

    def ask(self) -> bool:
        """Send its init a question, which `requests` hears the answer to."""
        with contextlib.suppress(SessionDead, OSError):
            if self.link is None:
                self.link = connect(self.init, self.record.session, 1)
            return self.link.send(frames.HELLO)
        return False

    def requests(self) -> int:
        """How many it has had; -1 when it is at one, or does not say."""
        with contextlib.suppress(TimeoutError, OSError):
            frame = None if self.link is None else self.link.receive(time.monotonic() + 1)
            if frame is not None:
                told = dict(line.partition(b"=")[::2] for line in frame.payload.splitlines())
                return int(told.get(b"requests", -1)) if told.get(b"current") == b"0" else -1
        return -1

    def close(self) -> None:
        """Of what it holds to be quick."""
        if self.link is not None:
            self.link.close()
        if self.clocks is not None:
            self.clocks.close()


class Drafts:
    """Those of one engine. Used by any number of threads."""

    def __init__(
        self,
        store: Store,
        plan: Drafting,
        take: Callable[[str, int], tuple[Taken, SessionRecord] | None],
        chores: Chores | None,
        links: Links,
    ) -> None:
        """`take` makes a draft of a session, or none if it has more memory; `chores` runs what nobody waits for."""
        self._store = store
        self._plan = plan
        self._take = take
        self._chores = chores
        self._links = links
        self._change = threading.Condition()
        self._due: dict[str, float] = {}
        self._making: set[str] = set()
        self._standing: dict[str, _Standing] = {}
        self._worker: threading.Thread | None = None
        self._closed = False

    @property
    def on(self) -> bool:
        return self._plan.on

    def allow(self, plan: Drafting) -> None:
        """From now on; whoever shares this engine and has drafts on keeps them."""
        if plan.on:
            self._plan = plan

    # -- what the session tells ---------------------------------------------------------------------------------------

    def stir(self, session: str) -> None:
        """Somebody is about to do something with the session."""
        with self._change:
            self._due.pop(session, None)
            self._making.discard(session)
            old = self._standing.pop(session, None)
        if old is not None:
            if old.link is not None:
                self._links.keep(session, old.link, old.epoch)
                old.link = None
            self._forget(old)

    def later(self, session: str) -> None:
        """A command has ended: save the session soon, unless the next one comes first."""
        if self._plan.on and self._chores is not None:
            with self._change:
                self._due[session] = time.monotonic() + self._plan.delay
                if self._worker is not None:
                    return  # it looks by itself
            self._chores.later(self._begin, self._plan.delay, lazily=True)

    def _begin(self) -> None:
        with self._change:
            if self._due:
                self._work()

    def note(self, session: SessionRecord, taken: Taken) -> None:
        """A snapshot was just taken; the session ran on."""
        if self._chores is None or taken.marks is None or taken.marks.requests < 0:
            return
        init = Process(session.init_pid, session.init_start)
        self._keep(session.id, _Standing(taken.record, taken, init, session.epoch, True, ExitStack()))
        self._chores.later(self._settle_soon, _SETTLE, lazily=True)  # to start a thread takes its caller longer

    def _settle_soon(self) -> None:
        with self._change:
            self._work()

    def claim(self, session: Session, name: str | None, snapshot: str, began: float) -> SnapshotRecord | None:
        """A row for what stands, if the session still is that; None: take a snapshot. The caller holds no lock."""
        with self._change:
            self._due.pop(session.id, None)
            if session.id not in self._standing:
                return None
        with self._store.operation(), locks.exclusive(self._store.paths.session_lock(session.id)):
            with self._change:
                found = self._standing.pop(session.id, None)
            if found is None:
                return None
            try:
                record = self._named(found, name, snapshot, began) if self._holds(found, session.id) else None
            except BaseException:
                self._forget(found)
                raise
            if record is None:
                self._forget(found)
                return None
            self._keep(session.id, replace(found, record=record, named=True, kept=ExitStack()))
            found.kept.close()
            return record

    def _holds(self, found: _Standing, session: str) -> bool:
        """As far as its processes tell; the rows are looked at when the new one is written."""
        marks = found.taken.marks
        if marks is None or self._store.written(session) != marks.written:
            return False
        if time.monotonic() - found.since >= _SETTLE:
            found.settle()
        if not found.ask():
            return False
        ran = found.clocks.ran() if found.clocks is not None else None  # while init, which is not among them, answers
        if ran is None or (ran > 0 or not found.still if found.named else ran > self._plan.slack * 1e9):
            return False
        return found.requests() == marks.requests

    def _named(self, found: _Standing, name: str | None, snapshot: str, began: float) -> SnapshotRecord | None:
        """None: the session's row says that it is not that any more."""
        took = (time.perf_counter() - began) * 1000
        if not found.named:
            record = replace(found.record, name=name, duration_ms=took)
            added = self._store.db.add_draft(record, found.manifest or manifest_text(record), found.init)
        else:
            record = replace(
                found.record, id=snapshot, name=name, parent=found.record.id, created=time.time(), duration_ms=took,
                paused_ms=0.0, files_bytes=0, memory_bytes=0, shares=found.record.image,
            )  # fmt: skip
            added = self._store.db.add_copy(record, found.record.id, found.init)
        return record if added else None

    # -- the worker -------------------------------------------------------------------------------------------------

    def standing(self, session: str) -> bool:
        """A draft of it is there that has no row yet."""
        with self._change:
            found = self._standing.get(session)
            return found is not None and not found.named and found.settled

    def drop(self) -> None:
        """All that has no row."""
        with self._change:
            gone = [one for one in self._standing.values() if not one.named]
            self._standing = {key: one for key, one in self._standing.items() if one.named}
            self._due.clear()
            self._making.clear()
        for one in gone:
            self._forget(one)

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join(30)
        self.drop()
        with self._change:
            named, self._standing = self._standing, {}
        for one in named.values():
            one.close()

    def _work(self) -> None:
        """Called with the lock held."""
        if self._worker is None and not self._closed:
            self._worker = threading.Thread(target=self._run, name="drafts", daemon=True)
            self._worker.start()
        self._change.notify_all()

    def _run(self) -> None:
        """Ends when nothing is due and nothing stands."""
        try:
            while True:
                with self._change:
                    now = time.monotonic()
                    due = next((session for session, at in self._due.items() if at <= now), None)
                    if due is None:
                        unsettled = [one for one in self._standing.values() if not one.settled]
                        if self._closed or not (self._due or any(not one.named for one in self._standing.values()) or unsettled):
                            self._worker = None
                            return
                        next_due = min([*self._due.values(), *(one.since + _SETTLE for one in unsettled), now + _LOOK_SECONDS])
                        self._change.wait(max(0.001, next_due - now))
                    else:
                        del self._due[due]
                        self._making.add(due)
                if due is not None:
                    self._draft(due)
                self._look_after()
        finally:
            self._store.db.close()

    def _draft(self, session: str) -> None:
        with ExitStack() as kept:
            kept.enter_context(locks.shared(self._store.paths.gate))  # gc must not take it for garbage
            with contextlib.suppress(WaypointError, OSError):
                made = self._take(session, self._plan.bytes)
                if made is None:
                    return
                taken, record = made
                self._store.keep(taken.record, kept)
                one = _Standing(taken.record, taken, Process(record.init_pid, record.init_start), record.epoch, False, kept.pop_all())
                with self._change:
                    wanted = session in self._making and not self._closed
                    self._making.discard(session)
                if wanted:
                    self._keep(session, one)
                else:  # the next command has come meanwhile
                    self._forget(one)

    def _look_after(self) -> None:
        with self._change:
            now = time.monotonic()
            fresh = [one for one in self._standing.values() if not one.settled and now - one.since >= _SETTLE]
            stale = [key for key, one in self._standing.items() if now - one.since > _IDLE_SECONDS]
        for one in fresh:
            one.settle()
        for key in stale:
            self.stir(key)
        if self._store.gc_waits():
            self.drop()

    def _keep(self, session: str, one: _Standing) -> None:
        with self._change:
            old = [self._standing.pop(session, None)]
            self._standing[session] = one
            while len(self._standing) > _MOST:
                old.append(self._standing.pop(next(iter(self._standing))))
        for gone in old:
            if gone is not None:
                self._forget(gone)

    def _forget(self, one: _Standing) -> None:
        """What has no row is garbage from here on."""
        one.kept.close()
        one.close()
        if one.named or self._chores is None:
            return

        def discard() -> None:
            for _ in range(_TRIES):
                with self._store.operation():
                    self._store.discard_image(one.record.id)
                    self._store.discard_layers(list(one.record.layers))
                if not self._store.paths.image(one.record.id).exists():
                    return
                time.sleep(0.02)  # a child that was being started has our lock until it is another program

        self._chores.later(discard, lazily=True)
