"""One command: who started it may leave, and anybody who may see the environment can come and follow it.

A thread waits for its end. What it prints goes through a window of the newest output, from which any number of followers
read at their own pace; the slowest holds the command back, as the reader of a pipe would. Nobody follows: it prints on, and
the oldest is forgotten. A command outlives the pause of its environment, and on a durable backend the daemon itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import IO

from statefork.environment import Environment
from statefork.errors import ExecTimeout, SessionDead, WaypointError, WrongState
from statefork.model import ExecResult, Stream
from statefork.tree import mint

__all__ = ["Command", "Input", "Piece"]

WINDOW_BYTES = 1 << 20
_HELD_BACK_SECONDS = 120.0
"""The longest that a follower who does not read holds a command back."""
_AWAITED_SECONDS = 10.0
"""How long output is held for a follower who was announced and has not come."""

Piece = tuple[Stream, int, bytes]
"""Stream, offset in it, bytes."""


class Command:
    """Made on the event loop; `work` runs on a thread; all else is for the event loop."""

    def __init__(self, environment: Environment, kind: str, *, identifier: str | None = None) -> None:
        self.id = identifier or mint("c")
        self.environment = environment
        self.kind = kind
        self.started = time.time()
        self.number: int | None = None
        self.place = ""
        self.result: ExecResult | None = None
        self.error: WaypointError | None = None
        self.suspended = False
        self.detached = False
        """Kept when it has ended, for whoever asks for it later."""
        self.dozes = False
        """It mostly waits, as a terminal does: that it runs does not keep its environment from being idle."""
        self.input: Input | None = None
        self.on_number: Callable[[], None] | None = None
        self.done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pieces: deque[Piece] = deque()
        self._first = 0
        self._kept_bytes = 0
        self._dropped = False
        self._seen = [0, 0]
        self._readers: set[_Reader] = set()
        self._awaited: _Reader | None = None
        self._changed = threading.Condition()

    @property
    def state(self) -> str:
        if self.result is None and self.error is None:
            return "suspended" if self.suspended else "running"
        return "exited" if self.result is not None and not self.result.timed_out else "failed"

    @property
    def offsets(self) -> tuple[int, int]:
        return self._seen[0], self._seen[1]

    def await_follower(self) -> None:
        """Before it starts: somebody is about to follow it, and what it prints until then is theirs."""
        self._awaited = reader = _Reader(0)
        self._readers.add(reader)
        self._loop.call_later(_AWAITED_SECONDS, self._not_awaited, reader)

    def _not_awaited(self, reader: _Reader) -> None:
        with self._changed:
            if self._awaited is reader:
                self._awaited = None
                self._readers.discard(reader)
                self._changed.notify_all()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def work(self, call: Callable[[Command], ExecResult]) -> ExecResult:
        """Run to the end. If the environment is paused meanwhile, go on with it when that is resumed."""
        try:
            self.result = self._finish(call)
            return self.result
        except ExecTimeout as error:
            self.result, self.error = error.result, error
            raise
        except WaypointError as error:
            self.error = error
            raise
        except BaseException as error:
            self.error = WaypointError(f"the daemon failed on command {self.id}: {error!r}")
            raise
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is gone: the daemon is ending
                self._loop.call_soon_threadsafe(self._ended)

    def _finish(self, call: Callable[[Command], ExecResult]) -> ExecResult:
        try:
            return call(self)
        except WrongState:
            if self.number is None or self.environment.settled() != "paused":
                raise
        while True:
            self._await_resume()
            try:
                self.place = self.environment.place
                ended = self.environment.follow_command(
                    self.number,
                    seen=self.offsets,
                    on_output=self.output,
                    stdin=self.input.reading if self.input else None,
                )
                return self._whole(ended)
            except WrongState:
                if self.environment.settled() != "paused":
                    raise

    def _await_resume(self) -> None:
        self.suspended = True
        while self.environment.state == "paused":
            time.sleep(0.1)
        self.suspended = False
        if self.environment.state != "live":
            raise SessionDead(f"environment {self.environment.id} is {self.environment.state}: its command is gone")

    def _whole(self, ended: ExecResult) -> ExecResult:
        """The last part tells how it ended; what came before the pause is in the window."""
        with self._changed:
            pieces = list(self._pieces)
        return replace(
            ended,
            stdout_bytes=b"".join(data for stream, _, data in pieces if stream == "stdout"),
            stderr_bytes=b"".join(data for stream, _, data in pieces if stream == "stderr"),
            output_bytes=b"".join(data for _, _, data in pieces),
            truncated=ended.truncated or self._dropped,
            duration_ms=(time.time() - self.started) * 1000,
        )

    def numbered(self, number: int) -> None:
        self.number = number
        self.place = self.environment.place
        if self.on_number is not None:
            self.on_number()

    def output(self, stream: Stream, data: bytes) -> None:
        index = 0 if stream == "stdout" else 1
        with self._changed:
            self._pieces.append((stream, self._seen[index], data))
            self._seen[index] += len(data)
            self._kept_bytes += len(data)
            readers = list(self._readers)
            deadline = time.monotonic() + _HELD_BACK_SECONDS
            while self._kept_bytes > WINDOW_BYTES and len(self._pieces) > 1:
                if any(reader.at <= self._first for reader in self._readers) and time.monotonic() < deadline:
                    self._wake(readers)
                    self._changed.wait(0.5)
                    continue
                self._kept_bytes -= len(self._pieces.popleft()[2])
                self._first += 1
                self._dropped = True
        self._wake(readers)

    def _wake(self, readers: list[_Reader]) -> None:
        for reader in readers:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(reader.more.set)

    def _ended(self) -> None:
        if self.input is not None:
            self.input.close()
        self.done.set()
        for reader in self._readers:
            reader.more.set()

    # -- the event loop -----------------------------------------------------------------------------------------------

    async def follow(self, seen: tuple[int, int] = (0, 0)) -> AsyncIterator[Piece]:
        """All that is still known from these offsets on, and then what comes, until it has ended."""
        with self._changed:
            reader, self._awaited = self._awaited or _Reader(self._first), None
            self._readers.add(reader)
        try:
            while True:
                ended = self.done.is_set()
                for piece in self._taken(reader):
                    trimmed = _beyond(piece, seen)
                    if trimmed is not None:
                        yield trimmed
                if ended:
                    return
                await reader.more.wait()
                reader.more.clear()
        finally:
            with self._changed:
                self._readers.discard(reader)
                self._changed.notify_all()

    def _taken(self, reader: _Reader) -> list[Piece]:
        with self._changed:
            skip = max(0, reader.at - self._first)
            pieces = list(self._pieces)[skip:]
            reader.at = self._first + len(self._pieces)
            self._changed.notify_all()
        return pieces


class _Reader:
    def __init__(self, at: int) -> None:
        self.at = at
        self.more = asyncio.Event()


def _beyond(piece: Piece, seen: tuple[int, int]) -> Piece | None:
    stream, offset, data = piece
    known = seen[0 if stream == "stdout" else 1] - offset
    if known <= 0:
        return piece
    return (stream, offset + known, data[known:]) if known < len(data) else None


class Input:
    """The stdin of a command that is fed while it runs."""

    def __init__(self) -> None:
        read, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self.reading: IO[bytes] = os.fdopen(read, "rb", buffering=0)
        self._turn = asyncio.Lock()

    async def send(self, data: bytes) -> None:
        """Waits while the command does not read. What comes after its end is dropped."""
        async with self._turn:
            view = memoryview(data)
            while view and self._writing >= 0:
                try:
                    view = view[os.write(self._writing, view) :]
                except BlockingIOError:
                    await self._room()
                except OSError:
                    return

    async def _room(self) -> None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        fd = self._writing
        loop.add_writer(fd, ready.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await ready.wait()
        finally:
            loop.remove_writer(fd)

    def end(self) -> None:
        """No more will come."""
        fd, self._writing = self._writing, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        self.end()
        self.reading.close()
