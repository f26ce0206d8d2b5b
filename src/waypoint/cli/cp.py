"""`waypoint cp`: files and directories into and out of sessions, and out of snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from waypoint.cli.options import ANYTHING, json_option, open_engine
from waypoint.cli.output import note, print_json, show_progress
from waypoint.cli.show import size

if TYPE_CHECKING:
    from waypoint.transfer import Progress

__all__ = ["cp"]


class _Place(click.ParamType):  # type: ignore[type-arg]
    """A local path, or S:/path."""

    name = "place"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith((".", "/")) or ":" in incomplete:
            return [CompletionItem(incomplete, type="file")]
        names = [CompletionItem(f"{item.value}:/", help=item.help) for item in ANYTHING.shell_complete(ctx, param, incomplete)]
        return names or [CompletionItem(incomplete, type="file")]


@click.command()
@click.argument("source", type=_Place(), metavar="SRC")
@click.argument("target", type=_Place(), metavar="DST")
@click.option("-a", "--archive", is_flag=True, help="Keep owners, setuid bits, access lists and file capabilities.")
@json_option
def cp(source: str, target: str, archive: bool, as_json: bool) -> None:
    """Copy a file or directory. One of SRC and DST, or both, is S:/path; a snapshot can only be copied from.

    Names are understood as `docker cp` understands them: DIR/. is what is in DIR.
    """
    from waypoint import transfer

    def show(progress: Progress) -> None:
        show_progress(f"{progress.files} files, {size(progress.size_bytes)}: {progress.path[-60:]}")

    with open_engine() as engine:
        try:
            done = transfer.copy(engine, source, target, archive=archive, on_progress=show)
        finally:
            show_progress("")
    document: dict[str, Any] = {
        "source": source,
        "target": target,
        "files": done.files,
        "directories": done.directories,
        "links": done.links,
        "size_bytes": done.size_bytes,
        "notes": list(done.notes),
    }
    if as_json:
        print_json(document)
        return
    for text in done.notes:
        note(text)
