"""Waypoint's sessions as subjects, without the layer of StateFork's Environment around them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from statefork.model import ExecResult
from statefork.testing.fidelity.subject import Options
from waypoint.deltas import Tracking
from waypoint.drafts import Drafting
from waypoint.engine import Engine
from waypoint.guest import frames
from waypoint.guest.connection import Connection
from waypoint.model import ExecResult as SessionResult
from waypoint.model import Limits
from waypoint.session import Session
from waypoint.twins import Budget

__all__ = ["CAPABILITIES", "SessionSubject", "engine_with", "opener", "opener_of"]

CAPABILITIES = frozenset({"files", "processes", "memory", "shell", "terminal", "network", "ipc"})


class _Channel:
    def __init__(self, connection: Connection, rows: int, columns: int) -> None:
        self._connection = connection
        connection.send(frames.TERMINAL, 0, frames.SIZE.pack(rows, columns))

    def send(self, data: bytes) -> None:
        self._connection.send(frames.KEYS, 0, data)

    def receive(self, timeout: float) -> bytes | None:
        try:
            frame = self._connection.receive(time.monotonic() + timeout)
        except TimeoutError:
            return b""
        if frame is None:
            return None
        return frame.payload if frame.type == frames.KEYS else b""

    def resize(self, rows: int, columns: int) -> None:
        self._connection.send(frames.RESIZE, 0, frames.SIZE.pack(rows, columns))

    def close(self) -> None:
        self._connection.close()


class SessionSubject:
    """One session."""

    def __init__(self, engine: Engine, session: Session) -> None:
        self._engine = engine
        self.session = session

    def exec_command(
        self, command: str, *, timeout: float | None = None, stdin: bytes | str | None = None
    ) -> ExecResult:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        return _result(self.session.exec(command, timeout=timeout, stdin=data))

    def run(self, argv: Sequence[str], *, timeout: float | None = None) -> ExecResult:
        return _result(self.session.run(argv, timeout=timeout))

    def snapshot(self, name: str | None = None) -> str:
        return self.session.snapshot(name).id

    def restore(self, snapshot: str) -> None:
        self.session.restore(snapshot)

    def fork(self, n: int = 1, *, from_snapshot: str | None = None) -> list[SessionSubject]:
        return [SessionSubject(self._engine, fork) for fork in self.session.fork(n, from_snapshot=from_snapshot)]

    def not_captured(self, snapshot: str) -> tuple[str, ...]:
        return self._engine.store.db.snapshot(snapshot).capture.not_captured

    def open_terminal(self, rows: int, columns: int) -> _Channel:
        connection, _ = self.session.connect()
        return _Channel(connection, rows, columns)

    def destroy(self) -> None:
        """The first session of a tree takes the tree's snapshots with it."""
        tree = self.session.record.tree
        self.session.remove()
        if tree == self.session.id:
            for snapshot in self._engine.snapshots(tree):
                if snapshot.parent is None:
                    self._engine.remove_snapshot(snapshot.id, recursive=True)


def opener(home: Path) -> Callable[[Options], SessionSubject]:
    """Makes sessions over the host's own root in the store at `home`."""
    return opener_of(Engine(home, ahead=True))


def engine_with(home: Path, *, twins: int, drafts: bool, deltas: int | None) -> Engine:
    """`deltas`: of processes from so many MiB on only what was written is saved; 0: of none; None: of the usual ones."""
    tracking = None if deltas is None else Tracking(on=deltas > 0, least=deltas << 20)
    budget = Budget(twins=twins, bytes=2 << 30)
    return Engine(home, ahead=True, twins=budget, drafts=Drafting(on=drafts, slack=0.0), deltas=tracking)


def opener_of(engine: Engine) -> Callable[[Options], SessionSubject]:
    def open_session(options: Options) -> SessionSubject:
        session = engine.new(
            network=options.network,  # type: ignore[arg-type]
            seccomp=options.seccomp,
            extra_capabilities=options.capabilities,
            limits=Limits(memory_bytes=options.memory_bytes, pids=options.pids),
        )
        return SessionSubject(engine, session)

    return open_session


def _result(result: SessionResult) -> ExecResult:
    return ExecResult(
        exit_code=result.exit_code,
        stdout_bytes=result.stdout,
        stderr_bytes=result.stderr,
        output_bytes=result.output,
        cwd=result.cwd,
        duration_ms=result.duration_ms,
        truncated=result.truncated,
        shell_restarted=result.shell_died or result.shell_fresh,
    )
