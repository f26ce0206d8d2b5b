"""The errors of the client: those of the library, found by `code`, and what only a network has.

WaypointError
├── (statefork.errors)        the same class that the library raises, for every code that it knows
├── Refused                   the daemon refused in HTTP's own terms; `code` says which: too_large, too_slow, ...
│   ├── Unauthenticated       unauthenticated      no token, or a wrong or expired one
│   ├── Forbidden             forbidden            the token lacks the scope
│   └── Overloaded            overloaded, too_many_requests, too_many_environments; still so after all retries
└── Unreachable               unreachable          no daemon answers, or the connection broke and to ask again is not safe
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import statefork.errors
from statefork.client.parsing import exec_result
from statefork.errors import ExecTimeout, WaypointError
from statefork.model import ExecResult

__all__ = ["Forbidden", "Overloaded", "Refused", "Unauthenticated", "Unreachable", "error_of", "problem_of"]

_STANDARD = frozenset({"type", "title", "status", "detail", "code", "request_id", "result"})
_CODES: Mapping[str, type[WaypointError]] = {
    kind.code: kind for kind in (getattr(statefork.errors, name) for name in statefork.errors.__all__)
}


class Refused(WaypointError):
    """`details["status"]` is the HTTP status."""

    code = "refused"


class Unauthenticated(Refused):
    code = "unauthenticated"


class Forbidden(Refused):
    code = "forbidden"


class Overloaded(Refused):
    code = "overloaded"


class Unreachable(WaypointError):
    code = "unreachable"


def error_of(problem: Mapping[str, Any], result: ExecResult | None = None) -> WaypointError:
    """What the library would have raised. `result` is for a timeout whose output came another way."""
    code, detail, status = str(problem.get("code", "")), str(problem.get("detail", "")), int(problem.get("status", 0))
    if code == ExecTimeout.code:
        told = exec_result(problem.get("result") or {"exit_code": 124})
        if result is not None:
            told = replace(
                told,
                stdout_bytes=result.stdout_bytes,
                stderr_bytes=result.stderr_bytes,
                output_bytes=result.output_bytes,
                truncated=result.truncated,
            )
        error: WaypointError = ExecTimeout(detail, told)
    else:
        error = _kind(code, status)(detail)
        error.code = code or error.code
    error.details.update({name: value for name, value in problem.items() if name not in _STANDARD})
    if isinstance(error, Refused):
        error.details["status"] = status
    if problem.get("request_id"):
        error.details["request_id"] = problem["request_id"]
    return error


def _kind(code: str, status: int) -> type[WaypointError]:
    if status == 429:
        return Overloaded
    if code == "unauthenticated":
        return Unauthenticated
    if code == "forbidden":
        return Forbidden
    return _CODES.get(code) or (WaypointError if status >= 500 else Refused)


def problem_of(status: int, body: bytes) -> dict[str, Any]:
    """The problem document, or one made of an answer that is not of the daemon (a proxy's page)."""
    try:
        document = json.loads(body)
        if isinstance(document, dict) and "code" in document:
            return document
    except ValueError:
        pass
    text = body[:200].decode(errors="replace").strip()
    return {"status": status, "code": "", "detail": f"the answer was HTTP {status}, not of a StateFork daemon: {text}"}
