"""`waypoint run`: one program in a session, beside the shell."""

from __future__ import annotations

import sys

import click

from waypoint.cli.options import SECONDS, SESSION, json_option, open_engine, pairs

__all__ = ["run"]


@click.command()
@click.argument("session", type=SESSION)
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- ARGV...")
@click.option("--timeout", type=SECONDS, metavar="SECONDS", help="End the program after this time.")
@click.option("--user", default="", metavar="U", help="Run it as this user of the session.")
@click.option("--cwd", default="", metavar="DIR", help="Start it in this directory.")
@click.option("--env", multiple=True, metavar="K=V", help="Set a variable; may be given again.")
@click.option("-i", "--stdin", "stdin", flag_value=True, default=None, type=bool, help="Pass on stdin even from a terminal.")
@click.option("-n", "--no-stdin", "stdin", flag_value=False, type=bool, help="Leave our stdin alone.")
@click.option("--merge", is_flag=True, help="stderr into stdout, in exact order.")
@json_option
def run(
    session: str,
    argv: tuple[str, ...],
    timeout: float | None,
    user: str,
    cwd: str,
    env: tuple[str, ...],
    stdin: bool | None,
    merge: bool,
    as_json: bool,
) -> None:
    """Run one program in the session, not through its shell, and exit with its exit code.

    Any number may run at once, also while the shell is busy. Exit codes are those of `waypoint exec`.
    """
    from waypoint.cli.streams import Streams, carry

    with open_engine() as engine:
        target = engine.session(session)
        streams = Streams(target, as_json=as_json, stdin=stdin)
        code = carry(
            streams,
            target.id,
            lambda: target.run(
                argv,
                timeout=timeout,
                stdin=streams.stdin,
                user=user,
                cwd=cwd,
                env=pairs(env),
                on_stdout=streams.on_stdout,
                on_stderr=streams.on_stderr,
                on_start=streams.on_start,
                merge=merge,
                limit=streams.limit,
            ),
        )
    sys.exit(code)
