"""Streamable HTTP: the tools behind the guard of the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.types import ASGIApp

from statefork.server.guard.install import Guard, GuardSettings
from statefork.server.guard.limits import Limits
from statefork.server.guard.middleware import GuardMiddleware

__all__ = ["http_app", "http_guard"]


def http_guard(home: Path, limits: Limits | None = None) -> Guard:
    """The daemon's tokens, limits and audit log, beside the daemon."""
    return Guard(GuardSettings(home / "server", unix_socket=False, limits=limits or Limits(), sole=False))


def http_app(server: MCPServer[Any], guard: Guard, host: str, port: int, names: Sequence[str] = ()) -> ASGIApp:
    """/mcp for bearers of a token. Each request stands for itself (no sessions), so none can be taken over.

    A web page whose name was made to point at this machine (DNS rebinding) sends that name as Host: only our own names,
    and those in `names`, are answered.
    """
    known = dict.fromkeys([host, "127.0.0.1", "localhost", "[::1]", *names])
    hosts = [f"{name}:{port}" if ":" not in name or name.endswith("]") else name for name in known]
    security = TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=[*hosts, *names],
        allowed_origins=[f"{scheme}://{name}" for scheme in ("http", "https") for name in (*hosts, *names)],
    )
    app = server.streamable_http_app(
        stateless_http=True, transport_security=security, host=host, max_request_body_size=guard.limits.body_bytes
    )
    return GuardMiddleware(app, guard)
