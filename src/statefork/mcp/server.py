"""The MCP server: all tools over one way to the daemon; and its streamable HTTP application behind the daemon's guard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.types import ASGIApp

from statefork.mcp import tools_commands, tools_environments, tools_files, tools_states
from statefork.mcp.daemon import Daemon
from statefork.mcp.desk import Desk
from statefork.mcp.registering import Registrar
from statefork.mcp.texts import INSTRUCTIONS
from statefork.server.guard.install import Guard, GuardSettings
from statefork.server.guard.limits import Limits
from statefork.server.guard.middleware import GuardMiddleware
from waypoint import __version__

__all__ = ["http_app", "http_guard", "make_server"]


def make_server(daemon: Daemon) -> MCPServer[Any]:
    server: MCPServer[Any] = MCPServer(
        "statefork", title="StateFork", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING"
    )
    desk, tool = Desk(daemon), Registrar(server)
    for room in (tools_environments, tools_commands, tools_files, tools_states):
        room.register(tool, desk)
    return server


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
