"""One environment in the daemon's hands: its record, its live object, who is using it, and its commands."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from statefork.environment import Environment
from statefork.errors import SessionDead
from statefork.server.service.command import Command
from statefork.server.service.records import EnvironmentRow

__all__ = ["Held"]

KEPT_COMMANDS = 32


@dataclass(slots=True, eq=False)
class Held:
    row: EnvironmentRow
    environment: Environment | None
    """None: it ended with an earlier process of the daemon (`row.lost` says why), and only its name is left."""
    backend: str
    active: int = 0
    """Calls under way; it is not idle meanwhile."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is paused for idleness and resumed from it."""
    commands: OrderedDict[str, Command] = field(default_factory=OrderedDict)
    gone: bool = False

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def state(self) -> str:
        return self.environment.state if self.environment is not None else "lost"

    @property
    def lost(self) -> str | None:
        if self.environment is not None:
            return self.environment.lost or None
        return self.row.lost or "it ended with an earlier process of the daemon"

    @property
    def live(self) -> Environment:
        """Raises: SessionDead."""
        if self.environment is None:
            raise SessionDead(f"environment {self.id} is lost: {self.lost}; delete it and make another")
        return self.environment

    @property
    def running(self) -> int:
        return sum(not command.done.is_set() for command in self.commands.values())

    def idle_since(self) -> float | None:
        """None while it is in use."""
        busy = any(not command.done.is_set() and not command.dozes for command in self.commands.values())
        return None if self.active or busy or self.gone else self.row.used

    def touch(self) -> None:
        self.row.used = time.time()

    def keep(self, command: Command) -> None:
        self.commands[command.id] = command
        if len(self.commands) > KEPT_COMMANDS:
            for old in [c for c in self.commands.values() if c.done.is_set()][: len(self.commands) - KEPT_COMMANDS]:
                del self.commands[old.id]

    def drop(self, command: Command) -> None:
        self.commands.pop(command.id, None)
