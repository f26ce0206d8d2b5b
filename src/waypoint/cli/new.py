"""`waypoint new`: start a session."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from waypoint.cli.options import SIZE, json_option, open_engine, pairs
from waypoint.cli.output import note, print_json, show_progress

if TYPE_CHECKING:
    from waypoint.engine import Engine
    from waypoint.model import BaseRecord, Network
    from waypoint.session import Session

__all__ = ["new", "report_new", "session_options", "start_session"]


def session_options(function: Any) -> Any:
    """What `new` and `build` can say about the session that they start."""
    for option in reversed(
        (
            click.option("--network", type=click.Choice(["none", "host", "nat"]), default="none", show_default=True),
            click.option("--memory", type=SIZE, metavar="SIZE", help="Limit, such as 512M."),
            click.option("--cpus", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Limit, such as 1.5."),
            click.option("--pids", type=click.IntRange(min=1), metavar="N", help="Limit on processes and threads."),
            click.option("--files-only", is_flag=True, help="Snapshots hold files only; works without CRIU."),
            click.option("--auto-snapshot", is_flag=True, help="Take a snapshot before every exec, for `undo`."),
            click.option("--env", multiple=True, metavar="K=V", help="Set a variable; may be given again."),
            click.option("--user", metavar="U", help="The shell's user."),
            click.option("--workdir", metavar="DIR", help="Where the shell starts."),
            click.option("--cap-add", multiple=True, metavar="CAP", help="Add a capability; may be given again."),
            click.option("--merge", is_flag=True, help="Share equal pages with other sessions that allow it (the host's KSM)."),
            click.option("--on-fork", default="", metavar="CMD", help="Run this in every fork right after it starts."),
        )
    ):
        function = option(function)
    return function


@click.command()
@click.option("--name", metavar="N", help="A name for the session.")
@click.option("--rootfs", type=click.Path(path_type=Path), metavar="DIR|TAR", help="A root filesystem or a saved image.")
@click.option("--base", metavar="NAME", help="A base that `build --name` made, or the base of another session.")
@session_options
@json_option
def new(name: str | None, rootfs: Path | None, base: str | None, as_json: bool, **asked: Any) -> None:
    """Start a session over the host's own root, copy-on-write, or over a root filesystem; prints its id."""
    if rootfs is not None and base is not None:
        raise click.UsageError("--rootfs and --base exclude each other")
    with open_engine() as engine:
        found: BaseRecord | None = None
        if rootfs is not None:
            from waypoint.bases import base_from_rootfs

            found = base_from_rootfs(engine.store, rootfs, on_progress=_progress(rootfs))
            show_progress("")
        elif base is not None:
            found = engine.store.db.base(base)
        report_new(engine, start_session(engine, name, found, **asked), as_json)


def start_session(
    engine: Engine,
    name: str | None,
    base: BaseRecord | None,
    *,
    network: str,
    memory: int | None,
    cpus: float | None,
    pids: int | None,
    files_only: bool,
    auto_snapshot: bool,
    env: tuple[str, ...],
    user: str | None,
    workdir: str | None,
    cap_add: tuple[str, ...],
    on_fork: str,
    merge: bool,
) -> Session:
    from waypoint.model import Limits

    extra: dict[str, Any] = {"files_only": True} if files_only else {}
    return engine.new(
        name=name,
        base=base,
        network=cast("Network", network),
        limits=Limits(memory, cpus, pids),
        env=pairs(env),
        auto_snapshot=auto_snapshot,
        extra_capabilities=cap_add,
        user=user,
        workdir=workdir,
        on_fork=on_fork,
        merge=merge,
        **extra,
    )


def report_new(engine: Engine, session: Session, as_json: bool) -> None:
    record, base = session.record, session.base
    if not as_json:
        for text in base.notes if base.kind != "host" else ():
            note(text)
        click.echo(record.id)
        return
    print_json(
        {
            "session": record.id,
            "name": record.name,
            "base": base.id,
            "base_kind": base.kind,
            "base_source": base.source,
            "state": engine.settle(record).state,
            "network": record.spec.network,
            "auto_snapshot": record.spec.auto_snapshot,
            "files_only": record.spec.files_only,
            "notes": list(base.notes),
        }
    )


def _progress(archive: Path) -> Any:
    def show(done: int, total: int) -> None:
        show_progress(f"unpacking {archive.name}: {100 * done // max(total, 1)} %")

    return show
