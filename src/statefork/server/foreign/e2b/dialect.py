"""Which requests are E2B's, who sends them, and how its clients are told of errors: plain JSON from the control plane and for
files, Connect's JSON from the services in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import Scope

from statefork.server.foreign.e2b.access import Access, sandbox_of
from statefork.server.guard.principal import Principal
from statefork.server.guard.problems import Refused

if TYPE_CHECKING:
    from statefork.server.service.service import Service

__all__ = ["CONNECT_CODES", "END", "E2bDialect", "connect_error", "envelope", "sandbox_gone"]

_CONTROL = ("sandboxes", "snapshots", "templates", "volumes", "secrets", "teams", "nodes", "volumecontent")
_VERSIONED = ("v2", "v3")
_ENVD = ("files", "health", "process.Process", "filesystem.Filesystem")

END = 2
"""The flag of a stream's last envelope."""
CONNECT_CODES = {
    "usage": "invalid_argument",
    "not_found": "not_found",
    "exists": "already_exists",
    "unsupported": "unimplemented",
    "host_unsupported": "unimplemented",
    "busy": "failed_precondition",
    "wrong_state": "failed_precondition",
    "session_dead": "unavailable",
    "timeout": "deadline_exceeded",
    "disk_full": "resource_exhausted",
    "unauthenticated": "unauthenticated",
    "forbidden": "permission_denied",
    "overloaded": "resource_exhausted",
    "too_many_requests": "resource_exhausted",
    "too_many_environments": "resource_exhausted",
    "too_large": "resource_exhausted",
    "method_not_allowed": "unimplemented",
}


class E2bDialect:
    def __init__(self, app: FastAPI, access: Access) -> None:
        self._app, self._access = app, access

    def speaks(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        first, _, rest = scope["path"].lstrip("/").partition("/")
        if first in _VERSIONED:
            first = rest.partition("/")[0]
        return first in _CONTROL or first in _ENVD

    def admit(self, scope: Scope, headers: Mapping[str, str]) -> Principal | None:
        if not _is_envd(scope["path"]):
            return None
        presented = headers.get("x-access-token")
        if presented is not None:
            principal, environment = self._access.by_key(presented)
        else:
            service: Service = self._app.state.service
            named = sandbox_of(headers)
            owners = {held.id: held.row.owner for held in service.held.values() if named in (None, held.id)}
            found = self._access.by_signature(scope, owners)
            if found is None:
                raise Refused(401, "unauthenticated", "send the sandbox's access token as X-Access-Token")
            principal, environment = found
        named = sandbox_of(headers)
        if named is not None and named != environment:
            raise Refused(401, "unauthenticated", f"this access token does not open sandbox {named}")
        scope["statefork.sandbox"] = environment
        return principal

    def refuse(self, scope: Scope, error: Exception, usual: Response) -> Response:
        problem = json.loads(bytes(usual.body))
        status, code, message = usual.status_code, problem["code"], problem["detail"]
        if code == "session_dead" and _is_envd(scope["path"]):
            return sandbox_gone(scope.get("statefork.sandbox", ""))
        if _is_rpc(scope["path"]):
            body: dict[str, object] = connect_error(code, message)
            if _is_stream(scope) and status not in (401, 429):
                return Response(envelope(END, {"error": body}), media_type="application/connect+json")
        else:
            status = 501 if code in ("unsupported", "host_unsupported") else 400 if status == 422 else status
            body = {"code": status, "message": message}
        kept = {name: usual.headers[name] for name in ("retry-after", "www-authenticate") if name in usual.headers}
        return Response(json.dumps(body).encode(), status, kept, "application/json")


def connect_error(code: str, message: str) -> dict[str, object]:
    return {"code": CONNECT_CODES.get(code, "internal"), "message": message}


def envelope(flags: int, document: dict[str, object]) -> bytes:
    """One message of a stream."""
    data = json.dumps(document).encode()
    return bytes([flags]) + len(data).to_bytes(4, "big") + data


def sandbox_gone(sandbox: str) -> Response:
    """What E2B's edge says of a sandbox that ended or is paused: its clients know these words."""
    body = {"sandboxId": sandbox, "message": "The sandbox was not found", "code": 502}
    return Response(json.dumps(body).encode(), 502, media_type="application/json")


def _is_envd(path: str) -> bool:
    return path.lstrip("/").partition("/")[0] in _ENVD


def _is_stream(scope: Scope) -> bool:
    """Then an error is the last message of an answer that begins well; HTTP's own statuses are for what is in between."""
    return any(
        name == b"content-type" and value.startswith(b"application/connect+") for name, value in scope["headers"]
    )


def _is_rpc(path: str) -> bool:
    return path.startswith(("/process.Process/", "/filesystem.Filesystem/"))
