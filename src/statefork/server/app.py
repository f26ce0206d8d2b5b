"""The application: the service, the guard around it, the routes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI

from statefork.server.guard.install import Guard, GuardSettings, install
from statefork.server.routes import commands, environments, files, pools, snapshots, sockets
from statefork.server.service.service import Service
from statefork.server.settings import Settings
from waypoint import __version__

__all__ = ["create_app", "openapi_text"]

_ABOUT = """One network surface over branchable environments: the verbs of the library.

Every error is a problem document (RFC 9457) whose `code` is the word that the CLI and the libraries use. Ids may be cut short
as long as they fit only one. Lists come in pages. Requests that make something take an `Idempotency-Key`.

WebSockets (not in this document, see docs/api.md): `/v1/environments/{environment}/stream` starts a command and carries its input
and output, `/v1/environments/{environment}/commands/{command}/stream` comes back to one, `/v1/environments/{environment}/terminal`
is a terminal.
"""


def create_app(settings: Settings) -> FastAPI:
    guard = Guard(GuardSettings(settings.directory, settings.unix_socket, settings.limits, settings.otlp_endpoint))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = app.state.service = Service(settings, guard)
        await service.start()
        if "e2b" in settings.dialects or "swe-rex" in settings.dialects:
            from statefork.server.foreign.book import Book

            app.state.book = Book(service)
        try:
            yield
        finally:
            await service.stop()
            guard.close()

    app = _bare(lifespan)
    install(app, guard)
    if "e2b" in settings.dialects:
        from statefork.server.foreign.e2b.install import install_e2b

        install_e2b(app, guard)
    if "swe-rex" in settings.dialects:
        from statefork.server.foreign.swerex.install import install_swerex

        install_swerex(app, guard)
    return app


def _bare(lifespan: Any = None) -> FastAPI:
    app = FastAPI(
        title="StateFork",
        version=__version__,
        summary="Branchable environments over HTTP",
        description=_ABOUT,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    for one in (environments, commands, snapshots, files, pools, sockets):
        app.include_router(one.router)
    return app


def openapi_text() -> str:
    """The document as it is kept in the repository (docs/openapi.json). Nothing is started for it."""
    from statefork.server.guard.health import health_routes
    from statefork.server.guard.metrics import Metrics

    app = _bare()
    app.include_router(health_routes({}, Metrics()))
    return json.dumps(app.openapi(), indent=2) + "\n"
