"""`waypoint restore`: a session becomes what a snapshot saved."""

from __future__ import annotations

import click

from waypoint.cli.options import SESSION, SNAPSHOT, json_option, open_engine
from waypoint.cli.output import print_json
from waypoint.cli.timing import Stopwatch

__all__ = ["restore"]


@click.command()
@click.argument("session", type=SESSION)
@click.argument("snapshot", type=SNAPSHOT, metavar="SNAP")
@click.option("--verify", is_flag=True, help="Compare what comes up with the snapshot's manifest; if it differs, drop it.")
@json_option
def restore(session: str, snapshot: str, verify: bool, as_json: bool) -> None:
    """Take the session back to SNAP. It keeps its id; if this fails, it goes on as it was."""
    with open_engine() as engine:
        target = engine.session(session)
        watch = Stopwatch()
        record = target.restore(snapshot, verify=verify)
        duration_ms = watch.ms
    if as_json:
        print_json({"session": target.id, "snapshot": record.id, "duration_ms": duration_ms})
