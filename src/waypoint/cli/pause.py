"""`waypoint pause`: save a session and release its processes and memory."""

from __future__ import annotations

import click

from waypoint.cli.options import SESSION, json_option, open_engine
from waypoint.cli.output import print_json

__all__ = ["pause"]


@click.command()
@click.argument("session", type=SESSION)
@json_option
def pause(session: str, as_json: bool) -> None:
    """Save the session on disk and free its processes and memory. A reboot of the host does it no harm."""
    with open_engine() as engine:
        target = engine.session(session)
        record = target.pause()
    if as_json:
        print_json(
            {
                "session": target.id,
                "state": "paused",
                "duration_ms": round(record.duration_ms, 3),
                "files_bytes": record.files_bytes,
                "memory_bytes": record.memory_bytes,
            }
        )
