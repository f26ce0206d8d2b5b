"""Around every request: its id, who it is, whether they may go on, and what is written down afterwards.

Plain ASGI, not Starlette's BaseHTTPMiddleware: that one buffers, and hides disconnects from streams. The caller is known and
the rate is checked before a byte of the body is read. The audit line is written before the answer's last byte goes out, so
that nobody holds a complete answer that the log does not know; a stream or a WebSocket has a line at its beginning too.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from statefork.errors import WaypointError
from statefork.server.guard.dialects import recognise, translated
from statefork.server.guard.limits import RateLimiter, body_limited
from statefork.server.guard.logs import request_id_var
from statefork.server.guard.principal import LOCAL, Principal
from statefork.server.guard.problems import Refused, problem_response

if TYPE_CHECKING:
    from statefork.server.guard.install import Guard

__all__ = ["OPEN_PATHS", "GuardMiddleware"]

log = logging.getLogger("statefork.access")

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_BODILESS = frozenset({204, 304})
_STREAMS = ("text/event-stream", "application/connect+")


class GuardMiddleware:
    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard
        self._rate = RateLimiter(guard.limits.requests_per_second, guard.limits.burst)
        per_minute = guard.limits.refusals_per_minute
        self._wrong = RateLimiter(per_minute / 60, max(1.0, per_minute))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(self._guard, scope, send)
        token = request_id_var.set(exchange.request_id)
        try:
            with self._guard.tracing.span("request", exchange.headers) as span:
                await self._serve(exchange, scope, receive)
                exchange.describe(span)
        finally:
            exchange.finish()
            request_id_var.reset(token)

    async def _serve(self, exchange: _Exchange, scope: Scope, receive: Receive) -> None:
        try:
            if scope["path"] not in OPEN_PATHS:
                exchange.admit(self._admitted(exchange, scope))
        except (Refused, WaypointError) as error:
            self._guard.metrics.refused(error.code)
            exchange.refused(error)
            await exchange.deny(error, receive)
            return
        if scope["type"] == "http":
            receive = body_limited(scope, receive, self._guard.limits)
        try:
            await self._app(scope, receive, exchange.send)
        except Exception as error:
            log.error("request failed", exc_info=error)
            exchange.code = exchange.code or "internal"
            if exchange.started:
                raise
            await exchange.deny(error, receive)

    def _admitted(self, exchange: _Exchange, scope: Scope) -> Principal:
        dialect = recognise(scope, exchange.headers, self._guard.dialects)
        presented = _presented(exchange.headers)
        if presented is None and self._guard.settings.unix_socket and scope.get("client") is None:
            return LOCAL
        address = scope["client"][0] if scope.get("client") else "local"
        wait = self._wrong.wait_seconds(address, take=False)
        if wait:
            raise Refused(429, "too_many_requests", "too many wrong tokens from this address", retry_after=wait)
        try:
            principal = dialect.admit(scope, exchange.headers) if dialect is not None else None
            if principal is None and presented is None:
                raise Refused(
                    401, "unauthenticated", "send `Authorization: Bearer TOKEN`; `statefork token create` makes one"
                )
            if principal is None:
                principal = self._guard.tokens.authenticate(presented or "")
        except Refused:
            self._wrong.wait_seconds(address)
            raise
        wait = self._rate.wait_seconds(principal.token_id)
        if wait:
            raise Refused(429, "too_many_requests", "too many requests with this token", retry_after=wait)
        return principal


def _presented(headers: Mapping[str, str]) -> str | None:
    """None if no credentials were sent; another scheme is a wrong token."""
    header = headers.get("authorization")
    if header is None:
        return headers.get("x-api-key")
    scheme, _, value = header.partition(" ")
    return value.strip() if scheme.lower() == "bearer" else ""


class _Exchange:
    """One request and what becomes of it."""

    def __init__(self, guard: Guard, scope: Scope, send: Send) -> None:
        self._guard, self._scope, self._send = guard, scope, send
        self._began = time.perf_counter()
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = self.headers.get("x-request-id", "")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        self.principal: Principal | None = None
        self.started = False
        self.status = 0
        self.code = ""
        self._finished = False
        state = scope.setdefault("state", {})
        state["request_id"] = self.request_id
        state["principal"] = None

    def admit(self, principal: Principal) -> None:
        self.principal = principal
        self._scope["state"]["principal"] = principal

    def refused(self, error: Refused | WaypointError) -> None:
        self.code = error.code

    async def deny(self, error: Exception, receive: Receive) -> None:
        response = translated(self._scope, error, problem_response(error, self.request_id))
        await response(self._scope, receive, self.send)

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind in ("http.response.start", "websocket.http.response.start"):
            self.started, self.status = True, message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self.request_id
            headers.setdefault("X-Content-Type-Options", "nosniff")
            headers.setdefault("Cache-Control", "no-store")
            if headers.get("content-type", "").startswith(_STREAMS):
                self._record(phase="begin")
            elif (
                self.status in _BODILESS or headers.get("content-length") == "0" or self._scope.get("method") == "HEAD"
            ):
                self.finish()  # its head is all of it
        elif kind in ("http.response.body", "websocket.http.response.body") and not message.get("more_body", False):
            self.finish()
        elif kind == "websocket.accept":
            self.started, self.status = True, 101
            self._record(phase="begin")
        elif kind == "websocket.close":
            self.status = self.status or 403
            self.finish()
        await self._send(message)
        if message.get("more_body", False):
            # To a client that is gone uvicorn "sends" without waiting: an eager stream would never let the loop go on.
            await asyncio.sleep(0)

    def describe(self, span: Any) -> None:
        if span is not None:
            span.update_name(f"{self._method} {self._route}")
            span.set_attribute("http.request.method", self._method)
            span.set_attribute("http.route", self._route)
            span.set_attribute("http.response.status_code", self.status)
            span.set_attribute("statefork.request_id", self.request_id)

    def finish(self) -> None:
        """Once, when the outcome is known: before the last byte, or when the client is gone."""
        if self._finished:
            return
        self._finished = True
        seconds = time.perf_counter() - self._began
        if not self.status:
            self.code = self.code or "disconnected"
        self._guard.metrics.request(self._method, self._route, self.status, seconds)
        fields = {
            "method": self._method,
            "route": self._route,
            "status": self.status,
            "duration_ms": round(seconds * 1000, 2),
            "principal": self.principal.token_id if self.principal else None,
        }
        log.info("request", extra={**fields, **({"code": self._outcome} if self._outcome != "ok" else {})})
        self._record(duration_ms=seconds * 1000)

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _method(self) -> str:
        if self._scope["type"] == "websocket":
            return "WEBSOCKET"
        method = self._scope["method"]
        return method if method in (*_READS, "POST", "PUT", "PATCH", "DELETE") else "OTHER"

    @property
    def _route(self) -> str:
        """The template; what fits none is one label value, or a scanner would make thousands."""
        return getattr(self._scope.get("route"), "path", None) or "unmatched"

    @property
    def _outcome(self) -> str:
        code = self.code or self._scope["state"].get("problem_code", "")
        return code or ("ok" if self.status < 400 else f"http_{self.status}")

    def _record(self, *, phase: str | None = None, duration_ms: float | None = None) -> None:
        noted = self._scope.get("statefork.audit")
        if noted is None and not self._worth_recording:
            return
        facts = dict(noted["facts"]) if noted else {"method": self._method, "route": self._route}
        if phase:
            facts["phase"] = phase
        self._guard.audit.append(
            action=noted["action"] if noted else "request",
            principal=self.principal.token_id if self.principal else "-",
            name=self.principal.name if self.principal else "-",
            outcome="begun" if phase else self._outcome,
            environment=noted["environment"] if noted else None,
            request_id=self.request_id,
            status=self.status,
            duration_ms=duration_ms,
            facts=facts,
        )

    @property
    def _worth_recording(self) -> bool:
        """What nobody named: whatever is not a read, and every refusal but that for haste (it would fill the log)."""
        if self.status == 429:
            return False
        return self.status in (401, 403) or self._method not in _READS
