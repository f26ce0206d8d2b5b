"""What all tools share: the way to the daemon, the pages, and who is calling."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ParamSpec

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent
from pydantic import Field

from statefork.errors import WaypointError
from statefork.mcp.answers import Answer
from statefork.mcp.daemon import Daemon
from statefork.mcp.paging import MOST_PAGE_CHARACTERS, PAGE_CHARACTERS, Pages
from statefork.mcp.verbs import Remote

__all__ = ["Desk", "EnvironmentId", "Limit", "told"]

P = ParamSpec("P")

EnvironmentId = Annotated[str, Field(description="Its id, or a beginning of it that fits only one.", min_length=1)]
Limit = Annotated[int, Field(description="The most characters to answer with.", ge=500, le=MOST_PAGE_CHARACTERS)]
DEFAULT_LIMIT = PAGE_CHARACTERS


class Desk:
    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.pages = Pages()

    def remote(self, ctx: Context[Any, Any]) -> Remote:
        return Remote(self._daemon, _token(ctx))

    def owner(self, ctx: Context[Any, Any]) -> str:
        """Whose pages they are; not the token itself, which is not kept."""
        return hashlib.sha256((_token(ctx) or "").encode()).hexdigest()


def _token(ctx: Context[Any, Any]) -> str | None:
    """Over HTTP the guard has checked it; over stdio there is none, and the caller is who started the server."""
    headers = ctx.headers
    scheme, _, token = (headers.get("authorization", "") if headers else "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def told(tool: Callable[P, Awaitable[Answer]]) -> Callable[P, Awaitable[CallToolResult]]:
    """Errors that a model can do something about are told to it, with their code; others stay in the log.

    The output's schema is still that of the model that `tool` returns: the SDK looks through `functools.wraps`.
    """

    @functools.wraps(tool)
    async def telling(*arguments: P.args, **named: P.kwargs) -> CallToolResult:
        try:
            answer = await tool(*arguments, **named)
        except WaypointError as error:
            raise ToolError(f"{error.code}: {error.message}") from error
        text = TextContent(type="text", text=answer.as_text())
        return CallToolResult(content=[text], structured_content=answer.model_dump(mode="json"))

    return telling
