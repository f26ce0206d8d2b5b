"""`waypoint build`: an image from a Dockerfile, and a session over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from waypoint.cli.new import report_new, session_options, start_session
from waypoint.cli.options import json_option, open_engine
from waypoint.cli.output import on_terminal, write_all

__all__ = ["build"]


@click.command()
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--name", metavar="N", help="A name for the session and for the base, for `new --base N` later.")
@click.option("--verbose", "-v", is_flag=True, help="Show the builder's output even if stderr is not a terminal.")
@session_options
@json_option
def build(directory: Path, name: str | None, verbose: bool, as_json: bool, **asked: Any) -> None:
    """Build DIR/Dockerfile and start a session over the image; prints the session's id.

    ENV, WORKDIR and USER are the shell's start state. The builder's output goes to stderr when that is a terminal; when the build
    fails, its end is in the error and nothing of it is kept.
    """
    from waypoint.bases import base_from_dockerfile
    from waypoint.errors import Exists
    from waypoint.session import check_name

    check_name(name)
    with open_engine() as engine:
        if name is not None and any(record.name == name for record in engine.sessions()):
            raise Exists(f"a session named {name} exists already; remove it or choose another name", name=name)
        base = base_from_dockerfile(
            engine.store, directory, name=name, on_output=_show if verbose or on_terminal() else None
        )
        report_new(engine, start_session(engine, name, base, **asked), as_json)


def _show(data: bytes) -> None:
    write_all(2, data)
