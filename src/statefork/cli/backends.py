"""`statefork backends`: what restore brings back, per backend, on this host."""

from __future__ import annotations

import json

import click

from statefork.cli.survey import Finding, survey
from statefork.model import Capability

__all__ = ["backends"]

_COLUMNS = [*Capability]


@click.command()
@click.argument("names", nargs=-1, metavar="[BACKEND]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def backends(names: tuple[str, ...], as_json: bool) -> None:
    """Try each backend and print what `restore` brings back with it on this host."""
    found = list(survey(names))
    if as_json:
        click.echo(json.dumps({"backends": [finding.to_json() for finding in found]}))
        return
    header = ["backend", *_COLUMNS, "pause", "methods"]
    rows = [_row(finding) for finding in found]
    widths = [max(len(row[index]) for row in [header, *rows]) for index in range(len(header))]
    for row in [header, *rows]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for finding in found:
        if finding.capabilities is None:
            click.echo(f"\n{finding.backend.name}: {finding.why}")


def _row(finding: Finding) -> list[str]:
    methods = " ".join(method.name for method in finding.backend.methods)
    found = finding.capabilities
    if found is None:
        return [finding.backend.name, *("-" for _ in _COLUMNS), "not here", methods]
    marks = ["yes" if capability in found.restores else "no" for capability in _COLUMNS]
    return [finding.backend.name, *marks, "frees memory" if found.pause_releases_memory else "stands still", methods]
