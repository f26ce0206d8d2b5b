"""What the commands share: the engine of the caller's store, options that several take, and names that complete."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from waypoint.cli import output

if TYPE_CHECKING:
    from waypoint.engine import Engine

__all__ = ["ANYTHING", "SECONDS", "SESSION", "SIZE", "SNAPSHOT", "json_option", "open_engine", "pairs"]

_F = TypeVar("_F", bound=Callable[..., Any])


def open_engine() -> Engine:
    from waypoint.engine import Engine

    return Engine(Path(output.home()))


def json_option(function: _F) -> _F:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")(function)


def pairs(values: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """NAME=VALUE words; a NAME alone takes the caller's own value, as with docker."""
    import os

    found = []
    for word in values:
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise click.BadParameter(f"{word!r} is not NAME=VALUE", param_hint="--env")
        if not equals and name not in os.environ:
            continue
        found.append((name, value if equals else os.environ[name]))
    return tuple(found)


class _Size(click.ParamType):  # type: ignore[type-arg]  # generic only in new versions of click
    """512M, 1.5G, 1GiB or a number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", str(value).strip().lower())
        if found is None or float(found[1]) == 0:
            self.fail(f"{value!r} is not a size; write it as 512M or 2G", param, ctx)
        return int(float(found[1]) * 1024 ** " kmgt".index(found[2] or " "))


class _Name(click.ParamType):  # type: ignore[type-arg]
    """The id or name of a session or snapshot; only completion looks at the store."""

    def __init__(self, name: str, *, sessions: bool = False, snapshots: bool = False) -> None:
        self.name = name
        self._sessions = sessions
        self._snapshots = snapshots

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found: list[CompletionItem] = []
        if not (Path(output.home()) / "store.db").exists():
            return found
        with open_engine() as engine:
            if self._sessions:
                for record in engine.sessions():
                    found += _items(incomplete, record.id, record.name, f"session, {record.state}")
            if self._snapshots:
                for snapshot in engine.store.db.snapshots():
                    if not snapshot.pinned:
                        found += _items(incomplete, snapshot.id, snapshot.name, f"snapshot of {snapshot.session}")
        return found


def _items(incomplete: str, identity: str, name: str | None, what: str) -> list[CompletionItem]:
    """The name where there is one; the id only when somebody has begun to type it, or when there is nothing else."""
    words = [name] if name is not None and name.startswith(incomplete) else []
    if identity.startswith(incomplete) and (name is None or incomplete):
        words.append(identity)
    return [CompletionItem(word, help=f"{what}, {identity}" if word != identity else what) for word in words]


SIZE = _Size()
SECONDS = click.FloatRange(min=0, min_open=True)
SESSION = _Name("session", sessions=True)
SNAPSHOT = _Name("snapshot", snapshots=True)
ANYTHING = _Name("session or snapshot", sessions=True, snapshots=True)
