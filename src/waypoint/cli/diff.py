"""`waypoint diff`: what differs between two states."""

from __future__ import annotations

import click

from waypoint.cli.options import ANYTHING, json_option, open_engine
from waypoint.cli.output import print_json

__all__ = ["diff"]


@click.command()
@click.argument("before", type=ANYTHING, metavar="A")
@click.argument("after", type=ANYTHING, metavar="B")
@click.option("--every", is_flag=True, help="List what is in added and removed directories instead of counting it.")
@json_option
def diff(before: str, after: str, every: bool, as_json: bool) -> None:
    """Show what differs in B, seen from A: files, processes, exported variables, the shell's directory, listening ports.

    A and B are sessions or snapshots. Memory is not compared.
    """
    from waypoint.diff import compare, render, to_json

    with open_engine() as engine:
        found = compare(engine, before, after, every=every)
    if as_json:
        print_json(to_json(found))
    else:
        click.echo(render(found), nl=False)
