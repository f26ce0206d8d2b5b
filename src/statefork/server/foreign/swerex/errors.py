"""Errors that the client raises anew on its side: it is told their class, and imports it."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from statefork.errors import WaypointError
from statefork.server.guard.principal import Principal

__all__ = ["Raised", "SwerexDialect", "told"]

PREFIX = "/swerex/"
_STATUS = 511
"""SWE-ReX's own choice, `Network Authentication Required`: an exception is inside."""
_CLASSES = {
    "timeout": "swerex.exceptions.CommandTimeoutError",
    "not_found": "builtins.FileNotFoundError",
    "usage": "builtins.ValueError",
    "unsupported": "builtins.NotImplementedError",
}


class Raised(Exception):
    """An exception of the client's world, by the path of its class."""

    def __init__(self, class_path: str, message: str, **extra: Any) -> None:
        super().__init__(message)
        self.class_path = class_path if "." in class_path else f"swerex.exceptions.{class_path}"
        self.extra = extra


def told(error: Exception) -> Response:
    if isinstance(error, Raised):
        class_path, message, extra, trace = error.class_path, str(error), error.extra, ""
    elif isinstance(error, WaypointError):
        class_path = _CLASSES.get(error.code, "swerex.exceptions.SwerexException")
        message, extra, trace = error.message, {"code": error.code}, ""
    else:
        class_path, message, extra = "swerex.exceptions.SwerexException", "the daemon failed; its log tells more", {}
        trace = "".join(traceback.format_exception_only(error))
    body = {"message": message, "class_path": class_path, "traceback": trace, "extra_info": extra}
    return Response(json.dumps({"swerexception": body}).encode(), _STATUS, media_type="application/json")


class SwerexDialect:
    def speaks(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        path: str = scope["path"]
        return path.startswith(PREFIX)

    def admit(self, scope: Scope, headers: Mapping[str, str]) -> Principal | None:
        return None  # X-API-Key is one of our tokens

    def refuse(self, scope: Scope, error: Exception, usual: Response) -> Response:
        """Errors of HTTP stay what they are (the client shows `detail`); the others are raised on its side."""
        return told(error) if isinstance(error, WaypointError | Raised) else usual
