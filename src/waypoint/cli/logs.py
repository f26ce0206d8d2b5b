"""`waypoint logs`: what background jobs have printed."""

from __future__ import annotations

import click

from waypoint.cli.options import SESSION, json_option, open_engine
from waypoint.cli.output import print_json, text_fields, write_all

__all__ = ["logs"]


@click.command()
@click.argument("session", type=SESSION)
@json_option
def logs(session: str, as_json: bool) -> None:
    """Show what jobs printed after the command that started them had returned: the last 256 KiB of it."""
    with open_engine() as engine:
        target = engine.session(session)
        output = target.background_output()
    if as_json:
        print_json({"session": target.id, **text_fields(output=output)})
    else:
        write_all(1, output)
