"""Tools for files of an environment."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal

from mcp.server.mcpserver import Context
from pydantic import Field

from statefork.errors import UsageError
from statefork.mcp.answers import Content, FileEntry, FileListing, Written
from statefork.mcp.desk import DEFAULT_LIMIT, Desk, EnvironmentId, Limit
from statefork.mcp.registering import Registrar

__all__ = ["register"]

Path = Annotated[str, Field(description="An absolute path inside the environment.", pattern="^/")]
_LISTED = 200


def register(tool: Registrar, desk: Desk) -> None:
    @tool("Read a file", read_only=True)
    async def read_file(
        environment: EnvironmentId,
        path: Path,
        ctx: Context[Any, Any],
        cursor: Annotated[str, Field(description="Of the answer before, for what follows.")] = "",
        max_characters: Limit = DEFAULT_LIMIT,
    ) -> Content:
        """Read a file of an environment, in pages if it is long; what is no text comes as base64.

        For one place in a long file use exec with grep -n or sed -n '100,150p'.
        """
        start = _offset(cursor)
        data = await desk.remote(ctx).read_file(environment, path)
        piece, encoding, end = _page(data, start, max_characters)
        more = str(end) if end < len(data) else None
        return Content(path=path, text=piece, encoding=encoding, size_bytes=len(data), cursor=more)

    @tool("Write a file", destructive=True, idempotent=True)
    async def write_file(
        environment: EnvironmentId,
        path: Path,
        content: Annotated[str, Field(description="All of the file: what was there is replaced.")],
        ctx: Context[Any, Any],
        encoding: Annotated[Literal["utf-8", "base64"], Field(description="base64 for what is no text.")] = "utf-8",
    ) -> Written:
        """Make a file or replace it as a whole; missing directories are made. No quoting is needed, unlike with exec."""
        data = content.encode() if encoding == "utf-8" else _decoded(content)
        await desk.remote(ctx).write_file(environment, path, data)
        return Written(path=path, size_bytes=len(data))

    @tool("List a directory", read_only=True)
    async def list_files(
        environment: EnvironmentId,
        path: Path,
        ctx: Context[Any, Any],
        cursor: Annotated[str, Field(description="Of the answer before, for what follows.")] = "",
    ) -> FileListing:
        """What is in a directory, by name; not below it. To search, use exec with find or grep -r."""
        start = _offset(cursor)
        found = sorted(await desk.remote(ctx).list_files(environment, path), key=lambda one: str(one["name"]))
        some = found[start : start + _LISTED]
        return FileListing(
            path=path,
            entries=[FileEntry(name=one["name"], kind=one["kind"], size_bytes=one["size_bytes"]) for one in some],
            total=len(found),
            cursor=str(start + _LISTED) if start + _LISTED < len(found) else None,
        )


def _offset(cursor: str) -> int:
    if cursor and not cursor.isdigit():
        raise UsageError("that is no cursor of this tool; take it from the answer before, as it is")
    return int(cursor or 0)


def _decoded(content: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"content is not base64: {error}") from error


def _page(data: bytes, start: int, limit: int) -> tuple[str, str, int]:
    """Text, encoding, and where the next page begins: whole characters, and whole lines where there are any."""
    piece = data[start : start + limit]
    if b"\0" in piece:
        piece = data[start : start + limit * 3 // 4]
        return base64.b64encode(piece).decode(), "base64", start + len(piece)
    if start + limit < len(data):
        newline = piece.rfind(b"\n", limit // 2)
        piece = piece[: newline + 1] if newline >= 0 else piece[: _whole(piece)]
    try:
        return piece.decode(), "utf-8", start + len(piece)
    except UnicodeDecodeError:
        piece = data[start : start + limit * 3 // 4]
        return base64.b64encode(piece).decode(), "base64", start + len(piece)


def _whole(piece: bytes) -> int:
    """The length without a character that is cut off at its end."""
    end = len(piece)
    while end > len(piece) - 4 and end > 0 and piece[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if end > 0 and piece[end - 1] >= 0xC0 else len(piece)
