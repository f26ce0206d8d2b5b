"""How a function becomes a tool: its description for the model, its hints for the host."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from mcp.server import MCPServer
from mcp_types import ToolAnnotations

from statefork.mcp.answers import Answer
from statefork.mcp.desk import told

__all__ = ["Registrar"]

Tool = Callable[..., Awaitable[Answer]]


class Registrar:
    """`@tool("Title", read_only=True)`: the docstring is what the model reads."""

    def __init__(self, server: MCPServer[Any]) -> None:
        self._server = server

    def __call__(
        self,
        title: str,
        *,
        read_only: bool = False,
        destructive: bool = False,
        idempotent: bool = False,
        open_world: bool = False,
    ) -> Callable[[Tool], Tool]:
        """`destructive`: may end or overwrite something. `open_world`: may reach beyond the environment, by its network."""
        hints = ToolAnnotations(
            title=title,
            read_only_hint=read_only,
            destructive_hint=destructive,
            idempotent_hint=idempotent or read_only,
            open_world_hint=open_world,
        )

        def register(function: Tool) -> Tool:
            self._server.add_tool(
                told(function),
                name=function.__name__,
                title=title,
                description=inspect.cleandoc(function.__doc__ or ""),
                annotations=hints,
                structured_output=True,
            )
            return function

        return register
