"""Programs inside an environment, each with an attendant beside it: pipes or a terminal, any number of listeners, signals.

The daemon's own `run` has neither terminals nor process ids, and what it offers differs by backend. The attendant is a static
program that is written into the environment and started with `run`; the rest is frames on its standard streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from statefork.environment import Environment
from statefork.errors import NotFound, SessionDead, Unsupported, UsageError, WaypointError
from statefork.server.foreign.frames import Frame, Frames, told
from statefork.server.service.command import Command
from statefork.server.service.held import Held
from statefork.server.service.running import Program
from statefork.server.service.service import Service
from waypoint.kernel import tools
from waypoint.kernel.compile import compile_program

__all__ = ["Attended", "Ending", "Listener", "Wish", "installed", "new_name", "start"]

log = logging.getLogger(__name__)

ATTEND = tools.Program("attend", Path(__file__).resolve().parent / "native" / "attend.c")
_PLACE = "/usr/local/libexec"
_LISTENER_FRAMES = 64
_LISTENER_SECONDS = 60.0
"""How long a listener who takes nothing holds the program back; then it is left behind."""
_NO_SUCH, _NOT_DIRECTORY, _NO_USER = 2, 20, 3


@dataclass(frozen=True, slots=True)
class Wish:
    """What to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    size: tuple[int, int] | None = None
    """Rows and columns: on a terminal of this size. None: on pipes."""
    echo: bool = True
    feed: bool = False
    """stdin is a pipe that is fed later; else /dev/null."""
    tag: str | None = None

    def arguments(self) -> list[str]:
        words: list[str] = []
        if self.size is not None:
            words += ["-t", f"{self.size[0]}x{self.size[1]}"]
        words += [] if self.echo else ["-n"]
        words += ["-i"] if self.feed else []
        words += ["-u", self.user] if self.user else []
        words += ["-d", self.cwd] if self.cwd else []
        words += ["-h", "--", *self.argv]
        if any("\0" in word for word in (*words, *self.env, *self.env.values())):
            raise UsageError("a command cannot hold a NUL character")
        return words


@dataclass(frozen=True, slots=True)
class Ending:
    code: int
    """-1 if a signal ended it."""
    signal: int = 0
    error: WaypointError | None = None
    """Not its own end: its environment went away, or it could not be followed."""


def new_name() -> str:
    return secrets.token_hex(8)


class Listener:
    """Frames from the moment on at which it was made; ends when the program has ended."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Frame | None] = asyncio.Queue(_LISTENER_FRAMES)

    async def put(self, frame: Frame | None) -> None:
        await self._queue.put(frame)

    def leave(self) -> None:
        """Whoever waits to put something finds room; whoever still listens, an end."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def next(self, timeout: float | None = None) -> Frame | None:
        """Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            return await self._queue.get()

    async def __aiter__(self) -> AsyncIterator[Frame]:
        while (frame := await self._queue.get()) is not None:
            yield frame


class Attended:
    """One program that runs. Made on the event loop, used there."""

    def __init__(self, held: Held, command: Command, name: str, wish: Wish, *first: Listener) -> None:
        self.held, self.command, self.name, self.wish = held, command, name, wish
        self.pid = 0
        self.ending: Ending | None = None
        self.over = asyncio.Event()
        self._began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._began.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._listeners: set[Listener] = set(first)
        self._noise = b""
        self._pumping = asyncio.ensure_future(self._pump())

    @property
    def alive(self) -> bool:
        return not self.over.is_set()

    async def began(self) -> None:
        """Raises why it did not: UsageError, NotFound, SessionDead."""
        await asyncio.shield(self._began)

    def listen(self) -> Listener:
        """Before the next await nothing is missed."""
        listener = Listener()
        self._listeners.add(listener)
        return listener

    def unlisten(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        listener.leave()

    # -- to it --------------------------------------------------------------------------------------------------------

    async def feed(self, data: bytes) -> None:
        for at in range(0, len(data), 32 << 10):
            await self._tell("i", data[at : at + (32 << 10)])

    async def end_input(self) -> None:
        await self._tell("c")

    async def resize(self, rows: int, columns: int) -> None:
        await self._tell("r", f"{rows} {columns}".encode())

    async def signal(self, number: int) -> None:
        """To its whole process group."""
        await self._tell("s", str(number).encode())

    async def _tell(self, kind: str, payload: bytes = b"") -> None:
        if self.command.input is None:
            raise Unsupported(f"what runs in environment {self.held.id} cannot be reached any more")
        self.held.touch()
        await self.command.input.send(told(kind, payload))

    # -- from it ------------------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        frames = Frames()
        try:
            async for stream, _, data in self.command.follow():
                if stream == "stderr":
                    self._noise = (self._noise + data)[-2000:]
                    continue
                for kind, payload in frames.feed(data):
                    await self._hear(kind, payload)
            await self.command.done.wait()
        finally:
            self._end()

    async def _hear(self, kind: str, payload: bytes) -> None:
        self.held.touch()
        if kind == "b":
            pid, _, name = payload.decode(errors="replace").partition(" ")
            if name != self.name:
                self._fail(NotFound("another program runs in its place"))
            self.pid = int(pid)
            if not self._began.done():
                self._began.set_result(None)
        elif kind == "f":
            self._fail(_failure(payload.decode(errors="replace")))
        elif kind == "x":
            code, _, signal = payload.decode().partition(" ")
            self.ending = Ending(int(code), int(signal or 0))
        else:
            if not self._began.done():  # followed from its middle: the beginning is forgotten, it runs all the same
                self._began.set_result(None)
            for listener in list(self._listeners):
                try:
                    async with asyncio.timeout(_LISTENER_SECONDS):
                        await listener.put((kind, payload))
                except TimeoutError:
                    self.unlisten(listener)

    def _fail(self, error: WaypointError) -> None:
        if not self._began.done():
            self._began.set_exception(error)

    def _end(self) -> None:
        if self.ending is None:
            error = self.command.error or SessionDead("it ended without a word")
            self.ending = Ending(-1, 0, error)
        result = self.command.result
        if result is not None and result.exit_code in (126, 127):
            self._fail(_NotInstalled(self._noise.decode(errors="replace").strip()))
        self._fail(self.ending.error or SessionDead(f"it did not start: {self._noise.decode(errors='replace')}"))
        self.over.set()
        for listener in self._listeners:
            asyncio.ensure_future(_quietly(listener))  # noqa: RUF006  it only waits for room in a queue


async def _quietly(listener: Listener) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LISTENER_SECONDS):
            await listener.put(None)


class _NotInstalled(SessionDead):
    """The attendant is not inside, or cannot be started there."""


def _failure(text: str) -> WaypointError:
    number, _, words = text.partition(" ")
    if int(number or 0) == _NO_USER:
        return NotFound(words.partition(":")[0])
    if int(number or 0) in (_NO_SUCH, _NOT_DIRECTORY):
        return UsageError(words)
    return UsageError(f"it cannot be started: {words}")


# -- getting it inside ------------------------------------------------------------------------------------------------


@cache
def _binary() -> Path:
    return compile_program(ATTEND)


_installed: dict[str, str] = {}
"""By environment: the place where the attendant was seen."""


def installed(live: Environment, *, again: bool = False) -> str:
    """On a thread: its path inside, where it is written unless it is there."""
    binary = _binary()
    path = f"{_PLACE}/statefork-{binary.name}"
    if not again and _installed.get(live.id) == live.place:
        return path
    present = False
    if not again:
        with contextlib.suppress(WaypointError):
            present = live.stat_file(path).size_bytes == binary.stat().st_size
    if not present:
        live.write_file(path, binary.read_bytes(), 0o755)
    if len(_installed) > 10_000:
        _installed.clear()
    _installed[live.id] = live.place
    return path


async def start(service: Service, held: Held, wish: Wish, *listeners: Listener) -> Attended:
    """Started and begun. Raises: UsageError, NotFound (no such user), and what `run` raises."""
    arguments = wish.arguments()
    for again in (False, True):
        async with service.use(held) as live:
            path = await service.commands.run(lambda live=live, again=again: installed(live, again=again))  # type: ignore[misc]
        name = new_name()
        program = Program(argv=(path, name, *arguments), env=wish.env, feed=True, followed=True, output_bytes=4096)
        command = await service.running.launch(held, program, detached=False)
        command.dozes = wish.size is not None
        made = Attended(held, command, name, wish, *listeners)
        try:
            await made.began()
        except _NotInstalled as error:
            if again:
                raise Unsupported(
                    f"environment {held.id} cannot start {path}: {error}; is its root file system read-only?"
                ) from None
            _installed.pop(held.id, None)
        else:
            return made
    raise AssertionError("unreachable")
