"""Users as a session's own /etc/passwd and /etc/group tell them, read from outside. The same rules as in the session's init."""

from __future__ import annotations

from waypoint.errors import NotFound, UsageError
from waypoint.view import View

__all__ = ["account"]

_LIMIT = 16 << 20


def account(view: View, user: str) -> tuple[int, int]:
    """(uid, gid) inside of `user`: NAME or UID, each with an optional :GROUP or :GID."""
    name, _, group = (user or "0").partition(":")
    uid = gid = int(name) if _number(name) else -1
    for fields in _lines(view, "/etc/passwd"):
        if (
            len(fields) > 3
            and _number(fields[2])
            and (fields[0] == name or (_number(name) and fields[2] == str(int(name))))
        ):
            uid, gid = int(fields[2]), int(fields[3]) if _number(fields[3]) else int(fields[2])
            break
    if uid < 0 and name == "root":
        uid = gid = 0
    if uid < 0:
        raise UsageError(f"{view.label}: no user {name} in its /etc/passwd", user=user)
    if not group:
        return uid, gid
    if _number(group):
        return uid, int(group)
    for fields in _lines(view, "/etc/group"):
        if len(fields) > 2 and fields[0] == group and _number(fields[2]):
            return uid, int(fields[2])
    raise UsageError(f"{view.label}: no group {group} in its /etc/group", user=user)


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _lines(view: View, path: str) -> list[list[str]]:
    try:
        text = view.read(path, _LIMIT).decode(errors="surrogateescape")
    except NotFound:
        return []
    return [line.split(":") for line in text.splitlines()]
