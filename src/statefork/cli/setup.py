"""`statefork setup`: fetch the tools of backends that no package of this host has, once; a second run finds them there."""

from __future__ import annotations

import importlib
import importlib.util
import json

import click

from statefork.cli.main import note

__all__ = ["setup"]

FETCHERS = {
    "gvisor": ("statefork.backends.gvisor_install", "fetch_runsc"),
    "microvm": ("statefork.backends.microvm.kernel", "fetch_kernel"),
}


@click.command()
@click.argument("backend", nargs=-1, type=click.Choice(list(FETCHERS)))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def setup(backend: tuple[str, ...], as_json: bool) -> None:
    """Fetch what backends need (runsc, a guest kernel) into Waypoint's directory of tools; by default for all of them."""
    found = {}
    for name in backend or FETCHERS:
        module, function = FETCHERS[name]
        if importlib.util.find_spec(module.rpartition(".")[0]) is None or importlib.util.find_spec(module) is None:
            continue
        found[name] = str(getattr(importlib.import_module(module), function)(note))
        if not as_json:
            click.echo(f"{name:<10} {found[name]}")
    if as_json:
        click.echo(json.dumps(found))
