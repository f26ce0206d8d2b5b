"""`waypoint undo`: back to before the last exec."""

from __future__ import annotations

import click

from waypoint.cli.options import SESSION, json_option, open_engine
from waypoint.cli.output import print_json
from waypoint.cli.timing import Stopwatch

__all__ = ["undo"]


@click.command()
@click.argument("session", type=SESSION)
@json_option
def undo(session: str, as_json: bool) -> None:
    """Take the session back to before its last exec; again, and it goes one further back.

    The session must have been started with `waypoint new --auto-snapshot`.
    """
    with open_engine() as engine:
        target = engine.session(session)
        watch = Stopwatch()
        record = target.undo()
        duration_ms = watch.ms
    if as_json:
        print_json({"session": target.id, "snapshot": record.id, "duration_ms": duration_ms})
