"""/healthz, /readyz and /metrics. The first two are open to everybody and tell nothing but yes or no."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Depends, Response

from statefork.errors import WaypointError
from statefork.server.guard.metrics import CONTENT_TYPE, Metrics
from statefork.server.guard.principal import Principal, require

__all__ = ["Checks", "health_routes"]

log = logging.getLogger(__name__)

Checks = dict[str, Callable[[], bool]]
"""By name; called on a worker thread. False or an error: not ready."""


def health_routes(checks: Checks, metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/healthz", operation_id="healthz", summary="Whether the process answers at all")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get(
        "/readyz",
        operation_id="readyz",
        summary="Whether requests will be served; 503 until then",
        responses={503: {"description": "Not yet; the body names what is missing"}},
    )
    async def readyz(response: Response) -> dict[str, object]:
        missing = await anyio.to_thread.run_sync(lambda: [name for name in checks if not _passes(name, checks)])
        if missing:
            response.status_code = 503
        return {"status": "waiting" if missing else "ready", "missing": missing}

    @router.get(
        "/metrics", operation_id="metrics", summary="For Prometheus; needs the scope metrics", response_class=Response
    )
    async def serve_metrics(_: Annotated[Principal, Depends(require("metrics"))]) -> Response:
        return Response(await anyio.to_thread.run_sync(metrics.render), media_type=CONTENT_TYPE)

    return router


def _passes(name: str, checks: Checks) -> bool:
    try:
        return checks[name]()
    except (WaypointError, OSError) as error:
        log.warning("readiness check %s failed: %s", name, error)
        return False
