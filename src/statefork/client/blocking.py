"""The client to call: `Client`, and `RemoteEnvironment` with the methods of the library's Environment.

The verbs are in verbs.py, transfer.py and making.py, and bound here; awaiting.py binds the same ones to await.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Concatenate, Literal, ParamSpec, TypeVar, overload

from statefork.client import making, transfer, verbs
from statefork.client.address import Address
from statefork.client.handle import Handle
from statefork.client.parsing import EnvironmentInfo
from statefork.client.steps import Call, Follow
from statefork.client.streaming import RemoteStream
from statefork.client.transport import Transport
from statefork.history import History, Stats
from statefork.model import ForkFailure

__all__ = ["Client", "RemoteEnvironment"]

P = ParamSpec("P")
T = TypeVar("T")


def _done(verb: Callable[Concatenate[Handle, P], Call[T]]) -> Callable[Concatenate[RemoteEnvironment, P], T]:
    @functools.wraps(verb)
    def method(self: RemoteEnvironment, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._transport.do(verb(self, *args, **kwargs))

    return method


def _streamed(
    verb: Callable[Concatenate[Handle, P], Follow],
) -> Callable[Concatenate[RemoteEnvironment, P], RemoteStream]:
    @functools.wraps(verb)
    def method(self: RemoteEnvironment, /, *args: P.args, **kwargs: P.kwargs) -> RemoteStream:
        return RemoteStream(self._transport, self._transport.following(verb(self, *args, **kwargs)))

    return method


class RemoteEnvironment(Handle):
    """Make one with `Client.create_env_manager`, or come back to one with `Client.environment(id)`.

    As with the library, leaving its `with` block destroys it. Without one it stays, whatever becomes of this process.
    """

    def __init__(self, transport: Transport, info: EnvironmentInfo) -> None:
        super().__init__(info)
        self._transport = transport

    def __enter__(self) -> RemoteEnvironment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.destroy()

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
    def fork(self, n: int = 1, *, from_snapshot: str | None = None) -> list[RemoteEnvironment]: ...
    @overload
    def fork(
        self, n: int = 1, *, from_snapshot: str | None = None, return_errors: Literal[True]
    ) -> list[RemoteEnvironment | ForkFailure]: ...
    def fork(
        self, n: int = 1, *, from_snapshot: str | None = None, return_errors: bool = False
    ) -> list[RemoteEnvironment] | list[RemoteEnvironment | ForkFailure]:
        """N live, independent environments from a snapshot, or from now (which takes a snapshot first).

        All or none, unless `return_errors`: then a ForkFailure stands where one could not be made.
        """
        made = self._transport.do(verbs.fork(self, n, from_snapshot, return_errors))
        return [one if isinstance(one, ForkFailure) else RemoteEnvironment(self._transport, one) for one in made]

    @property
    def state(self) -> str:
        """`live`, `paused`, `lost` or `destroyed`, as the daemon says now."""
        return self._transport.do(verbs.state(self))

    @property
    def description(self) -> str:
        """What to look for on the daemon's host; empty unless live."""
        return self._transport.do(verbs.description(self))

    @property
    def history(self) -> History:
        """What was done with it, by whomever, since the daemon started."""
        return self._transport.do(verbs.history(self))

    @property
    def stats(self) -> Stats:
        return self._transport.do(verbs.stats(self))


def _asked(verb: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    @functools.wraps(verb)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._transport.do(verb(*args, **kwargs))

    return method


def _made(verb: Callable[P, Call[EnvironmentInfo]]) -> Callable[Concatenate[Client, P], RemoteEnvironment]:
    @functools.wraps(verb)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> RemoteEnvironment:
        return RemoteEnvironment(self._transport, self._transport.do(verb(*args, **kwargs)))

    return method


class Client:
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
        """`retry_seconds`: how long what can safely be asked again is asked again, through restarts and 429s; 0: never."""
        self._transport = Transport(Address(url, socket, token, ca, retry_seconds))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Environments stay."""
        self._transport.close()

    create_env_manager = _made(making.create_env_manager)
    create = _made(making.create)
    environment = _made(making.environment)
    environments = _asked(making.environments)
    snapshots = _asked(making.snapshots)
    remove_snapshot = _asked(making.remove_snapshot)
    backends = _asked(making.backends)
