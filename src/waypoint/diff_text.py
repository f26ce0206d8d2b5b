"""A difference as people read it. Names and values come from sessions: nothing in them may reach the terminal as a command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from waypoint.diff import Difference

__all__ = ["render"]

_SIGNS = {"added": "+", "removed": "-", "changed": "~"}
_WIDEST = 60
_LONGEST_VALUE = 200


def render(difference: Difference) -> str:
    """Lines under headings; empty parts are left out. Ends in a newline."""
    files = [
        (
            _SIGNS[change.status],
            change.path + ("/" if change.kind == "directory" and change.path != "/" else ""),
            change.detail,
        )
        for change in difference.files
    ]
    processes = [
        (_SIGNS[change.status], f"{change.pid} {shlex.join(change.argv)}", change.detail)
        for change in difference.processes
    ]
    variables = [
        (
            _SIGNS[change.status],
            change.name,
            " → ".join(_value(v) for v in (change.before, change.after) if v is not None),
        )
        for change in difference.environment
    ]
    out: list[str] = []
    out += _section("files", files)
    out += _section("processes", processes)
    out += _section("environment", variables)
    if difference.cwd is not None:
        out += _section("cwd", [("~", f"{difference.cwd[0]} → {difference.cwd[1]}", "")])
    out += _section("listening", [(_SIGNS[change.status], change.address, "") for change in difference.listening])
    if difference.shell == "differs" and not variables and difference.cwd is None:
        out += _section("shell", [("~", "variables, functions, aliases, options or traps differ", "")])
    if not out:
        out.append("no difference")
    out += _section("not compared", [("!", note, "") for note in difference.notes])
    return "\n".join(out) + "\n"


def _section(title: str, rows: Iterable[tuple[str, str, str]]) -> list[str]:
    shown = [(sign, _plain(what), _plain(detail)) for sign, what, detail in rows]
    if not shown:
        return []
    width = min(_WIDEST, max(len(what) for _, what, _ in shown))
    return [title, *(f"  {sign} {what:<{width}}  {detail}".rstrip() for sign, what, detail in shown)]


def _value(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…")


def _plain(text: str) -> str:
    """Control characters and undecodable bytes as escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )
