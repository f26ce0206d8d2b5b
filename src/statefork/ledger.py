"""Who is told of every change that another process would have to know to take a tree over.

The library keeps its tree in memory and tells nobody; the daemon writes it down. What is told is told before the old
state is removed and after the new one has answered, so that whoever reads it after a kill -9 finds things that exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from statefork.model import Snapshot

__all__ = ["EnvironmentNote", "Ledger", "SnapshotNote"]


@dataclass(frozen=True, slots=True)
class SnapshotNote:
    snapshot: Snapshot
    handle: Any
    """`Driver.note_of` the stored state: plain JSON."""


@dataclass(frozen=True, slots=True)
class EnvironmentNote:
    id: str
    state: str
    place: str | None
    """The place of what is live, or stands still; None where a pause has ended it."""
    live: Mapping[str, Any] | None
    """`Live.note` of it."""
    paused_at: str | None
    origin: str | None
    latest: str | None
    shell_anew: bool


class Ledger(Protocol):
    """Called on the thread that makes the change, which goes on when the call returns."""

    def snapshot(self, note: SnapshotNote) -> None:
        """New or renamed; the environment that it was taken of has it as its latest."""
        ...

    def snapshot_gone(self, snapshot: str) -> None: ...
    def environment(self, note: EnvironmentNote) -> None: ...
    def environment_gone(self, environment: str) -> None: ...
