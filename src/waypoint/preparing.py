"""What a snapshot gets ready while the session's shell gives its account of itself, and that account.

Nothing of it touches the session. Only the copying of much memory comes before the shell is asked: that may take long, and the
account is to be of the moment before everything stops.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from waypoint.ahead import Ready
from waypoint.deltas import Delta, Deltas
from waypoint.errors import WaypointError
from waypoint.guest.commands import Link
from waypoint.kernel import criu, obstacles
from waypoint.manifest import ask_shell
from waypoint.model import BaseRecord, ExecResult, Process, SessionRecord
from waypoint.sealing import Sealing, is_big, parent_of
from waypoint.store.store import Store

__all__ = ["NoDraft", "Preparing"]


class NoDraft(WaypointError):
    """This session cannot be saved without being ended for a moment, or without much work: not unless somebody asks."""


@dataclass
class Preparing:
    """The caller holds the session's lock; what `stack` gets it closes."""

    store: Store
    session: SessionRecord
    sealing: Sealing
    ready: Ready
    deltas: Deltas
    staging: Path
    stack: contextlib.ExitStack
    whole: bool
    end_session: bool
    draft: bool
    ends: bool = False
    """The session's processes do, with the snapshot."""
    _delta: Delta | None = None
    _dumper: criu.Dumper | None = None
    _problem: BaseException | None = None
    """What went wrong while the shell answered: that says nothing about the shell."""

    @cached_property
    def base(self) -> BaseRecord:
        return self.store.base(self.session.base)

    @property
    def delta(self) -> Delta:
        assert self._delta is not None
        return self._delta

    @property
    def dumper(self) -> criu.Dumper:
        assert self._dumper is not None
        return self._dumper

    def ask(self, link: Link) -> ExecResult | None:
        """What the shell says of itself, None if it is busy; all is ready then."""
        if self.deltas.tracks(self.session.id):
            self._copy()
        said = ask_shell(link, self._meanwhile)
        if self._delta is None and self._problem is None:
            self._copy()
            said = ask_shell(link, self._meanwhile)
        if self._problem is not None:
            raise self._problem
        self._begin()  # if the shell is busy
        return said

    def _meanwhile(self) -> None:
        if self._problem is None:
            try:
                self._begin()
            except BaseException as error:  # noqa: BLE001  when the shell has answered
                self._problem = error

    def _copy(self, big: set[Process] | None = None) -> None:
        """What is much; without that it takes no time. `big`: see `Deltas.begin`."""
        obstacles.refuse_queues(self.session.init_pid)
        self.staging.mkdir(exist_ok=True)
        self._delta = self.deltas.begin(self.session, self.staging, self._origin, whole=self.whole, big=big)
        self.stack.callback(self._delta.give_up)

    def _begin(self) -> None:
        """Called once or more. Where much is to be copied first, it does nothing until that is done."""
        init = Process(self.session.init_pid, self.session.init_start)
        if self._delta is None:
            big = self.deltas.finds_much(init, whole=self.whole)
            if big:
                return
            self._copy(big)
        if self._dumper is None:
            self._decide()
            # it keeps the locks: if we die, CRIU lets the tree go on; until it has, nobody else may touch it
            own_network = self.session.spec.network != "host"
            dumper = self.ready.dumper(init, own_network=own_network, written=self.delta.written)
            self.stack.enter_context(dumper)
            dumper.begin(self.staging, leave_running=not self.ends, unmounted=self.end_session)
            self._dumper = dumper
        if not self.ends:
            self.sealing.prepare()

    def _decide(self) -> None:
        sealing = self.sealing
        sealing.rehome = not self.end_session and is_big(self.session, sealing.upper, draft=self.draft) and not self.base.flat
        if not (sealing.rehome or self.end_session):
            sealing.drop_merged()
        if self.draft and sealing.rehome:
            raise NoDraft(f"session {self.session.id} has changed too many files to be saved ahead")
        self.ends = sealing.rehome or self.end_session

    def _origin(self) -> str | None:
        parent = parent_of(self.store, self.session)
        return None if parent is None or not parent.full else parent.image
