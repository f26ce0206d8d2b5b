"""One session of the engine as a Live: commands, terminals, captures, and the notes by which it is found again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import waypoint.errors
from statefork.backends.relay import Relay
from statefork.driver import Captured, Live, Place, Terminal
from statefork.errors import ExecTimeout, NotFound, SessionDead, WrongState
from statefork.model import Capability, ExecRequest, ExecResult, Mode, RunRequest, Usage
from waypoint.counting import NOT_YET
from waypoint.engine import Engine
from waypoint.guest.terminal import Remote
from waypoint.kernel.usage import tree_usage
from waypoint.model import SnapshotRecord
from waypoint.outcomes import ExecResult as Outcome
from waypoint.session import Session

__all__ = ["NOTE", "Stored", "WaypointLive", "leave_note", "name_at", "note_ahead"]

NOTE = "waypoint.json"


class WaypointLive(Live):
    """One session; `owned` is False for one that somebody else made."""

    pauses_itself = True

    def __init__(self, engine: Engine, session: Session, *, owned: bool) -> None:
        self.description = session.id
        self.session = session
        self._engine = engine
        self._owned = owned
        self._stopped = False
        self._suspended = False
        self._shared = False
        """Somebody may be in it beside whoever calls: a program, a terminal."""

    def ready(self, timeout: float) -> None:
        """A new shell has run something. One that came back is only looked at: it may be in the middle of a command,
        and if it is not, its `$?` and `$_` would be others afterwards."""
        with self._reached():
            if (self.session.shell or self.session.state()["state"]) != "starting":
                return
        super().ready(timeout)

    def exec(self, request: ExecRequest) -> ExecResult:
        relay = Relay(request.on_output)
        with self._reached():
            outcome = self.session.exec(
                request.command,
                timeout=request.timeout,
                stdin=_source(request.stdin),
                on_stdout=relay.to("stdout"),
                on_stderr=relay.to("stderr"),
                on_start=request.on_start,
                limit=request.output_limit_bytes,
            )
        relay.settle()
        return _result(outcome)

    def run(self, request: RunRequest) -> ExecResult:
        self._shared = True
        relay = Relay(request.on_output)
        with self._reached():
            outcome = self.session.run(
                request.argv,
                timeout=request.timeout,
                stdin=_source(request.stdin),
                cwd=request.cwd or "",
                env=tuple(request.env.items()),
                on_stdout=relay.to("stdout"),
                on_stderr=relay.to("stderr"),
                on_start=request.on_start,
                limit=request.output_limit_bytes,
            )
        relay.settle()
        return _result(outcome)

    def follow(self, number: int, seen: tuple[int, int], request: ExecRequest) -> ExecResult:
        self._shared = True
        relay = Relay(request.on_output)
        with self._reached():
            outcome = self.session.wait(
                number,
                timeout=request.timeout,
                on_stdout=relay.to("stdout"),
                on_stderr=relay.to("stderr"),
                limit=request.output_limit_bytes,
                stdin=_source(request.stdin),
                seen=seen,
            )
        relay.settle()
        return _result(outcome)

    def running(self) -> int | None:
        with self._reached():
            return int(self.session.state()["current"]) or None

    def signal(self, signal: int, number: int | None) -> None:
        with self._reached():
            self.session.signal(signal, number)

    def resize(self, rows: int, columns: int) -> None:
        with self._reached():
            self.session.resize(rows, columns)

    def terminal(self, rows: int, columns: int) -> Terminal:
        self._shared = True
        with self._reached():
            self.session.state()  # a terminal on what is not there should fail here, not later on its own thread
        return _Terminal(self, rows, columns)

    def usage(self) -> Usage | None:
        with self._reached():
            record = self._engine.settle(self.session.record)
        if record.state == "dead":
            raise SessionDead(f"the processes of session {record.id} have ended", session=record.id)
        return Usage(*tree_usage(record.init_pid)) if record.state == "live" else None

    def note(self) -> dict[str, Any]:
        return {"store": str(self._engine.store.paths.home), "session": self.session.id, "owned": self._owned}

    def capture(self, place: Place, mode: Mode, parent: Captured | None) -> Captured:
        leave_note(place, self._engine.store.paths.home)
        with self._reached():
            taken = self.session.snapshot(name_at(place), count=False)
        if mode == "files":
            taken = self._engine.keep_files_only(taken)
        return captured_by(self._engine, taken)

    def stop(self) -> None:
        self._stopped = True
        if self._owned:
            with suppress(NotFound):
                self.session.remove()
        elif self._suspended:
            self.session.resume()

    def halt(self) -> bool:
        if self._shared or not self._owned:
            return False
        self._stopped = True
        with suppress(NotFound):
            self.session.halt()
        return True

    def retire(self) -> None:
        try:
            self.stop()
        finally:
            self._engine.store.db.close()  # of this thread, which may never use it again

    def suspend(self) -> None:
        """For a session that was attached to: it is the engine's own pause, which gives the memory back too."""
        with self._reached():
            self.session.pause()
        self._suspended = True

    def proceed(self) -> None:
        with self._reached():
            self.session.resume()
        self._suspended = False

    def become(self, captured: Captured) -> None:
        with self._reached():
            self.session.restore(captured.handle.snapshot)

    def stands_still(self) -> None:
        """It was suspended by another process."""
        self._suspended = True

    @contextmanager
    def reached(self) -> Iterator[None]:
        with self._reached():
            yield

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """The engine's errors are ours already, but for those that mean that the session went away meanwhile."""
        try:
            yield
        except waypoint.errors.ExecTimeout as error:
            raise ExecTimeout(error.message, _result(error.result), **error.details) from error
        except (NotFound, WrongState, OSError) as error:
            if not self._stopped and not self._is_dead():
                raise
            raise SessionDead(f"session {self.session.id} is gone: {error}", session=self.session.id) from error

    def _is_dead(self) -> bool:
        try:
            return self._engine.settle(self.session.record).state == "dead"
        except NotFound:
            return True


class _Terminal:
    def __init__(self, live: WaypointLive, rows: int, columns: int) -> None:
        self._live = live
        self._remote = Remote(live.session, rows, columns)
        self.type, self.resize, self.close = self._remote.type, self._remote.resize, self._remote.close

    def run(self, draw: Callable[[bytes], None]) -> str:
        with self._live.reached():
            return "ended" if self._remote.serve(draw) == "shell_ended" else "detached"


@dataclass(frozen=True, slots=True)
class Stored:
    store: Path
    snapshot: str


def name_at(place: Place) -> str:
    """Of the session or the snapshot that is made at a place: by it that is found again after a crash."""
    return f"statefork-{place.name}"


def leave_note(place: Place, store: Path) -> None:
    """In which store that is, before it is made."""
    if _noted.pop(place.name, None) == store:
        return
    text = json.dumps({"store": str(store)})
    fresh = place.directory / f".{NOTE}"
    fresh.write_text(text)
    fresh.replace(place.directory / NOTE)


def note_ahead(place: Place, store: Path) -> None:
    leave_note(place, store)
    _noted[place.name] = store


_noted: dict[str, Path] = {}
"""Places that have their note and wait to be used."""


def captured_by(engine: Engine, taken: SnapshotRecord) -> Captured:
    known = {capability.value for capability in Capability}
    words = [word for word in taken.capture.captured if word in known]
    processes = taken.manifest.get("processes", ()) if taken.full else ()
    lines = [" ".join(process["argv"])[:200] for process in processes if process["pid"] != 1]
    return Captured(
        handle=Stored(engine.store.paths.home, taken.id),
        captured=(*words, Capability.SHELL) if taken.full else tuple(words),
        not_captured=taken.capture.not_captured,
        files_bytes=taken.files_bytes if taken.files_bytes != NOT_YET else engine.count_later(taken),
        memory_bytes=taken.memory_bytes,
        paused_ms=taken.paused_ms,
        processes=tuple(line for line in lines if line),
    )


def _result(outcome: Outcome) -> ExecResult:
    return ExecResult(
        exit_code=outcome.exit_code,
        stdout_bytes=outcome.stdout,
        stderr_bytes=outcome.stderr,
        output_bytes=outcome.output,
        cwd=outcome.cwd,
        timed_out=outcome.timed_out,
        truncated=outcome.truncated,
        shell_restarted=outcome.shell_died or outcome.shell_fresh,
    )


def _source(stdin: bytes | IO[bytes] | None) -> Any:
    """The engine reads a file by its descriptor: what Python has buffered of it must go back first."""
    if stdin is None or isinstance(stdin, bytes):
        return stdin
    try:
        descriptor = stdin.fileno()
        if stdin.seekable():  # Python's own seek only moves inside its buffer where it can
            os.lseek(descriptor, stdin.tell(), os.SEEK_SET)
    except OSError:
        return stdin.read()
    return stdin
