"""What routes share: who asks, what for, and how they are answered."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Path, Query, Request
from starlette.requests import HTTPConnection
from starlette.responses import Response

from statefork.errors import UsageError
from statefork.server.guard.install import Guard
from statefork.server.guard.principal import Principal, require
from statefork.server.guard.problems import Problem
from statefork.server.service.answers import Reply
from statefork.server.service.held import Held
from statefork.server.service.service import Service

__all__ = [
    "PROBLEMS",
    "Admins",
    "Cursor",
    "Execs",
    "Ids",
    "Key",
    "Limit",
    "Reads",
    "Services",
    "answer",
    "decode_bytes",
    "guard_of",
    "moment",
    "once",
    "page",
    "service_of",
    "text_of",
]  # fmt: skip

T = TypeVar("T")


async def service_of(connection: HTTPConnection) -> Service:
    """A coroutine, though it waits for nothing: FastAPI would run a plain function on another thread."""
    found: Service = connection.app.state.service
    return found


def guard_of(connection: HTTPConnection) -> Guard:
    found: Guard = connection.app.state.guard
    return found


Services = Annotated[Service, Depends(service_of)]
Reads = Annotated[Principal, Depends(require("read"))]
Execs = Annotated[Principal, Depends(require("exec"))]
Admins = Annotated[Principal, Depends(require("admin"))]
Ids = Annotated[str, Path(description="An id, or a prefix of it that fits only one.", max_length=128)]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="Sent again with the same key, the request is done once and answered the same. Known for a day.",
        min_length=1,
        max_length=255,
    ),
]
Limit = Annotated[int, Query(ge=1, le=1000, description="How many at most.")]
Cursor = Annotated[str | None, Query(description="`next_cursor` of the page before.", max_length=256)]

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text, "content": {"application/problem+json": {}}}
    for status, text in (
        (400, "The request makes no sense: `usage`."),
        (401, "No token, or a wrong one: `unauthenticated`."),
        (403, "The token has not the scope: `forbidden`."),
        (404, "There is no such thing, or not for you: `not_found`."),
        (409, "Not as things are: `wrong_state`, `busy`, `exists`, `ambiguous`, `has_children`, `session_dead`."),
        (413, "Too large: `too_large`."),
        (422, "It cannot be done: `unsupported`, `timeout`, `build`, `not_capturable`; or `usage`."),
        (429, "Too much at once; Retry-After says when: `overloaded`, `too_many_requests`, `too_many_environments`."),
        (500, "The daemon or the host failed: `internal`, `kernel`, `criu`, `store`."),
        (507, "The disk is full: `disk_full`."),
    )
}


def answer(document: Any, status: int = 200) -> Response:
    """Made by hand and not by FastAPI: the documents are ours already, to check them again would cost a millisecond."""
    return Response(json.dumps(document).encode(), status, media_type="application/json")


async def once(
    request: Request,
    service: Service,
    principal: Principal,
    key: str | None,
    reference: str,
    do: Callable[[str], Awaitable[Reply]],
    again: Callable[[str], Awaitable[Reply | None]] | None = None,
) -> Response:
    """Answer a request that makes something, and a repetition of it the same way."""
    asked = b""
    if key is not None:
        asked = f"{request.method} {request.url.path}\n".encode() + await request.body()
    (status, body), replayed = await service.answers.once(principal, key, asked, reference, do, again)
    headers = {"Idempotency-Replayed": "true"} if replayed else None
    return Response(body, status, headers, media_type="application/json")


def encoded(document: Any, status: int = 200) -> Reply:
    return status, json.dumps(document).encode()


def page(items: Sequence[T], limit: int, cursor: str | None, key: Callable[[T], str]) -> tuple[list[T], str | None]:
    """The items after the cursor. Keys sort as the items do, so what was deleted meanwhile does not disturb."""
    if cursor is not None:
        try:
            after = base64.urlsafe_b64decode(cursor.encode()).decode()
        except (binascii.Error, ValueError):
            raise UsageError("that is no cursor; take `next_cursor` of the page before as it is") from None
        items = [item for item in items if key(item) > after]
    some = list(items[:limit])
    more = len(items) > limit
    return some, base64.urlsafe_b64encode(key(some[-1]).encode()).decode() if more else None


def by_age(held: Held) -> str:
    return f"{held.row.created:020.6f} {held.id}"


def moment(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def text_of(data: bytes, encoding: str) -> str:
    return base64.b64encode(data).decode() if encoding == "base64" else data.decode(errors="replace")


def decode_bytes(text: str | None, coded: str | None, what: str) -> bytes | None:
    if coded is None:
        return None if text is None else text.encode(errors="surrogateescape")
    if text:
        raise UsageError(f"give only one of {what} and {what}_base64")
    try:
        return base64.b64decode(coded, validate=True)
    except (binascii.Error, ValueError):
        raise UsageError(f"{what}_base64 is not base64") from None
