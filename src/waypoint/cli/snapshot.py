"""`waypoint snapshot`: save a session; it runs on."""

from __future__ import annotations

import click

from waypoint.cli.options import SESSION, json_option, open_engine
from waypoint.cli.output import print_json

__all__ = ["snapshot"]


@click.command()
@click.argument("session", type=SESSION)
@click.argument("name", required=False)
@json_option
def snapshot(session: str, name: str | None, as_json: bool) -> None:
    """Save the session's files, processes, memory and terminal; prints the snapshot's id.

    The session runs on, and so does a command in it, here and in every fork.
    """
    with open_engine() as engine:
        record = engine.session(session).snapshot(name)
    if not as_json:
        click.echo(record.id)
        return
    print_json(
        {
            "snapshot": record.id,
            "name": record.name,
            "parent": record.parent,
            "duration_ms": round(record.duration_ms, 3),
            "paused_ms": round(record.paused_ms, 3),
            "files_bytes": record.files_bytes,
            "memory_bytes": record.memory_bytes,
            "captured": list(record.capture.captured),
            "not_captured": list(record.capture.not_captured),
        }
    )
