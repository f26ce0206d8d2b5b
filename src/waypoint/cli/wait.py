"""`waypoint wait`: the outcome of a command that is running already."""

from __future__ import annotations

import sys

import click

from waypoint.cli.options import SESSION, json_option, open_engine

__all__ = ["wait"]


@click.command()
@click.argument("session", type=SESSION)
@click.argument("command", type=click.IntRange(min=1), required=False, metavar="[ID]")
@json_option
def wait(session: str, command: int | None, as_json: bool) -> None:
    """Wait for a command of the session, by default the one in its shell, and exit with its exit code.

    A fork of a session that was in the middle of a command goes on with it: this gives its outcome there.
    Prints what is still known of its output from the beginning. Ctrl-C goes to the command; pressed again, it stops waiting.
    """
    from waypoint.cli.streams import Streams, carry

    with open_engine() as engine:
        target = engine.session(session)
        streams = Streams(target, as_json=as_json, stdin=False)
        code = carry(
            streams,
            target.id,
            lambda: target.wait(
                command, on_stdout=streams.on_stdout, on_stderr=streams.on_stderr, on_start=streams.on_start, limit=streams.limit
            ),
        )
    sys.exit(code)
