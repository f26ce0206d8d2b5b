"""`statefork mcp`: environments as tools for a model, over stdio or streamable HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from statefork.cli.extras import need
from statefork.cli.main import home, note
from statefork.errors import UsageError
from statefork.home import default_home

if TYPE_CHECKING:
    from statefork.mcp.daemon import Daemon

__all__ = ["mcp"]


@click.command()
@click.option(
    "--http", "address", metavar="HOST:PORT", help="Streamable HTTP at /mcp, for bearers of a token; else stdio."
)
@click.option(
    "--allow-host", "names", multiple=True, metavar="NAME", help="With --http: a name that clients call it by."
)
@click.option("--tls-cert", type=click.Path(dir_okay=False, path_type=Path), help="With --http: speak TLS.")
@click.option("--tls-key", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--url", help="A daemon elsewhere; its token is $STATEFORK_TOKEN. Default: the one of $STATEFORK_HOME.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="warning", show_default=True
)
def mcp(
    address: str | None,
    names: tuple[str, ...],
    tls_cert: Path | None,
    tls_key: Path | None,
    url: str | None,
    log_level: str,
) -> None:
    """Serve environments to a model as tools (Model Context Protocol).

    Uses the daemon of $STATEFORK_HOME if one runs, and is that daemon itself if none does. Environments stay when this
    ends, and are there again when it is started anew. docs/mcp.md tells how to configure hosts.
    """
    need("mcp")
    if address is None and (names or tls_cert or tls_key):
        raise UsageError("--allow-host, --tls-cert and --tls-key go with --http")
    if (tls_cert is None) != (tls_key is None):
        raise UsageError("--tls-cert and --tls-key go together")
    from statefork.mcp.daemon import Daemon
    from statefork.server.guard.logs import configure_logs

    daemon = Daemon(home() or default_home(), url=url, token=os.environ.get("STATEFORK_TOKEN") if url else None)
    if address is None:
        asyncio.run(_stdio(daemon, log_level))
        return
    host, port = _parsed(address)
    configure_logs(sys.stderr, log_level)
    asyncio.run(_http(daemon, host, port, names, (tls_cert, tls_key) if tls_cert and tls_key else None))


async def _stdio(daemon: Daemon, log_level: str) -> None:
    """stdout belongs to the protocol; the log goes to stderr, which hosts keep."""
    from statefork.mcp.server import make_server
    from statefork.server.guard.logs import configure_logs

    async with daemon:
        server = make_server(daemon)
        configure_logs(sys.stderr, log_level)  # after it: the SDK sets up a log of its own
        await server.run_stdio_async()


async def _http(daemon: Daemon, host: str, port: int, names: tuple[str, ...], tls: tuple[Path, Path] | None) -> None:
    import uvicorn

    from statefork.mcp.http import http_app, http_guard
    from statefork.mcp.server import make_server
    from statefork.server.guard.listening import TlsFiles, uvicorn_config

    guard = http_guard(home() or default_home())
    try:
        if not guard.tokens.any_active():
            raise UsageError(
                "over HTTP every caller needs a token, and there is none; `statefork token create --scope exec`"
            )
        async with daemon:
            app = http_app(make_server(daemon), guard, host, port, names)
            files = TlsFiles(*tls) if tls else None
            if files is None and host not in ("127.0.0.1", "localhost", "::1"):
                note("without --tls-cert tokens cross the network in the clear")
            await uvicorn.Server(uvicorn_config(app, guard.limits, files, host=host, port=port)).serve()
    finally:
        guard.close()


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"--http {address}: give an address and a port, such as 127.0.0.1:8765")
    return host.strip("[]"), int(port)
