"""Who is calling, and what they may do.

The middleware (middleware.py) finds out who it is, before a byte of the body is read; a route only says which scope it needs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from statefork.server.guard.problems import Refused

__all__ = ["LOCAL", "SCOPES", "Principal", "principal_of", "require"]

_IMPLIES = {
    "admin": frozenset({"admin", "exec", "read", "metrics"}),
    "exec": frozenset({"exec", "read"}),
    "read": frozenset({"read"}),
    "metrics": frozenset({"metrics"}),
}
SCOPES = tuple(_IMPLIES)
"""`metrics` opens /metrics and nothing else: for a scraper, which needs no more."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The bearer of a token, or the user who may open the daemon's socket."""

    token_id: str
    name: str
    scopes: frozenset[str]
    environments: frozenset[str] | None = None
    """Environments of others that this token reaches too; None: none."""
    max_environments: int | None = None

    def may(self, scope: str) -> bool:
        """admin implies exec implies read."""
        return any(scope in _IMPLIES.get(held, ()) for held in self.scopes)

    def sees(self, owner_token_id: str, environment_id: str) -> bool:
        """Its own, those that its token lists, and for admin all. What a caller does not see is answered with 404."""
        return (
            owner_token_id == self.token_id
            or (self.environments is not None and environment_id in self.environments)
            or self.may("admin")
        )


LOCAL = Principal(token_id="local", name="local", scopes=frozenset({"admin"}))
"""Whoever may open the unix socket, which is its owner: mode 0600."""


def principal_of(connection: HTTPConnection) -> Principal:
    found = getattr(connection.state, "principal", None)
    if not isinstance(found, Principal):
        raise Refused(401, "unauthenticated", "this needs a token; make one with `statefork token create`")
    return found


def require(scope: str) -> Callable[[HTTPConnection], Awaitable[Principal]]:
    """A FastAPI dependency, for HTTP and WebSocket routes: the caller, or a 401 or 403 problem.

    A coroutine, though it waits for nothing: FastAPI would run a plain function on another thread.
    """
    if scope not in SCOPES:
        raise ValueError(f"no scope {scope!r}; there are: {', '.join(SCOPES)}")

    async def required(connection: HTTPConnection) -> Principal:
        principal = principal_of(connection)
        if not principal.may(scope):
            held = ", ".join(sorted(principal.scopes)) or "nothing"
            raise Refused(
                403,
                "forbidden",
                f"token {principal.token_id} has the scope {held}, and this needs {scope}; "
                f"make one with `statefork token create --scope {scope}`",
                scope=scope,
            )
        return principal

    return required
