"""`statefork promote`: what a search found, from its trace."""

from __future__ import annotations

import json
from pathlib import Path

import click

from statefork.cli.main import home
from statefork.cli.winners import Wishes, wishes_options
from statefork.errors import UsageError

__all__ = ["promote"]


@click.command()
@click.argument("trace", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--node", type=click.IntRange(min=0), help="Another node than the best one.")
@click.option("--session", is_flag=True, help="What the search was attached to goes on as the winner.")
@wishes_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def promote(
    trace: Path,
    node: int | None,
    session: bool,
    path: str | None,
    apply: Path | None,
    force: bool,
    patch: Path | None,
    oci: Path | None,
    name: str,
    keep: str | None,
    as_json: bool,
) -> None:
    """Commit a node of a trace that `statefork explore` wrote: as files, as a patch, as an image, as a session.

    The environment is made as the search made its own, and the steps to the node are taken again. If one of them does not print
    what it printed in the search, nothing is written.
    """
    from statefork.explore.plan import Plan
    from statefork.explore.replaying import replay_to, winner

    wishes = Wishes(path, apply, force, patch, oci, name, keep).checked()
    if not wishes and not session:
        raise UsageError("promote to what? --apply, --patch, --oci, --keep or --session")
    found = winner(trace, node)
    plan = Plan.of_trace(trace)
    if session and not plan.attach:
        raise UsageError("--session is for searches with --attach: this one made its environment itself")
    steps = [action.command for action in found.history()]
    with plan.environment(home()) as environment:
        began = environment.snapshot()
        (live,) = environment.fork(1, from_snapshot=began)
        with live:
            replay_to(live, found)
            done = wishes.fulfil(live, began, steps)
            if session:
                environment.become(live.snapshot())
                done["promoted"] = environment.description
    document = {"node": found.id, "score": found.score, "steps": steps, "done": done}
    if as_json:
        click.echo(json.dumps(document))
        return
    click.echo(f"node {found.id}, score {found.score:g}, {len(steps)} steps taken again")
    for what, where in done.items():
        click.echo(f"{what}: {where}")
