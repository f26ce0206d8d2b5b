"""`statefork doctor`: which backends work here, and what mends the others."""

from __future__ import annotations

import json
import sys

import click

from statefork.cli.survey import Finding, survey

__all__ = ["doctor"]


@click.command()
@click.argument("names", nargs=-1, metavar="[BACKEND]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def doctor(names: tuple[str, ...], as_json: bool) -> None:
    """Try every backend, and name the fix for what is missing.

    Ends in 0 if all that were named work, or, if none was named, at least one does; else in 1. Nothing is left behind.
    """
    found: list[Finding] = []
    for finding in survey(names):
        found.append(finding)
        if not as_json:
            _show(finding)
    working = [finding for finding in found if finding.capabilities is not None]
    ok = len(working) == len(found) if names else bool(working)
    if as_json:
        click.echo(json.dumps({"backends": [finding.to_json() for finding in found], "ok": ok}))
    elif not ok:
        click.echo("Not all of these work here." if names else "No backend works here.", err=True)
    sys.exit(0 if ok else 1)


def _show(finding: Finding) -> None:
    if finding.capabilities is not None:
        versions = ", ".join(f"{name} {version}" for name, version in finding.capabilities.versions.items())
        click.echo(f"{finding.backend.name:<12} {click.style('works  ', fg='green')}  {versions}")
        for capability, why in finding.capabilities.missing.items():
            click.echo(f"{'':<22} without {capability}: {why}")
        return
    first, *more = finding.why.splitlines() or [""]
    click.echo(f"{finding.backend.name:<12} {click.style('missing', fg='yellow')}  {first}")
    for line in more:
        click.echo(f"{'':<22}{line}")
    if finding.fix:
        click.echo(f"{'':<22}fix: {finding.fix}")
