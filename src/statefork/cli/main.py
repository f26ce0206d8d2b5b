"""`statefork`: finds the command, and turns errors into messages and exit codes."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from waypoint import __version__
from waypoint.errors import UsageError, WaypointError

__all__ = ["fail", "home", "main", "note", "statefork"]

COMMANDS = {
    "audit": "Check the audit log of the daemon.",
    "backends": "Table of what each backend can do on this host, and why not.",
    "bench": "Time snapshot, restore and fork on every backend of this host.",
    "completion": "Print the completion script of a shell.",
    "doctor": "Try every backend, and name the fix for what is missing.",
    "experiment": "Compare attempts from scratch with a tree search, on terminal tasks.",
    "explore": "Search over live state: try steps side by side, keep the best outcome.",
    "fidelity": "Prove what a backend brings back, case by case.",
    "gc": "Remove what crashed processes left behind.",
    "mcp": "Environments as tools for a model (Model Context Protocol).",
    "promote": "Commit what a search found: to a directory, a patch, an image, a session.",
    "serve": "Serve every backend over HTTP.",
    "setup": "Fetch the tools that backends need and no package of this host has.",
    "shell": "Branch an environment by hand.",
    "token": "Make, list and revoke tokens for the daemon.",
    "trace": "Draw the trace of a search, or take its steps again.",
}
"""Name and help; each lives in a module of its name, which is imported when it is asked for and not before."""


def home() -> Path | None:
    """$STATEFORK_HOME; None means the library's default."""
    value = os.environ.get("STATEFORK_HOME")
    return Path(value).absolute() if value else None


def note(text: str) -> None:
    """One message for a person."""
    click.echo(f"statefork: {text}", err=True)


def fail(error: WaypointError, *, as_json: bool = False) -> int:
    """Say what failed, on stderr; returns the exit code."""
    if as_json:
        document = {"error": {"code": error.code, "message": error.message, "details": error.details}}
        click.echo(json.dumps(document, default=str), err=True)
        return error.exit_code
    note(error.message)
    fix = error.details.get("fix")
    if fix and str(fix) not in error.message:
        note(f"fix: {fix}")
    return error.exit_code


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"statefork.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="statefork")
def statefork() -> None:
    """One interface over branchable environments: Waypoint, containers, CRIU, gVisor, microVMs.

    $STATEFORK_HOME is the state directory (default: /var/lib/statefork for root).
    """


def main() -> NoReturn:
    as_json = "--json" in sys.argv
    try:
        code = statefork.main(prog_name="statefork", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(int(code or 0))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.UsageError as error:
        if as_json:
            sys.exit(fail(UsageError(error.format_message()), as_json=True))
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except WaypointError as error:
        sys.exit(fail(error, as_json=as_json))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered has nowhere to go
        sys.exit(141)
