"""The way to the daemon of a state directory: the one that runs, or else one in this process.

Several hosts may start a server each over the same directory. The first that finds no daemon is the daemon, on the usual
socket; the others use it, and when it ends the next call of any of them takes over. Environments outlive all of that, so to a
model nothing happens. A request is sent again only if it could not be sent at all, or if doing it twice is
the same as once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from statefork.errors import Busy, KernelError

if TYPE_CHECKING:
    import uvicorn

__all__ = ["Daemon"]

log = logging.getLogger(__name__)
_START_SECONDS = 60.0
_CALL_SECONDS = 900.0
_ELSEWHERE_SECONDS = 15.0
_ATTEMPTS = 3
_LOST = (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


class Daemon:
    """Use it as an async context manager; nothing is started before the first request."""

    def __init__(self, home: Path | None, *, url: str | None = None, token: str | None = None) -> None:
        self._home, self._url, self._token = home, url, token
        self._client: httpx.AsyncClient | None = None
        self._turn = asyncio.Lock()
        self._own: _InProcess | None = None

    async def __aenter__(self) -> Daemon:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._forget()
        if self._own is not None:
            await self._own.stop()

    async def request(
        self,
        method: str,
        path: str,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = False,
        **more: Any,
    ) -> httpx.Response:
        """`token` is the caller's; without one the daemon sees the owner of its socket.

        What is `repeatable` is also sent again when the daemon ended while it worked on it. Raises httpx.TransportError.
        """
        bearer = token or self._token
        sent = {**(headers or {}), **({"Authorization": f"Bearer {bearer}"} if bearer else {})}
        lost = _LOST if repeatable else (httpx.ConnectError,)
        for attempt in range(_ATTEMPTS):
            client = await self._reached()
            try:
                return await client.request(method, path, headers=sent, **more)
            except lost:
                await self._forget(client)
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("not reached")

    async def _reached(self) -> httpx.AsyncClient:
        async with self._turn:
            if self._client is None:
                self._client = self._remote() if self._url else await self._local()
            return self._client

    def _remote(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._url or "", timeout=_CALL_SECONDS)

    async def _local(self) -> httpx.AsyncClient:
        assert self._home is not None
        socket = self._home / "statefork.sock"
        transport = httpx.AsyncHTTPTransport(uds=str(socket), limits=httpx.Limits(max_connections=None))
        client = httpx.AsyncClient(transport=transport, base_url="http://statefork", timeout=_CALL_SECONDS)
        deadline, elsewhere = time.monotonic() + _START_SECONDS, time.monotonic() + _ELSEWHERE_SECONDS
        while True:
            state = await _asked(client)
            if state == "ready":
                return client
            if state == "absent":
                try:
                    await self._become(socket)
                    continue
                except Busy as error:  # somebody else is just starting one, or listens elsewhere
                    if time.monotonic() > elsewhere:
                        await client.aclose()
                        raise Busy(
                            f"{error.message}. It does not listen on {socket}: say where with `statefork mcp --url`"
                        ) from error
            if time.monotonic() > deadline:
                await client.aclose()
                raise KernelError(f"the daemon on {socket} does not become ready; its log tells why")
            await asyncio.sleep(0.05)

    async def _become(self, socket: Path) -> None:
        if self._own is not None:
            await self._own.stop()
            self._own = None
        assert self._home is not None
        own = await asyncio.to_thread(_InProcess, self._home, socket)
        await own.start()
        self._own = own

    async def _forget(self, client: httpx.AsyncClient | None = None) -> None:
        async with self._turn:
            if self._client is not None and client in (None, self._client):
                await self._client.aclose()
                self._client = None


async def _asked(client: httpx.AsyncClient) -> str:
    try:
        return "ready" if (await client.get("/readyz", timeout=10)).status_code == 200 else "starting"
    except httpx.ConnectError:
        return "absent"
    except httpx.HTTPError:
        return "starting"


class _InProcess:
    """The daemon as a task of this process's event loop."""

    def __init__(self, home: Path, socket: Path) -> None:
        """Imports the web framework, which takes a second: on a thread. Raises Busy if there is a daemon."""
        from statefork.server.app import create_app
        from statefork.server.guard.listening import bind_unix, uvicorn_config
        from statefork.server.settings import Settings

        settings = Settings(home=home, unix_socket=True)
        app = create_app(settings)
        try:
            self._listener = bind_unix(socket)
        except BaseException:
            app.state.guard.close()
            raise
        self._server = _quiet(uvicorn_config(app, settings.limits))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._listener]), name="statefork-daemon")
        while not self._server.started:
            if self._task.done():
                await self._task  # raises what stopped it
                raise KernelError("the daemon ended while it started; its log tells why")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)


def _quiet(config: uvicorn.Config) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # signals are for the process around it

    return Server(config)
