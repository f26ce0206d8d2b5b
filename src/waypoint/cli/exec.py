"""`waypoint exec`: a command in the persistent shell. The plain form never comes here (quick.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from waypoint.cli.options import SECONDS, SESSION, json_option, open_engine

__all__ = ["exec"]


@click.command()
@click.argument("session", type=SESSION)
@click.argument("command", nargs=-1, required=True, metavar="CMD")
@click.option("--timeout", type=SECONDS, metavar="SECONDS", help="End the command after this time.")
@click.option("--user", metavar="U", help="Run it as this user of the session, in a shell of its own at the same place.")
@click.option("-i", "--stdin", "stdin", flag_value=True, default=None, type=bool, help="Pass on stdin even from a terminal.")
@click.option("-n", "--no-stdin", "stdin", flag_value=False, type=bool, help="Leave our stdin alone.")
@click.option("--no-wait", is_flag=True, help="Fail with `busy` instead of waiting while another command runs.")
@click.option("--merge", is_flag=True, help="stderr into stdout, in exact order.")
@click.option("--log", type=click.Path(dir_okay=False, path_type=Path), help="Write all that it prints into this file too.")
@json_option
def exec(
    session: str,
    command: tuple[str, ...],
    timeout: float | None,
    user: str | None,
    stdin: bool | None,
    no_wait: bool,
    merge: bool,
    log: Path | None,
    as_json: bool,
) -> None:
    """Evaluate CMD in the session's shell and exit with its exit code.

    `cd`, variables, functions and jobs stay for the next command. Several words are joined with spaces, as ssh does.
    A pipe or file on stdin is passed on. Ctrl-C goes to the command; pressed again, it leaves the command running.

    Exit code: the command's own; 124 on time-out, 125 when Waypoint failed, 2 on bad usage.
    """
    from contextlib import nullcontext

    from waypoint.cli.streams import Streams, carry

    with open_engine() as engine, log.open("wb") if log is not None else nullcontext() as log_file:
        target = engine.session(session)
        streams = Streams(target, as_json=as_json, stdin=stdin)
        code = carry(
            streams,
            target.id,
            lambda: target.exec(
                " ".join(command),
                timeout=timeout,
                stdin=streams.stdin,
                on_stdout=streams.on_stdout,
                on_stderr=streams.on_stderr,
                on_start=streams.on_start,
                user=user,
                wait=not no_wait,
                merge=merge,
                limit=streams.limit,
                log=log_file,
            ),
        )
    sys.exit(code)
