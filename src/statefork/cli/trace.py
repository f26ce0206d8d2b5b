"""`statefork trace`: draw what a search has written down, and take it again."""

from __future__ import annotations

import json
from pathlib import Path

import click

from statefork.cli.main import home

__all__ = ["trace"]

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group()
def trace() -> None:
    """Look at the trace of a search, or take its steps again."""


@trace.command()
@click.argument("file", type=_FILE)
@click.option("--text", "form", flag_value="text", default="text", help="The tree as text (the default).")
@click.option("--svg", "form", flag_value="svg", help="A picture.")
@click.option("--html", "form", flag_value="html", help="A page with the picture and what every node did and printed.")
@click.option("--json", "form", flag_value="json", help="One JSON document.")
@click.option("-o", "--output", type=_FILE, help="Write it there, not to stdout.")
def show(file: Path, form: str, output: Path | None) -> None:
    """Draw a trace: scores, times and outputs; `*` marks the way to the best node.

    A trace whose search still runs, or was killed, is drawn as far as it goes. A name given with -o that ends in .svg, .html
    or .json says what to write.
    """
    from statefork.explore.drawing import Drawing
    from statefork.explore.picture import as_html, as_svg

    if output is not None and form == "text" and output.suffix in (".svg", ".html", ".json"):
        form = output.suffix[1:]
    drawing = Drawing.of(file)
    if form == "json":
        text = json.dumps(drawing.to_json())
    else:
        text = drawing.text() if form == "text" else as_svg(drawing) if form == "svg" else as_html(drawing)
    if output is None:
        click.echo(text.rstrip("\n"))
    else:
        output.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


@trace.command()
@click.argument("file", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def replay(file: Path, as_json: bool) -> None:
    """Take every step of a trace again, in an environment made as the search made its own, and compare what they print.

    Ends in 0 if all that could be tried is equal, else in 1.
    """
    from statefork.explore.plan import Plan
    from statefork.explore.replaying import replay as replay_all

    plan = Plan.of_trace(file)
    with plan.environment(home()) as environment:
        found = replay_all(environment, file)
    if as_json:
        click.echo(json.dumps({"equal": found.equal, "differing": found.differing, "untried": found.untried}))
    else:
        click.echo(f"{len(found.equal)} equal, {len(found.differing)} differ, {len(found.untried)} below those untried")
        for number in found.differing:
            click.echo(f"differs: node {number}")
    if not found.ok:
        raise SystemExit(1)
