"""Other wire formats under the same guard: who calls is found in other headers, and errors are told in other words.

Rates, limits, the audit log and the metrics are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from starlette.responses import Response
from starlette.types import Scope

if TYPE_CHECKING:
    from statefork.server.guard.principal import Principal

__all__ = ["Dialect", "recognise", "translated"]

_KEY = "statefork.dialect"


class Dialect(Protocol):
    def speaks(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        """Whether this request is one of its own."""
        ...

    def admit(self, scope: Scope, headers: Mapping[str, str]) -> Principal | None:
        """The caller by this format's own proof; None: by a token, as elsewhere. Raises: Refused."""
        ...

    def refuse(self, scope: Scope, error: Exception, usual: Response) -> Response:
        """An error as its clients expect it. `usual` is the problem document, with status and headers."""
        ...


def recognise(scope: Scope, headers: Mapping[str, str], dialects: list[Dialect]) -> Dialect | None:
    """Found once, and remembered with the request."""
    found = next((one for one in dialects if one.speaks(scope, headers)), None)
    scope[_KEY] = found
    return found


def translated(scope: Scope, error: Exception, usual: Response) -> Response:
    dialect: Dialect | None = scope.get(_KEY)
    return usual if dialect is None else dialect.refuse(scope, error, usual)
