"""`waypoint resume`: bring a paused session back."""

from __future__ import annotations

import click

from waypoint.cli.options import SESSION, json_option, open_engine
from waypoint.cli.output import print_json
from waypoint.cli.timing import Stopwatch

__all__ = ["resume"]


@click.command()
@click.argument("session", type=SESSION)
@json_option
def resume(session: str, as_json: bool) -> None:
    """Bring a paused session back where it was. A live one is left alone."""
    with open_engine() as engine:
        target = engine.session(session)
        watch = Stopwatch()
        target.resume()
        duration_ms = watch.ms
    if as_json:
        print_json({"session": target.id, "state": "live", "duration_ms": duration_ms})
