"""`waypoint doctor`: which features this host has, by trying each of them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from waypoint.kernel.probes import Feature

__all__ = ["doctor"]

DEFAULT_HOME = "/var/lib/waypoint"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def doctor(as_json: bool) -> None:
    """Try every feature that Waypoint uses, and name the fix for what is missing.

    Ends in 0 when all required features work, else in 1. Nothing is left behind on the host.
    """
    # The probes load half of the kernel room: other commands must not pay for that.
    from waypoint.kernel import probes_files, probes_limits, probes_processes

    found: list[Feature] = []
    with _scratch() as scratch:
        for probe in (*probes_processes.PROBES, *probes_files.PROBES, *probes_limits.PROBES):
            feature = probe.run(scratch)
            found.append(feature)
            if not as_json:
                _show(feature)
    ok = all(feature.status == "works" for feature in found if feature.required)
    if as_json:
        click.echo(json.dumps({"features": [asdict(feature) for feature in found], "ok": ok}))
    else:
        _conclude(found, ok)
    sys.exit(0 if ok else 1)


def _show(feature: Feature) -> None:
    """One line a feature as it is tried, and below it the whole reason and the fix when it is missing."""
    works = feature.status == "works"
    word = (
        click.style("works  ", fg="green")
        if works
        else click.style("missing", fg="red" if feature.required else "yellow")
    )
    first, *more = feature.why.splitlines() or [""]
    optional = "" if works or feature.required else " (optional)"
    click.echo(f"{feature.feature:<26} {word}  {first}{optional}")
    for line in more:
        click.echo(f"{'':<36}{line}")
    if feature.fix:
        click.echo(f"{'':<36}fix: {feature.fix}")


def _conclude(found: Sequence[Feature], ok: bool) -> None:
    missing = [feature.feature for feature in found if feature.status != "works"]
    if not missing:
        click.echo("Everything works on this host.", err=True)
    elif ok:
        click.echo(f"All that is required works; without {', '.join(missing)}.", err=True)
    else:
        required = [feature.feature for feature in found if feature.status != "works" and feature.required]
        click.echo(f"Waypoint cannot run here: {', '.join(required)} missing.", err=True)


@contextmanager
def _scratch() -> Iterator[Path]:
    """On the file system that the store is on, because overlay layers work on some and not on others."""
    home = Path(os.environ.get("WAYPOINT_HOME") or DEFAULT_HOME)
    place = next((path for path in (home, *home.parents) if path.is_dir() and os.access(path, os.W_OK)), None)
    with tempfile.TemporaryDirectory(prefix=".waypoint-doctor-", dir=place, ignore_cleanup_errors=True) as name:
        yield Path(name)
