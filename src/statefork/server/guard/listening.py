"""How uvicorn listens: TLS, and connections that do not wait for ever.

uvicorn has a limit for idle connections but none for a head that comes byte by byte, or for an answer that nobody reads.
Both are kept here, in the connection's protocol, because an application never sees them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from statefork.errors import UsageError
from statefork.server.guard.limits import Limits

__all__ = ["HEAD_BYTES", "TlsFiles", "bind_unix", "uvicorn_config"]

HEAD_BYTES = 64 * 1024
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    certificate: Path
    key: Path

    def check(self) -> None:
        """Now, with a message, and not when the first client comes."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"cannot use the certificate {self.certificate} with the key {self.key}: {error}; "
                "both have to be PEM files, and the key has to be that of the certificate"
            ) from error


def uvicorn_config(app: ASGIApp, limits: Limits, tls: TlsFiles | None = None, **more: Any) -> uvicorn.Config:
    """Everything but the address, which is in `more` (`uds`, `fd`, or `host` and `port`). TLS is 1.2 at least."""
    options: dict[str, Any] = {
        "http": _protocol(limits),
        "lifespan": "on",
        "log_config": None,  # see logs.py
        "access_log": False,
        "proxy_headers": False,  # whoever the peer says it is, it is not believed
        "server_header": False,
        "timeout_keep_alive": 65,  # longer than clients keep theirs, so that they never write into a closed one
        "timeout_graceful_shutdown": 10,
        "ws_max_size": limits.body_bytes,
        "ws_max_queue": 32,
    }
    if tls is not None:
        tls.check()
        options |= {"ssl_certfile": str(tls.certificate), "ssl_keyfile": str(tls.key)}
    return uvicorn.Config(app, **{**options, **more})


def bind_unix(path: Path) -> socket.socket:
    """A listening socket that only its owner can open, for `Server.serve(sockets=[...])`.

    uvicorn's own `uds` makes it open to everybody (mode 0666). What is at `path` is replaced: hold the Claim first.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        listener.bind(str(draft))
        draft.chmod(0o600)  # before anybody can listen, and before it has its name
        listener.listen(2048)
        draft.rename(path)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {path}: {error}; choose another with --socket (108 bytes at most)"
        ) from error
    return listener


def _protocol(limits: Limits) -> type[asyncio.Protocol]:
    class Bound(_Deadlines):
        head_seconds = limits.head_seconds
        write_seconds = limits.write_seconds

    return Bound


class _Deadlines(HttpToolsProtocol):
    head_seconds: float
    write_seconds: float

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.head_seconds, self._cut, _TOO_SLOW)

    def data_received(self, data: bytes) -> None:
        """Between requests every byte belongs to a head, which has to end in time and below its limit."""
        if not self._answering:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._answering or self.transport.get_protocol() is not self:  # a request began, or became a WebSocket
            self._head_bytes = 0
            self._stop_head_timer()
        elif self._head_bytes > HEAD_BYTES:
            self._cut(_TOO_LONG)
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_seconds, self._cut, _TOO_SLOW)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _cut(self, answer: bytes) -> None:
        if self.cycle is None:  # else the client would take it for the answer to its next request
            self.transport.write(answer)
        self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
