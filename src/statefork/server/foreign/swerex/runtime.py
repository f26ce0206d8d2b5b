"""The sessions of one environment, and answers that a repeated request gets again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from starlette.responses import Response

from statefork.errors import NotFound
from statefork.server.foreign.attendant import Listener, Wish
from statefork.server.foreign.book import Book
from statefork.server.foreign.swerex.errors import Raised
from statefork.server.foreign.swerex.shell import Shell
from statefork.server.service.held import Held

__all__ = ["Runtime", "Runtimes"]

_REMEMBERED = 64
_TAG = "swerex:"
_ENV = {"TERM": "dumb", "PS1": "", "PS2": "", "PS0": "", "PAGER": "cat", "GIT_PAGER": "cat"}


class Runtime:
    def __init__(self, book: Book, held: Held) -> None:
        self._book, self._held = book, held
        self._shells: dict[str, Shell] = {}
        self._making: set[str] = set()
        self._answers: OrderedDict[str, asyncio.Future[Response]] = OrderedDict()

    async def create(self, name: str, sources: list[str], timeout: float) -> str:
        if name in self._making or await self._known(name) is not None:
            raise Raised("SessionExistsError", f"session {name} already exists")
        self._making.add(name)
        listener = Listener()
        try:
            wish = Wish(
                ("/bin/bash", "--noediting", "-i"), env=_ENV, size=(200, 200), echo=False, feed=True, tag=_TAG + name
            )
            shell = Shell(self._book.service, await self._book.start(self._held, wish, listener), listener)
            self._shells[name] = shell
            async with shell.turn:
                return await shell.start(sources, max(timeout, 10.0))
        finally:
            self._making.discard(name)

    async def find(self, name: str) -> Shell:
        shell = await self._known(name)
        if shell is None:
            raise Raised("SessionDoesNotExistError", f"session {name!r} does not exist")
        return shell

    async def close(self, name: str) -> None:
        shell = await self.find(name)
        self._shells.pop(name, None)
        await shell.close()

    async def close_all(self) -> None:
        for one in await self._book.running(self._held):
            tag = one.wish.tag or ""
            if tag.startswith(_TAG):
                await self.close(tag.removeprefix(_TAG))

    async def _known(self, name: str) -> Shell | None:
        """Also one that came with a fork or a restore, or that an earlier process of the daemon made."""
        shell = self._shells.get(name)
        if shell is not None and shell.alive:
            return shell
        self._shells.pop(name, None)
        try:
            process = await self._book.find(self._held, tag=_TAG + name)
        except NotFound:
            return None
        shell = self._shells[name] = Shell(self._book.service, process, process.listen())
        return shell

    async def once(self, key: str | None, do: Callable[[], Awaitable[Response]]) -> Response:
        """A client that lost the answer sends the same request id again."""
        if key is None:
            return await do()
        known = self._answers.get(key)
        if known is None:
            known = self._answers[key] = asyncio.ensure_future(do())
            while len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)
        return await asyncio.shield(known)


class Runtimes:
    def __init__(self) -> None:
        self._known: dict[str, Runtime] = {}

    def of(self, book: Book, held: Held) -> Runtime:
        if len(self._known) > 2 * len(book.service.held) + 64:
            self._known = {key: one for key, one in self._known.items() if key in book.service.held}
        return self._known.setdefault(held.id, Runtime(book, held))
