"""The client to await: the verbs of blocking.py, each a coroutine. What is a property there is a method here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from statefork.client import making, transfer, verbs
from statefork.client.address import Address
from statefork.client.handle import Handle
from statefork.client.parsing import EnvironmentInfo
from statefork.client.steps import Call, Follow
from statefork.client.streaming import AsyncRemoteStream
from statefork.client.transport import AsyncTransport
from statefork.model import ForkFailure

__all__ = ["AsyncClient", "AsyncRemoteEnvironment"]

P = ParamSpec("P")
T = TypeVar("T")


def _done(
    verb: Callable[Concatenate[Handle, P], Call[T]],
) -> Callable[Concatenate[AsyncRemoteEnvironment, P], Coroutine[Any, Any, T]]:
    @functools.wraps(verb)
    async def method(self: AsyncRemoteEnvironment, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._transport.do(verb(self, *args, **kwargs))

    return method


def _streamed(
    verb: Callable[Concatenate[Handle, P], Follow],
) -> Callable[Concatenate[AsyncRemoteEnvironment, P], Coroutine[Any, Any, AsyncRemoteStream]]:
    @functools.wraps(verb)
    async def method(self: AsyncRemoteEnvironment, /, *args: P.args, **kwargs: P.kwargs) -> AsyncRemoteStream:
        return await AsyncRemoteStream(self._transport, self._transport.following(verb(self, *args, **kwargs))).start()

    return method


class AsyncRemoteEnvironment(Handle):
    """Make one with `AsyncClient.create_env_manager`, or come back to one with `AsyncClient.environment(id)`.

    As with the library, leaving its `async with` block destroys it. Without one it stays, whatever becomes of this process.
    """

    def __init__(self, transport: AsyncTransport, info: EnvironmentInfo) -> None:
        super().__init__(info)
        self._transport = transport

    async def __aenter__(self) -> AsyncRemoteEnvironment:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.destroy()

    exec_command = _done(verbs.exec_command)
    run = _done(verbs.run)
    stream_command = _streamed(verbs.stream_command)
    attach_command = _streamed(verbs.attach_command)
    commands = _done(verbs.commands)
    signal_command = _done(verbs.signal_command)

    snapshot = _done(verbs.snapshot)
    restore = _done(verbs.restore)
    pause = _done(verbs.pause)
    resume = _done(verbs.resume)
    destroy = _done(verbs.destroy)
    cleanup = destroy
    remove_snapshot = _done(verbs.remove_snapshot)
    rename_snapshot = _done(verbs.rename_snapshot)
    pin_snapshot = _done(verbs.pin_snapshot)

    info = _done(verbs.info)
    update = _done(verbs.update)
    snapshots = _done(verbs.snapshots)
    tree = _done(verbs.tree)
    diff = _done(verbs.diff)
    usage = _done(verbs.usage)

    read_file = _done(transfer.read_file)
    write_file = _done(transfer.write_file)
    upload = _done(transfer.upload)
    download = _done(transfer.download)
    list_files = _done(transfer.list_files)
    stat_file = _done(transfer.stat_file)
    move_file = _done(transfer.move_file)
    remove_file = _done(transfer.remove_file)
    make_directory = _done(transfer.make_directory)

    @overload
    async def fork(self, n: int = 1, *, from_snapshot: str | None = None) -> list[AsyncRemoteEnvironment]: ...
    @overload
    async def fork(
        self, n: int = 1, *, from_snapshot: str | None = None, return_errors: Literal[True]
    ) -> list[AsyncRemoteEnvironment | ForkFailure]: ...
    async def fork(
        self, n: int = 1, *, from_snapshot: str | None = None, return_errors: bool = False
    ) -> list[AsyncRemoteEnvironment] | list[AsyncRemoteEnvironment | ForkFailure]:
        """N live, independent environments from a snapshot, or from now (which takes a snapshot first).

        All or none, unless `return_errors`: then a ForkFailure stands where one could not be made.
        """
        made = await self._transport.do(verbs.fork(self, n, from_snapshot, return_errors))
        return [one if isinstance(one, ForkFailure) else AsyncRemoteEnvironment(self._transport, one) for one in made]

    state = _done(verbs.state)
    description = _done(verbs.description)
    history = _done(verbs.history)
    stats = _done(verbs.stats)


def _asked(verb: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    @functools.wraps(verb)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._transport.do(verb(*args, **kwargs))

    return method


def _made(
    verb: Callable[P, Call[EnvironmentInfo]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, AsyncRemoteEnvironment]]:
    @functools.wraps(verb)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncRemoteEnvironment:
        return AsyncRemoteEnvironment(self._transport, await self._transport.do(verb(*args, **kwargs)))

    return method


class AsyncClient:
    """The daemon at a url (with a token), or at a unix socket: by default the one in the default state directory."""

    def __init__(
        self,
        url: str | None = None,
        *,
        socket: Path | str | None = None,
        token: str | None = None,
        ca: Path | str | None = None,
        retry_seconds: float = 30.0,
    ) -> None:
        self._transport = AsyncTransport(Address(url, socket, token, ca, retry_seconds))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Environments stay."""
        await self._transport.close()

    create_env_manager = _made(making.create_env_manager)
    create = _made(making.create)
    environment = _made(making.environment)
    environments = _asked(making.environments)
    snapshots = _asked(making.snapshots)
    remove_snapshot = _asked(making.remove_snapshot)
    backends = _asked(making.backends)
