"""`statefork gc`: remove what processes that died left behind."""

from __future__ import annotations

import json

import click

from statefork.cli.main import home
from statefork.home import collect, default_home
from statefork.registry import backends

__all__ = ["gc"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def gc(as_json: bool) -> None:
    """Remove containers, processes, images and directories whose owner is dead; what is in use is not touched."""
    removed: list[str] = []
    drivers = [backend.driver for backend in backends().values()]
    for line in collect(home() or default_home(), drivers):
        removed.append(line)
        if not as_json:
            click.echo(line)
    if as_json:
        click.echo(json.dumps({"removed": removed}))
