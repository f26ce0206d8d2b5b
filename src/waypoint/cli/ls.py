"""`waypoint ls`: the sessions of this store."""

from __future__ import annotations

import time

import click

from waypoint.cli.options import json_option, open_engine
from waypoint.cli.output import print_json
from waypoint.cli.show import age, table

__all__ = ["ls"]


@click.command()
@json_option
def ls(as_json: bool) -> None:
    """List sessions: id, name, state (live, paused, dead), base, the snapshot they grew out of, age."""
    with open_engine() as engine:
        records = engine.sessions()
    if as_json:
        print_json(
            {
                "sessions": [
                    {
                        "session": record.id,
                        "name": record.name,
                        "state": record.state,
                        "base": record.base,
                        "snapshot": record.snapshot,
                    }
                    for record in records
                ]
            }
        )
        return
    now = time.time()
    rows = [
        (record.id, record.name or "-", record.state, record.base, record.snapshot or "-", age(now - record.created))
        for record in records
    ]
    click.echo(table(("SESSION", "NAME", "STATE", "BASE", "SNAPSHOT", "AGE"), rows), nl=False)
