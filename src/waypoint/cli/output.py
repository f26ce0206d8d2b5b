"""What the command line prints: data on stdout, messages on stderr, one JSON document when asked for one.

Imported by `waypoint exec`, so it imports nothing that is not needed to print (docs/decisions/quick-exec.md).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from waypoint.errors import WaypointError

__all__ = ["coloured", "fail", "home", "note", "print_json", "show_progress", "text_fields", "write_all"]

DEFAULT_HOME = "/var/lib/waypoint"


def home() -> str:
    """The state directory, absolute."""
    return os.path.abspath(os.environ.get("WAYPOINT_HOME") or DEFAULT_HOME)  # noqa: PTH100  pathlib costs 5 ms


def coloured(stream: TextIO | None) -> bool:
    return (
        stream is not None and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()
    )


def paint(text: str, code: str, stream: TextIO) -> str:
    """`code` is what stands between ESC [ and m."""
    return f"\033[{code}m{text}\033[0m" if coloured(stream) else text


def note(text: str, *, colour: str = "2") -> None:
    """One message for a person."""
    if sys.stderr is not None:
        print(paint(f"waypoint: {_clean(text)}", colour, sys.stderr), file=sys.stderr, flush=True)


def on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def show_progress(text: str) -> None:
    """A line that the next one takes the place of, on a terminal only; the empty text takes it away."""
    if on_terminal():
        sys.stderr.write(f"\r\033[K{_clean(text)}")
        sys.stderr.flush()


def print_json(document: Any) -> None:
    """Exactly one document on stdout. Pure ASCII, so that no locale can break it."""
    import json

    write_all(1, json.dumps(_clean(document), default=str).encode() + b"\n")


def text_fields(**fields: bytes) -> dict[str, str]:
    """Bytes as JSON strings. Where they are not UTF-8, the string has U+FFFD and NAME_base64 has the bytes."""
    found = {}
    for name, data in fields.items():
        try:
            found[name] = data.decode()
        except UnicodeDecodeError:
            from base64 import b64encode

            found[name] = data.decode(errors="replace")
            found[f"{name}_base64"] = b64encode(data).decode()
    return found


def fail(error: WaypointError, as_json: bool) -> int:
    """Say what failed, on stderr; returns the exit code."""
    if as_json:
        import json

        document = {"error": {"code": error.code, "message": error.message, "details": error.details}}
        write_all(2, json.dumps(_clean(document), default=str).encode() + b"\n")
        return error.exit_code
    note(error.message, colour="31")
    fix = error.details.get("fix")
    if fix and str(fix) not in error.message:
        note(f"fix: {fix}", colour="33")
    return error.exit_code


def write_all(fd: int, data: bytes) -> None:
    """All of it, also into a pipe that the caller made non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            import select

            select.select([], [fd], [])


def _clean(value: Any) -> Any:
    """File names and command lines may hold bytes that are not UTF-8; no JSON parser or terminal takes half a surrogate."""
    if isinstance(value, str):
        return value.encode(errors="surrogateescape").decode(errors="replace") if not value.isascii() else value
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value
