"""Errors as problem details (RFC 9457); `code` is the word that the CLI and the library use for the same error.

What goes wrong by the caller's doing is a 4xx, also where the kernel or a backend said no: 5xx is kept for what the daemon's
owner has to look at. An error that nobody foresaw says its request id and nothing else; its traceback is in the log.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketState

from statefork.errors import WaypointError
from statefork.server.guard.dialects import translated

__all__ = ["MEDIA_TYPE", "STATUS", "Problem", "Refused", "add_handlers", "problem_body", "problem_response"]

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"

STATUS: Mapping[str, int] = {
    "usage": 400,
    "not_found": 404,
    "ambiguous": 409,
    "exists": 409,
    "wrong_state": 409,
    "busy": 409,
    "has_children": 409,
    "host_unsupported": 422,
    "unsupported": 422,
    "not_capturable": 422,
    "build": 422,
    "timeout": 422,  # not 408: browsers send a request again by themselves when they get that
    "base_changed": 409,
    "session_dead": 409,
    "disk_full": 507,
    "kernel": 500,
    "criu": 500,
    "store": 500,
    "verify_failed": 500,
    "internal": 500,
}
_OF_STATUS = {400: "usage", 401: "unauthenticated", 403: "forbidden", 404: "not_found", 405: "method_not_allowed"}


class Problem(BaseModel):
    """The body of every error answer; more members tell more about the error."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["urn:statefork:error:not_found"])
    title: str
    status: int
    detail: str
    code: str = Field(description="The same word as in the CLI and the libraries.")
    request_id: str


class Refused(HTTPException):
    """An error of HTTP itself, which the library does not know: no token, too much, too fast."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
        **details: Any,
    ) -> None:
        sent = dict(headers or {})
        if retry_after is not None:
            sent["Retry-After"] = str(max(1, math.ceil(retry_after)))
        if status == 401:
            sent.setdefault("WWW-Authenticate", 'Bearer realm="statefork"')
        super().__init__(status, detail, sent)
        self.code = code
        self.details = details


def problem_body(status: int, code: str, detail: str, request_id: str, details: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: value for name, value in details.items() if name not in Problem.model_fields},
        "type": f"urn:statefork:error:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code,
        "request_id": request_id,
    }


def problem_response(error: Exception, request_id: str) -> Response:
    """Any error as an answer."""
    status, code, detail, details, headers = _told(error, request_id)
    body = json.dumps(problem_body(status, code, detail, request_id, details), default=str).encode()
    return Response(body, status, headers, MEDIA_TYPE)


def _told(error: Exception, request_id: str) -> tuple[int, str, str, Mapping[str, Any], Mapping[str, str]]:
    if isinstance(error, Refused):
        return error.status_code, error.code, error.detail, error.details, error.headers or {}
    if isinstance(error, WaypointError):
        return STATUS.get(error.code, 500), error.code, error.message, error.details, {}
    if isinstance(error, RequestValidationError | WebSocketRequestValidationError):
        # The value that was sent stays out: it may be a password.
        wrong = [{"in": list(one["loc"]), "message": one["msg"]} for one in error.errors()]
        first = wrong[0] if wrong else {"in": [], "message": "it does not fit the schema"}
        where = ".".join(str(part) for part in first["in"])
        return 422, "usage", f"{where}: {first['message']}; see /openapi.json", {"errors": wrong}, {}
    if isinstance(error, HTTPException):
        code = _OF_STATUS.get(error.status_code, "usage" if error.status_code < 500 else "internal")
        return error.status_code, code, str(error.detail), {}, error.headers or {}
    detail = f"the daemon failed; its log tells more under request id {request_id}"
    return 500, "internal", detail, {}, {}


async def _answer(connection: HTTPConnection, error: Exception) -> Response | None:
    """Before a WebSocket is accepted a response refuses it; afterwards it can only be closed."""
    request_id = getattr(connection.state, "request_id", "")
    response = problem_response(error, request_id)
    if response.status_code >= 500:
        log.error("request failed", exc_info=error)
    connection.state.problem_code = _told(error, request_id)[1]
    if isinstance(connection, WebSocket) and connection.application_state is not WebSocketState.CONNECTING:
        await connection.close(1011 if response.status_code >= 500 else 1008, connection.state.problem_code)
        return None
    return translated(connection.scope, error, response)


def add_handlers(app: FastAPI) -> None:
    kinds = (WaypointError, HTTPException, RequestValidationError, WebSocketRequestValidationError)
    for kind in kinds:
        app.add_exception_handler(kind, _answer)  # type: ignore[arg-type]
