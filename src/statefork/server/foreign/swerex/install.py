"""SWE-ReX's routes and dialect, put into the daemon's application."""

from __future__ import annotations

from fastapi import FastAPI

from statefork.server.foreign.swerex import routes
from statefork.server.foreign.swerex.errors import Raised, SwerexDialect, told
from statefork.server.foreign.swerex.runtime import Runtimes
from statefork.server.guard.install import Guard

__all__ = ["install_swerex"]


def install_swerex(app: FastAPI, guard: Guard) -> None:
    app.state.swerex_runtimes = Runtimes()
    guard.dialects.append(SwerexDialect())
    app.include_router(routes.router)

    async def raised(request: object, error: Exception) -> object:
        return told(error)

    app.add_exception_handler(Raised, raised)  # type: ignore[arg-type]
