"""`waypoint fork`: new live sessions from one snapshot."""

from __future__ import annotations

import click

from waypoint.cli.options import SESSION, SNAPSHOT, json_option, open_engine
from waypoint.cli.output import print_json
from waypoint.cli.timing import Stopwatch

__all__ = ["fork"]


@click.command()
@click.argument("session", type=SESSION)
@click.option("--from", "snapshot", type=SNAPSHOT, metavar="SNAP", help="Fork this snapshot and not the session as it is now.")
@click.option("-n", "count", type=click.IntRange(min=1, max=10_000), default=1, metavar="N", help="How many.")
@click.option("--name", "names", multiple=True, metavar="NAME", help="A name for a fork; give as many as forks.")
@click.option("--verify", is_flag=True, help="Compare each fork with the snapshot's manifest; if one differs, make none.")
@json_option
def fork(
    session: str, snapshot: str | None, count: int, names: tuple[str, ...], verify: bool, as_json: bool
) -> None:
    """Start N sessions from a snapshot, side by side; prints their ids. All of them, or none and an error.

    Without --from the session is snapshotted first.
    """
    if names and len(names) != count:
        raise click.UsageError(f"{len(names)} names for {count} forks")
    with open_engine() as engine:
        target = engine.session(session)
        watch = Stopwatch()
        made = target.fork(count, from_snapshot=snapshot, names=names or None, verify=verify)
        duration_ms = watch.ms
        origin = made[0].record.snapshot
    if as_json:
        print_json({"snapshot": origin, "sessions": [one.id for one in made], "duration_ms": duration_ms})
        return
    for one in made:
        click.echo(one.id)
