"""The MCP server: all tools over one way to the daemon. Imports no web framework: over stdio it is up sooner."""

from __future__ import annotations

from typing import Any

from mcp.server import MCPServer

from statefork.mcp import tools_commands, tools_environments, tools_files, tools_states
from statefork.mcp.daemon import Daemon
from statefork.mcp.desk import Desk
from statefork.mcp.registering import Registrar
from statefork.mcp.texts import INSTRUCTIONS
from waypoint import __version__

__all__ = ["make_server"]


def make_server(daemon: Daemon) -> MCPServer[Any]:
    server: MCPServer[Any] = MCPServer(
        "statefork", title="StateFork", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING"
    )
    desk, tool = Desk(daemon), Registrar(server)
    for room in (tools_environments, tools_commands, tools_files, tools_states):
        room.register(tool, desk)
    return server
