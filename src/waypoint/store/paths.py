"""Every path of a store, named once."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from waypoint.kernel.spread import spread_children
from waypoint.store.find import DATABASE, SESSION_LOCK, SESSIONS

__all__ = ["Paths"]


@dataclass(frozen=True)
class Paths:
    home: Path
    """Of what lies in it the directories are made out once: each operation names dozens of paths."""

    @cached_property
    def database(self) -> Path:
        return self.home / DATABASE

    @cached_property
    def gate(self) -> Path:
        """Held shared by every operation in flight, exclusively by gc: what no row names yet is not garbage then."""
        return self.home / "gate"

    @cached_property
    def queue(self) -> Path:
        """Passed on the way to the gate; gc holds it while it waits there, so that a busy store cannot starve it."""
        return self.home / "queue"

    @cached_property
    def layers(self) -> Path:
        """Short names, since overlay option strings are made of them."""
        return self.home / "l"

    @cached_property
    def bases(self) -> Path:
        return self.home / "b"

    def base(self, base: str) -> Path:
        return self.bases / base

    @property
    def builder(self) -> Path:
        """The image builder's own storage."""
        return self.home / "builder"

    def layer(self, layer: int) -> Path:
        return self.layers / str(layer)

    def upper(self, layer: int) -> Path:
        return self.layers / f"{layer}/d"

    def work(self, layer: int) -> Path:
        return self.layers / f"{layer}/w"

    @cached_property
    def images(self) -> Path:
        return self.home / "i"

    def image(self, snapshot: str) -> Path:
        return self.images / snapshot

    @cached_property
    def sessions(self) -> Path:
        return self.home / SESSIONS

    def session(self, session: str) -> Path:
        return self.sessions / session

    def session_lock(self, session: str) -> Path:
        return self.sessions / f"{session}/{SESSION_LOCK}"

    def make(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o700)
        for directory in (self.layers, self.bases, self.images, self.sessions):
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
                spread_children(str(directory))
