"""`waypoint rm`: remove sessions and snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from waypoint.cli.options import ANYTHING, json_option, open_engine
from waypoint.cli.output import print_json

if TYPE_CHECKING:
    from waypoint.engine import Engine

__all__ = ["rm"]


@click.command()
@click.argument("names", nargs=-1, required=True, type=ANYTHING, metavar="S...")
@click.option("-r", "--recursive", is_flag=True, help="Remove a snapshot together with those that grew out of it.")
@json_option
def rm(names: tuple[str, ...], recursive: bool, as_json: bool) -> None:
    """Remove sessions and snapshots, by id, name or unique beginning; prints the ids that are gone.

    A session's snapshots stay when it goes. All names are looked up before anything is removed.
    """
    from waypoint.errors import WaypointError

    removed: list[str] = []
    with open_engine() as engine:
        sessions, snapshots = _named(engine, names)
        try:
            for session in sessions:
                engine.session(session).remove()
                removed.append(session)
            for snapshot in snapshots:
                if snapshot not in removed:
                    removed += engine.remove_snapshot(snapshot, recursive=recursive)
        except WaypointError as error:
            error.details["removed"] = removed
            raise
    if as_json:
        print_json({"removed": removed})
        return
    for identity in removed:
        click.echo(identity)


def _named(engine: Engine, names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Children come before their parents, so that naming a whole chain removes it whatever the order of the names."""
    from waypoint.model import SessionRecord
    from waypoint.view import find

    found = [find(engine, name) for name in dict.fromkeys(names)]
    sessions = [record.id for record in found if isinstance(record, SessionRecord)]
    snapshots = {record.id: record.created for record in found if not isinstance(record, SessionRecord)}
    return list(dict.fromkeys(sessions)), sorted(snapshots, key=lambda identity: snapshots[identity], reverse=True)
