"""`waypoint shell`: this terminal becomes the session's."""

from __future__ import annotations

import sys

import click

from waypoint.cli.options import SESSION, json_option, open_engine
from waypoint.cli.output import note, print_json

__all__ = ["shell"]


@click.command()
@click.argument("session", type=SESSION)
@click.option("--detach-keys", default="ctrl-]", show_default=True, metavar="KEYS", help="Such as ctrl-p,ctrl-q.")
@json_option
def shell(session: str, detach_keys: str, as_json: bool) -> None:
    """Attach this terminal to the session's shell: its prompt, or whatever runs in it.

    The detach key leaves everything running; attach again, and the same screen is there. `exit` ends the shell, and with it
    its variables, functions and jobs; the session gets a fresh one.
    """
    from waypoint.guest.terminal import attach, parse_keys

    keys = parse_keys(detach_keys)
    with open_engine() as engine:
        target = engine.session(session)
        left = attach(target, keys)
    if as_json:
        print_json({"session": target.id, "ended": left})
    elif left == "detached":
        note(f"detached from {target.id}; `waypoint shell {session}` attaches again")
    elif left == "shell_ended":
        note(f"the shell of {target.id} ended; the next command or `waypoint shell` gets a fresh one")
    else:
        note(f"session {target.id} is gone")
        sys.exit(125)
