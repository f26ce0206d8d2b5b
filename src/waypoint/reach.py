"""The light way to a live session: for a caller that only runs a command in it and lives for milliseconds.

It says and does what `Session.connect` does, and calls on it for everything but the plain case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from waypoint.guest import commands
from waypoint.guest.connection import Connection, connect
from waypoint.kernel import processes
from waypoint.outcomes import Process
from waypoint.store import locks
from waypoint.store.find import Finder

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence
    from typing import BinaryIO

__all__ = ["Reach"]


class Reach:
    """A session by id, name or unique prefix. LookupError when it takes the engine to say or do what is right."""

    def __init__(self, home: str, key: str) -> None:
        self._home = home
        try:
            self._finder = Finder(home)
        except FileNotFoundError as error:
            raise LookupError(home) from error
        row = self._finder.session(key)
        if row is None or not _plain(row):
            raise LookupError(key)
        self.session: str = row["id"]
        self._spec: str = row["spec"]

    def run_request(self, argv: Sequence[str], stdin: BinaryIO | None) -> commands.Request:
        """As the engine's sessions make it."""
        import json

        start = json.loads(self._spec)["start"]
        env = commands.BASIC_ENVIRONMENT | dict(start["env"])
        cwd = "" if start["workdir"] == "~" else start["workdir"]
        return commands.run_request(argv, env=list(env.items()), user=start["user"], cwd=cwd, stdin=stdin)

    def connect(self) -> tuple[Connection, int]:
        """As the engine's sessions do it: waits while a snapshot or restore of this session is under way."""
        with locks.shared(self._finder.lock(self.session)):
            row = self._finder.session(self.session)
            if row is not None and _alive(row):
                return connect(Process(row["init_pid"], row["init_start"]), self.session), row["epoch"]
        return self._engine_connects()

    def leave(self, connection: Connection, epoch: int) -> None:
        """This is for one command."""
        connection.close()

    def _engine_connects(self) -> tuple[Connection, int]:
        """It knows how to say why not."""
        from pathlib import Path

        from waypoint.engine import Engine

        with Engine(Path(self._home)) as engine:
            return engine.session(self.session).connect()


def _alive(row: sqlite3.Row) -> bool:
    return (
        row["state"] == "live"
        and row["boot"] == processes.boot_id()
        and processes.alive(Process(row["init_pid"], row["init_start"]))
    )


def _plain(row: sqlite3.Row) -> bool:
    """Nothing is to be done around the command: no snapshot before it, and there are processes at all."""
    spec: str = row["spec"]
    return _alive(row) and '"auto_snapshot": true' not in spec and '"files_only": true' not in spec
