"""Users of a sandbox: who a request is for, their home, and paths as they write them."""

from __future__ import annotations

import base64
import binascii
import posixpath

from fastapi import Request

from statefork.environment import Environment
from statefork.errors import NotFound, UsageError, WaypointError
from statefork.files import absolute
from statefork.server.guard.problems import Refused

__all__ = ["expanded", "home_of", "user_of"]


def user_of(request: Request) -> str | None:
    """From `Authorization: Basic user:` or `?username=`; None: whoever the environment's programs run as."""
    named = request.query_params.get("username")
    if named:
        return _plain(named)
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name = base64.b64decode(value.strip(), validate=True).decode().partition(":")[0]
    except (binascii.Error, ValueError):
        raise UsageError("the Authorization header cannot be read") from None
    return _plain(name) if name else None


def home_of(live: Environment, user: str | None) -> str:
    """On a thread. Raises Refused 401 for a user that is not there, as envd does."""
    wanted = user or "root"
    try:
        lines = live.read_file("/etc/passwd", limit_bytes=1 << 20).decode(errors="replace").splitlines()
    except (NotFound, WaypointError):
        lines = []
    for line in lines:
        fields = line.split(":")
        if fields[0] == wanted and len(fields) > 5 and fields[5].startswith("/"):
            return fields[5]
    if wanted == "root":
        return "/root"
    raise Refused(401, "unauthenticated", f"invalid username: no user '{wanted}'")


def expanded(live: Environment, path: str, user: str | None) -> str:
    """On a thread: absolute; `~` and relative paths begin at the user's home."""
    if user is not None or not path.startswith("/"):
        home = home_of(live, user)
        if path == "~" or path.startswith("~/"):
            path = home + path[1:]
        elif not path.startswith("/"):
            path = posixpath.join(home, path)
    return absolute(posixpath.normpath(path))


def _plain(name: str) -> str:
    if len(name) > 64 or not name.isprintable() or any(character in name for character in ":/\0 "):
        raise UsageError("that cannot be the name of a user")
    return name
