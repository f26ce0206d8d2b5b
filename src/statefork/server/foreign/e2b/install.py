"""E2B's routes and dialect, put into the daemon's application."""

from __future__ import annotations

from fastapi import FastAPI

from statefork.server.foreign.e2b import files, filesystem, processes, sandboxes, snapshots, watching
from statefork.server.foreign.e2b.access import Access
from statefork.server.foreign.e2b.dialect import E2bDialect
from statefork.server.foreign.e2b.watching import Watchers
from statefork.server.guard.install import Guard

__all__ = ["install_e2b"]


def install_e2b(app: FastAPI, guard: Guard) -> None:
    access = app.state.e2b_access = Access(guard)
    app.state.e2b_watchers = Watchers()
    guard.dialects.append(E2bDialect(app, access))
    for one in (sandboxes, snapshots, processes, filesystem, watching, files):
        app.include_router(one.router)
    app.include_router(snapshots.rest)
