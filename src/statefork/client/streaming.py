"""Iterate over a command's output while it runs, on the other side of a network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from statefork.client.following import Following
from statefork.client.transport import AsyncTransport, Transport
from statefork.model import ExecResult, Stream

__all__ = ["AsyncRemoteStream", "RemoteStream"]


class RemoteStream:
    """As the library's ExecStream. Who stops iterating leaves the command running; `command` is the id to come back with."""

    def __init__(self, transport: Transport, following: Following) -> None:
        self._following = following
        self._pieces = transport.follow(following)
        next(self._pieces)  # it is started now, not when somebody begins to look

    @property
    def command(self) -> str | None:
        return self._following.command

    def __iter__(self) -> Iterator[tuple[Stream, bytes]]:
        for piece in self._pieces:
            if piece is not None:
                yield piece
        self._following.outcome()

    @property
    def result(self) -> ExecResult:
        """Waits for the end; output that was not iterated over is dropped here (the result has it)."""
        for _ in self._pieces:
            pass
        return self._following.outcome()

    def close(self) -> None:
        """Look away; the command goes on."""
        self._pieces.close()


class AsyncRemoteStream:
    """The same to await: `async for stream, data in ...`, then `await ....result()`."""

    def __init__(self, transport: AsyncTransport, following: Following) -> None:
        self._following = following
        self._pieces = transport.follow(following)

    async def start(self) -> AsyncRemoteStream:
        await anext(self._pieces)
        return self

    @property
    def command(self) -> str | None:
        return self._following.command

    async def __aiter__(self) -> AsyncIterator[tuple[Stream, bytes]]:
        async for piece in self._pieces:
            if piece is not None:
                yield piece
        self._following.outcome()

    async def result(self) -> ExecResult:
        async for _ in self._pieces:
            pass
        return self._following.outcome()

    async def close(self) -> None:
        await self._pieces.aclose()
