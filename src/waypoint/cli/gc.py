"""`waypoint gc`: free what nothing references, and clean up after crashes."""

from __future__ import annotations

import click

from waypoint.cli.options import json_option, open_engine
from waypoint.cli.output import print_json

__all__ = ["gc"]


@click.command()
@json_option
def gc(as_json: bool) -> None:
    """Remove every layer, image, process, cgroup and mount of this store that no session or snapshot needs.

    Waits for operations in flight; sessions and snapshots are not touched.
    """
    with open_engine() as engine:
        counts = engine.gc()
    if as_json:
        print_json(counts)
        return
    told = [f"{count} {what.replace('_', ' ')}" for what, count in counts.items() if count]
    click.echo(", ".join(told) if told else "nothing to free")
