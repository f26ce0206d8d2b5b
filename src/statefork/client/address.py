"""Where the daemon is, and what httpx has to know to get there."""

from __future__ import annotations

import socket as sockets
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from statefork.errors import UsageError
from statefork.home import default_home
from waypoint import __version__

__all__ = ["Address"]

CONNECT_SECONDS = 10.0
_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64)
_KEEPALIVE = [
    # A command may be silent for hours, so reading has no deadline: the kernel asks whether the other host still lives.
    (sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1),
    (sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, 30),
    (sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, 10),
    (sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, 6),
]


@dataclass(frozen=True, slots=True)
class Address:
    """Where the daemon is; without anything its socket in the default state directory."""

    url: str | None = None
    socket: Path | str | None = None
    token: str | None = field(default=None, repr=False)
    ca: Path | str | None = None
    """A certificate (PEM) to trust, for a daemon with its own."""
    retry_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.url is not None and self.socket is not None:
            raise UsageError("give either url or socket, not both")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise UsageError(f"url {self.url!r}: it begins with http:// or https://; for a unix socket use socket=")

    @property
    def path(self) -> str | None:
        if self.url is not None:
            return None
        return str(Path(self.socket or default_home() / "statefork.sock").absolute())

    @property
    def text(self) -> str:
        return self.url or str(self.path)

    def settings(self) -> dict[str, Any]:
        """For httpx's clients."""
        headers = {"User-Agent": f"statefork-python/{__version__}"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        base = self.url.rstrip("/") if self.url else "http://statefork"
        return {"base_url": base, "headers": headers, "timeout": timeout, "trust_env": False}

    def way(self) -> dict[str, Any]:
        """For httpx's transports."""
        if self.path is not None:
            return {"uds": self.path, "limits": _NO_LIMITS}
        trust = ssl.create_default_context(cafile=str(self.ca)) if self.ca else True
        return {"verify": trust, "limits": _NO_LIMITS, "socket_options": _KEEPALIVE}
