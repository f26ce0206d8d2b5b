"""The table of commands. Each lives in a file of its own, which is imported when it is asked for and not before."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import click

from waypoint import __version__

__all__ = ["waypoint"]

SECTIONS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Sessions",
        (
            ("new", "Start a session; prints its id."),
            ("build", "Build a Dockerfile and start a session over the image."),
            ("ls", "List sessions."),
            ("pause", "Save a session and free its processes and memory."),
            ("resume", "Bring a paused session back where it was."),
            ("rm", "Remove sessions and snapshots."),
        ),
    ),
    (
        "Commands in a session",
        (
            ("exec", "Evaluate a command in the session's shell."),
            ("run", "Run one program beside the shell."),
            ("shell", "Attach this terminal to the session's shell."),
            ("wait", "Wait for a command that is running already."),
            ("logs", "Show what background jobs have printed."),
        ),
    ),
    (
        "Snapshots",
        (
            ("snapshot", "Save files, processes and memory; prints the snapshot's id."),
            ("restore", "Take a session back to a snapshot."),
            ("fork", "Start sessions from a snapshot; prints their ids."),
            ("undo", "Go back to before the last exec (new --auto-snapshot)."),
            ("tree", "Draw the tree of snapshots."),
            ("verify", "Compare a session with the snapshot that it came from."),
            ("diff", "Show what differs between two snapshots or sessions."),
        ),
    ),
    ("Files", (("cp", "Copy files into and out of sessions and snapshots."), ("gc", "Free what nothing needs any more."))),
    (
        "This host",
        (
            ("setup", "Get what Waypoint needs on this host."),
            ("doctor", "Try every feature of this host."),
            ("demo", "Show a session being snapshotted, broken, restored and forked."),
            ("bench", "Measure this host."),
            ("completion", "Print the completion script of a shell."),
        ),
    ),
)


class _Commands(click.Group):
    """Imports the one command that is used; its help needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for _, entries in SECTIONS for name, _ in entries if find_spec(f"waypoint.cli.{name}")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in {name for _, entries in SECTIONS for name, _ in entries} or not find_spec(f"waypoint.cli.{cmd_name}"):
            return None
        command = getattr(importlib.import_module(f"waypoint.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        known = self.list_commands(ctx)
        for title, entries in SECTIONS:
            with formatter.section(title):
                formatter.write_dl([entry for entry in entries if entry[0] in known], col_max=12)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="waypoint")
def waypoint() -> None:
    """Live sessions that can be snapshotted, restored and forked in milliseconds.

    A session is a root filesystem, its processes and one persistent shell. S and SNAP are ids, names or unique beginnings of
    either. Every command takes --json. State is kept in $WAYPOINT_HOME, else in /var/lib/waypoint.
    """
