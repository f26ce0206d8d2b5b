"""The Guard: what the daemon keeps for its protection, and how it is put around an application."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import HTTPConnection

from statefork.server.guard.audit import AuditLog
from statefork.server.guard.claim import Claim
from statefork.server.guard.dialects import Dialect
from statefork.server.guard.health import Checks, health_routes
from statefork.server.guard.limits import Limits
from statefork.server.guard.metrics import Metrics
from statefork.server.guard.middleware import GuardMiddleware
from statefork.server.guard.problems import add_handlers
from statefork.server.guard.tokens import TokenStore
from statefork.server.guard.tracing import Tracing

__all__ = ["Guard", "GuardSettings", "install"]


@dataclass(frozen=True, slots=True)
class GuardSettings:
    directory: Path
    """`<home>/server`: the database, the audit log."""
    unix_socket: bool = True
    """The daemon listens on a unix socket and nowhere else: a caller without a token is the socket's owner."""
    limits: Limits = field(default_factory=Limits)
    otlp_endpoint: str | None = None
    sole: bool = True
    """This is the daemon of the directory: no other may be. False for a surface beside the daemon, such as MCP."""


class Guard:
    """Made before the application, closed after it. Raises Busy if the directory has a daemon already."""

    def __init__(self, settings: GuardSettings) -> None:
        self._claim = Claim(settings.directory) if settings.sole else None
        self.settings = settings
        self.limits = settings.limits
        self.tokens = TokenStore(settings.directory / "server.db")
        self.audit = AuditLog(settings.directory)
        self.metrics = Metrics()
        self.checks: Checks = {}
        """Put yours in: /readyz asks them all."""
        self.dialects: list[Dialect] = []
        """Other wire formats that are served; the first that speaks a request's has it."""
        self.tracing = Tracing.start(settings.otlp_endpoint)

    def note(self, connection: HTTPConnection, *, action: str, environment: str | None = None, **facts: Any) -> None:
        """Name what this request does, for the audit log. Called again it adds and overrides.

        No secrets: for a command pass `command=guard.fingerprint(text)`, never the text.
        """
        noted: dict[str, Any] = connection.scope.setdefault("statefork.audit", {"facts": {}})
        noted["action"] = action
        noted["environment"] = environment or noted.get("environment")
        noted["facts"].update(facts)

    def fingerprint(self, secret: str | bytes) -> dict[str, Any]:
        return self.audit.fingerprint(secret)

    def close(self) -> None:
        self.tracing.close()
        self.audit.close()
        self.tokens.close()
        if self._claim is not None:
            self._claim.release()


def install(app: FastAPI, guard: Guard) -> None:
    """Middleware, error handlers and the health routes; `app.state.guard` is the guard from then on."""
    app.state.guard = guard
    add_handlers(app)
    app.include_router(health_routes(guard.checks, guard.metrics))
    app.add_middleware(GuardMiddleware, guard=guard)
