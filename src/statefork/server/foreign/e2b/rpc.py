"""The Connect protocol, with JSON messages: one call, one answer; or streams of envelopes (a byte of flags, four of length).

Errors of a stream come in its last envelope. Binary protobuf is refused with 415, as the protocol has it: E2B's SDKs send JSON.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any

from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from statefork.errors import SessionDead, UsageError, WaypointError
from statefork.server.foreign.e2b.access import sandbox_of
from statefork.server.foreign.e2b.dialect import END, connect_error, envelope
from statefork.server.guard.principal import Principal
from statefork.server.guard.problems import Refused
from statefork.server.routes.asking import answer
from statefork.server.service.held import Held
from statefork.server.service.service import Service

__all__ = [
    "keepalive_of",
    "member",
    "messages",
    "only_message",
    "reply",
    "sandbox_held",
    "stream",
    "text",
    "timeout_of",
    "unary",
    "unary_of_stream",
]

log = logging.getLogger(__name__)

_MOST_MESSAGE_BYTES = 16 << 20


async def unary(request: Request) -> dict[str, Any]:
    """The message of a call."""
    if "json" not in request.headers.get("content-type", ""):
        raise HTTPException(415, "only JSON messages are spoken here", {"Accept-Post": "application/json"})
    return _document(await request.body() or b"{}")


async def messages(request: Request) -> AsyncIterator[dict[str, Any]]:
    """The messages of a caller's stream, as they come."""
    if not request.headers.get("content-type", "").startswith("application/connect+json"):
        raise HTTPException(415, "only JSON messages are spoken here", {"Accept-Post": "application/connect+json"})
    rest = bytearray()
    async for piece in request.stream():
        rest += piece
        while len(rest) >= 5:
            size = int.from_bytes(rest[1:5], "big")
            if size > _MOST_MESSAGE_BYTES:
                raise Refused(413, "too_large", "a message is larger than 16 MiB")
            if rest[0] & 1:
                raise UsageError("messages are not to be compressed")
            if len(rest) < 5 + size:
                break
            data = bytes(rest[5 : 5 + size])
            del rest[: 5 + size]
            yield _document(data)


async def only_message(request: Request) -> dict[str, Any]:
    async for message in messages(request):
        return message
    raise UsageError("there is no message in the request")


def stream(events: AsyncIterator[dict[str, Any]], request: Request) -> Response:
    async def envelopes() -> AsyncIterator[bytes]:
        end: dict[str, Any] = {}
        try:
            async for event in events:
                yield envelope(0, event)
        except (WaypointError, Refused) as error:
            request.state.problem_code = error.code
            end = {"error": connect_error(error.code, getattr(error, "message", "") or str(error))}
        except Exception:
            log.exception("a stream failed")
            request.state.problem_code = "internal"
            end = {"error": {"code": "internal", "message": f"request {request.state.request_id} failed"}}
        yield envelope(END, end)

    return StreamingResponse(
        envelopes(),
        media_type="application/connect+json",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def unary_of_stream(doing: Awaitable[None], request: Request) -> Response:
    """The answer to a caller's stream: one empty message. That is read to its end first: an answer that has begun would take
    what still comes for the caller's leaving."""
    failed: WaypointError | Refused | None = None
    try:
        await doing
    except (WaypointError, Refused) as error:
        failed = error

    async def events() -> AsyncIterator[dict[str, Any]]:
        if failed is not None:
            raise failed
        yield {}

    return stream(events(), request)


def reply(document: dict[str, Any]) -> Response:
    return answer(document)


def sandbox_held(request: Request, service: Service, principal: Principal) -> Held:
    """The sandbox that the caller's key opens. Raises SessionDead when it is gone or stands still."""
    identifier = request.scope.get("statefork.sandbox") or sandbox_of(request.headers) or ""
    held = service.held.get(identifier)
    asleep = held is not None and held.state == "paused" and held.row.paused_by != "idle"
    if held is None or held.gone or held.lost or asleep or not principal.sees(held.row.owner, held.id):
        raise SessionDead(f"sandbox {identifier} was not found")
    return held


def timeout_of(request: Request) -> float | None:
    """Seconds that the call may take; None: as many as it likes."""
    text = request.headers.get("connect-timeout-ms", "")
    return int(text) / 1000 if _is_number(text) and int(text) else None


def keepalive_of(request: Request) -> float:
    text = request.headers.get("keepalive-ping-interval", "")
    return float(min(max(int(text), 1), 300)) if _is_number(text) else 50.0


def member(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A message inside a message; empty if it is left out."""
    found = message.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UsageError(f"{name} is a message, not a {type(found).__name__}")
    return found


def text(message: Mapping[str, Any], name: str) -> str | None:
    found = message.get(name)
    if found is not None and not isinstance(found, str):
        raise UsageError(f"{name} is text")
    return found or None


def _is_number(digits: str) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits) <= 10


def _document(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        raise UsageError("the message is no JSON document") from None
    if not isinstance(found, dict):
        raise UsageError("the message is no JSON object")
    return found
