"""`statefork serve`: the daemon."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from statefork.cli.extras import need
from statefork.cli.main import home, note
from statefork.home import default_home

__all__ = ["serve"]


@click.command()
@click.option("--socket", type=click.Path(path_type=Path), help="A unix socket, for its owner only (the default).")
@click.option("--host", help="Listen on TCP instead; every request then needs a token.")
@click.option("--port", type=click.IntRange(0, 65535), help="With --host; 0 takes a free one. Default: 8470.")
@click.option("--tls-cert", type=click.Path(path_type=Path), help="A certificate (PEM), with --tls-key.")
@click.option("--tls-key", type=click.Path(path_type=Path))
@click.option("--ttl", type=click.FloatRange(0, min_open=True), help="Seconds that environments live, unless they say.")
@click.option("--idle-pause", type=click.FloatRange(0, min_open=True), help="Seconds until unused ones are paused.")
@click.option("--e2b/--no-e2b", default=True, help="Serve E2B's SDKs, too (docs/e2b.md). Default: yes.")
@click.option("--swe-rex/--no-swe-rex", default=True, help="Serve SWE-ReX's client, too (docs/swe-rex.md). Default: yes.")
@click.option("--set", "settings", multiple=True, metavar="NAME=NUMBER", help="Another limit; --set help lists them.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
@click.option("--openapi", is_flag=True, help="Print the OpenAPI document and end.")
def serve(
    socket: Path | None,
    host: str | None,
    port: int | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    ttl: float | None,
    idle_pause: float | None,
    e2b: bool,
    swe_rex: bool,
    settings: tuple[str, ...],
    log_level: str,
    openapi: bool,
) -> None:
    """Serve every backend over HTTP, under /v1. Ready when /readyz answers 200.

    On the socket <home>/statefork.sock by default. Environments of Waypoint, Docker and Podman go on when the daemon ends,
    and it finds them again; those of the other backends end with it.
    """
    need("server")
    from statefork.server import run
    from statefork.server.guard.notify import notify

    if openapi:
        from statefork.server.app import openapi_text

        click.echo(openapi_text(), nl=False)
        return
    if "help" in settings:
        click.echo(run.limits_help())
        return
    place = run.Place.chosen(home() or default_home(), socket, host, port, tls_cert, tls_key)
    chosen = run.chosen_settings(
        home() or default_home(),
        place,
        settings,
        ttl,
        idle_pause,
        os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"),
        [name for name, served in (("e2b", e2b), ("swe-rex", swe_rex)) if served],
    )

    def ready(address: str) -> None:
        note(f"ready on {address}")
        notify(os.environ.get("NOTIFY_SOCKET"), "READY=1")

    run.serve(chosen, place, log=sys.stderr, log_level=log_level, ready=ready)
