"""`waypoint verify`: is a restored session what its snapshot saved?"""

from __future__ import annotations

import click

from waypoint.cli.options import SESSION, SNAPSHOT, json_option, open_engine
from waypoint.cli.output import print_json

__all__ = ["verify"]


@click.command()
@click.argument("session", type=SESSION)
@click.argument("snapshot", type=SNAPSHOT, metavar="[SNAP]", required=False)
@json_option
def verify(session: str, snapshot: str | None, as_json: bool) -> None:
    """Compare the session with SNAP, by default the snapshot that it came from. Exit code 1 if they differ.

    A session that has run since then differs by what it did: `restore --verify` and `fork --verify` compare before it runs.
    """
    with open_engine() as engine:
        target = engine.session(session)
        found = target.verify(snapshot)
        against = engine.store.db.snapshot(snapshot, target.record.tree).id if snapshot else target.record.snapshot
    if as_json:
        print_json({"session": target.id, "snapshot": against, "equal": not found, "differences": found})
    else:
        click.echo("\n".join(found) or "equal")
    if found:
        raise SystemExit(1)
