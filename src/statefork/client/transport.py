"""The way to the daemon: runs verbs, over a unix socket or TCP, blocking or awaiting.

The two classes differ only in how they wait. Neither reads an environment variable; connections are shared by all
environments of a client, and any number of threads (or tasks) may use them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping
from typing import IO, Any, TypeVar

import httpx

from statefork.client.address import Address
from statefork.client.following import Following
from statefork.client.patience import Patience
from statefork.client.steps import Answer, Call, Follow, Request, Work
from statefork.model import Stream

__all__ = ["AsyncTransport", "Transport"]

T = TypeVar("T")

_CHUNK_BYTES = 256 * 1024


class _Way:
    def __init__(self, address: Address) -> None:
        self.address = address
        self.met = False
        """It has answered: if it does not any more, it is being restarted, and worth waiting for."""

    def following(self, step: Follow) -> Following:
        return Following(step, self.address.text, self.address.retry_seconds)

    def _patience(self, request: Request) -> Patience:
        return Patience(request, self.address.text, self.address.retry_seconds)


class Transport(_Way):
    """Blocks."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._http = httpx.Client(transport=httpx.HTTPTransport(**address.way()), **address.settings())

    def close(self) -> None:
        self._http.close()

    def do(self, call: Call[T]) -> T:
        """Run a verb to its end."""
        with contextlib.closing(call):
            try:
                step = next(call)
                while True:
                    try:
                        done = self._step(step)
                    except Exception as error:  # noqa: BLE001  the verb may know better, and else raises it again
                        step = call.throw(error)
                    else:
                        step = call.send(done)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def follow(self, following: Following) -> Generator[tuple[Stream, bytes] | None, None, None]:
        """None once, when the first request has been answered. Errors wait for `outcome`, as those of a thread would."""
        begun = False
        while not following.ended:
            broken: httpx.TransportError | None = None
            try:
                with self._open(following.request()) as pieces:
                    if not begun:
                        begun = True
                        yield None
                    for data in pieces:
                        yield from following.feed(data)
            except httpx.TransportError as error:
                broken = error
            except Exception as error:  # noqa: BLE001  raised by `outcome`
                following.failed(error)
            if not following.ended:
                with contextlib.suppress(Exception):
                    time.sleep(following.broke(broken, met=self.met))
        if not begun:
            yield None

    def _step(self, step: Request | Follow | Work) -> Any:
        if isinstance(step, Request):
            return self._send(step)
        if isinstance(step, Work):
            return step.call()
        following = self.following(step)
        for _ in self.follow(following):
            pass
        return following.outcome()

    @contextlib.contextmanager
    def _open(self, request: Request) -> Iterator[Iterator[bytes]]:
        """A stream; what the answer refuses is raised, what breaks later is httpx's."""
        patience = self._patience(request)
        while True:
            with self._http.stream(request.method, request.path, **_sent(request)) as response:
                self.met = True
                if response.status_code < 400:
                    yield response.iter_bytes()
                    return
                wait = patience.after_answer(response.status_code, response.headers, response.read())
            time.sleep(wait or 0)

    def _send(self, request: Request) -> Answer:
        patience = self._patience(request)
        while True:
            try:
                answer, headers = self._once(request)
            except httpx.TransportError as error:
                wait: float | None = patience.after_failure(error, met=self.met)
            else:
                self.met = True
                wait = patience.after_answer(answer.status, headers, answer.body)
                if wait is None:
                    return answer
            time.sleep(wait or 0)

    def _once(self, request: Request) -> tuple[Answer, Mapping[str, str]]:
        _rewind(request.content, request.sink)
        with self._http.stream(request.method, request.path, **_sent(request)) as response:
            if request.sink is None or response.status_code >= 400:
                return Answer(response.status_code, response.read()), response.headers
            for piece in response.iter_bytes(_CHUNK_BYTES):
                request.sink.write(piece)
            return Answer(response.status_code, b""), response.headers


class AsyncTransport(_Way):
    """Awaits. Files are read and written on threads."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._http = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(**address.way()), **address.settings())

    async def close(self) -> None:
        await self._http.aclose()

    async def do(self, call: Call[T]) -> T:
        with contextlib.closing(call):
            try:
                step = next(call)
                while True:
                    try:
                        done = await self._step(step)
                    except Exception as error:  # noqa: BLE001  as above
                        step = call.throw(error)
                    else:
                        step = call.send(done)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    async def follow(self, following: Following) -> AsyncGenerator[tuple[Stream, bytes] | None, None]:
        begun = False
        while not following.ended:
            broken: httpx.TransportError | None = None
            try:
                async with self._open(following.request()) as pieces:
                    if not begun:
                        begun = True
                        yield None
                    async for data in pieces:
                        for piece in following.feed(data):
                            yield piece
            except httpx.TransportError as error:
                broken = error
            except Exception as error:  # noqa: BLE001  as above
                following.failed(error)
            if not following.ended:
                with contextlib.suppress(Exception):
                    await asyncio.sleep(following.broke(broken, met=self.met))
        if not begun:
            yield None

    async def _step(self, step: Request | Follow | Work) -> Any:
        if isinstance(step, Request):
            return await self._send(step)
        if isinstance(step, Work):
            return await asyncio.to_thread(step.call)
        following = self.following(step)
        async for _ in self.follow(following):
            pass
        return following.outcome()

    @contextlib.asynccontextmanager
    async def _open(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        patience = self._patience(request)
        while True:
            async with self._http.stream(request.method, request.path, **_sent(request)) as response:
                self.met = True
                if response.status_code < 400:
                    yield response.aiter_bytes()
                    return
                wait = patience.after_answer(response.status_code, response.headers, await response.aread())
            await asyncio.sleep(wait or 0)

    async def _send(self, request: Request) -> Answer:
        patience = self._patience(request)
        while True:
            try:
                answer, headers = await self._once(request)
            except httpx.TransportError as error:
                wait: float | None = patience.after_failure(error, met=self.met)
            else:
                self.met = True
                wait = patience.after_answer(answer.status, headers, answer.body)
                if wait is None:
                    return answer
            await asyncio.sleep(wait or 0)

    async def _once(self, request: Request) -> tuple[Answer, Mapping[str, str]]:
        _rewind(request.content, request.sink)
        sent = _sent(request)
        if not isinstance(sent["content"], bytes | None):
            sent["content"] = _pieces(sent["content"])
        async with self._http.stream(request.method, request.path, **sent) as response:
            if request.sink is None or response.status_code >= 400:
                return Answer(response.status_code, await response.aread()), response.headers
            async for piece in response.aiter_bytes(_CHUNK_BYTES):
                await asyncio.to_thread(request.sink.write, piece)
            return Answer(response.status_code, b""), response.headers


def _sent(request: Request) -> dict[str, Any]:
    return {"params": dict(request.query), "headers": request.headers(), "content": request.payload()}


def _rewind(content: bytes | IO[bytes] | None, sink: IO[bytes] | None) -> None:
    """What an earlier attempt has read or written."""
    if content is not None and not isinstance(content, bytes):
        content.seek(0)
    if sink is not None:
        sink.seek(0)
        sink.truncate()


async def _pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, _CHUNK_BYTES):
        yield piece
