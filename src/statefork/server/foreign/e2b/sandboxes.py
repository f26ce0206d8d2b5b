"""E2B's control plane: sandboxes are made, listed, connected to, paused, forked, and ended."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from statefork.errors import Exists, Unsupported, UsageError, WaypointError
from statefork.server.foreign.e2b.access import Access
from statefork.server.foreign.e2b.shapes import given, sandbox_detail, sandbox_document, shown
from statefork.server.foreign.e2b.templates import find_template
from statefork.server.guard.problems import STATUS
from statefork.server.routes.asking import (
    Execs,
    Key,
    Reads,
    Services,
    answer,
    by_age,
    encoded,
    guard_of,
    moment,
    once,
    page,
)
from statefork.server.service.answers import Reply
from statefork.server.service.held import Held
from statefork.server.service.making import Terms, Wanted, new_identifier
from statefork.server.service.service import Service

__all__ = ["router"]

router = APIRouter(include_in_schema=False)

DEFAULT_SECONDS = 300
Seconds = Annotated[int, Field(ge=0, le=10 * 365 * 86400)]


class NewSandbox(BaseModel):
    templateID: str = "base"
    timeout: Seconds = DEFAULT_SECONDS
    autoPause: bool | None = None
    autoPauseMemory: bool | None = None
    autoResume: dict[str, Any] | None = None
    allow_internet_access: bool | None = None
    network: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    envVars: dict[str, str] | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volumeMounts: list[Any] | None = None


class Timeout(BaseModel):
    timeout: Seconds = DEFAULT_SECONDS


class Connect(Timeout):
    memory: bool | None = None


class Refresh(BaseModel):
    duration: Seconds = DEFAULT_SECONDS


class Pause(BaseModel):
    memory: bool | None = None


class Fork(Timeout):
    count: int = Field(1, ge=1)


def access_of(request: Request) -> Access:
    found: Access = request.app.state.e2b_access
    return found


@router.post("/sandboxes")
@router.post("/v2/sandboxes")
async def create(request: Request, body: NewSandbox, service: Services, principal: Execs, key: Key = None) -> Response:
    guard, access = guard_of(request), access_of(request)
    guard.note(request, action="create", template=body.templateID)
    _refuse_unsupported(body)
    at_expiry = "delete"
    if body.autoPause:
        at_expiry = "sleep" if (body.autoResume or {}).get("enabled") else "pause"
    kept = {"template": body.templateID, "envs": body.envVars or {}, "cold": body.autoPauseMemory is False}
    terms = Terms(body.metadata or {}, max(1, body.timeout), at_expiry=at_expiry, foreign={"e2b": kept})

    async def do(identifier: str) -> Reply:
        made_of = find_template(service, principal, body.templateID)
        if isinstance(made_of, Wanted):
            held = await service.making.create(principal, _networked(made_of, body), terms, identifier)
        else:
            tree, node = made_of
            held = await service.making.from_snapshot(principal, tree, node.snapshot.id, terms, identifier)
        guard.note(request, action="create", environment=held.id)
        return encoded(sandbox_document(held, access, principal), 201)

    async def again(identifier: str) -> Reply | None:
        held = service.held.get(identifier)
        return encoded(sandbox_document(held, access, principal), 201) if held and not held.gone else None

    return await once(request, service, principal, key, new_identifier(), do, again)


@router.get("/sandboxes")
@router.get("/v2/sandboxes")
async def list_sandboxes(
    request: Request,
    service: Services,
    principal: Reads,
    metadata: str | None = None,
    state: str | None = None,
    order: str | None = None,
    startedAfter: str | None = None,
    template: str | None = None,
    nextToken: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    wanted = {unquote(name): unquote(value) for name, value in parse_qsl(metadata or "", keep_blank_values=True)}
    states = set(state.split(",")) if state else {"running", "paused"}
    if not request.url.path.startswith("/v2"):
        states = {"running"}
    after = _moment_of(startedAfter) if startedAfter else 0.0
    found = [
        held
        for held in service.seen_by(principal)
        if not held.lost
        and ("paused" if held.state == "paused" else "running") in states
        and all(held.row.metadata.get(name) == value for name, value in wanted.items())
        and held.row.created > after
        and (template is None or given(held).get("template") == template)
    ]
    backwards = order == "desc"  # the cursor is the last key, so keys have to grow either way
    key = (lambda held: f"{1e12 - held.row.created:020.6f} {held.id}") if backwards else by_age
    items, more = page(sorted(found, key=key), limit, nextToken, key)
    response = answer([sandbox_detail(held, service) for held in items])
    if more is not None:
        response.headers["X-Next-Token"] = more
    return response


@router.get("/sandboxes/{sandbox}")
async def get(sandbox: str, service: Services, principal: Reads) -> Response:
    return answer(sandbox_detail(shown(service, principal, sandbox), service))


@router.delete("/sandboxes/{sandbox}")
async def kill(request: Request, sandbox: str, service: Services, principal: Execs) -> Response:
    held = shown(service, principal, sandbox)
    guard_of(request).note(request, action="delete", environment=held.id)
    await service.making.delete(held)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox}/timeout")
async def set_timeout(request: Request, sandbox: str, body: Timeout, service: Services, principal: Execs) -> Response:
    held = shown(service, principal, sandbox)
    guard_of(request).note(request, action="patch", environment=held.id, members=["ttl_seconds"])
    await _expires(service, held, body.timeout)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox}/refreshes")
async def refresh(request: Request, sandbox: str, body: Refresh, service: Services, principal: Execs) -> Response:
    held = shown(service, principal, sandbox)
    guard_of(request).note(request, action="patch", environment=held.id, members=["ttl_seconds"])
    await _expires(service, held, body.duration, only_later=True)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox}/connect")
@router.post("/v2/sandboxes/{sandbox}/connect")
@router.post("/sandboxes/{sandbox}/resume")
async def connect(request: Request, sandbox: str, body: Connect, service: Services, principal: Execs) -> Response:
    """Wakes it if it is paused; its time is never made shorter."""
    held = shown(service, principal, sandbox)
    guard_of(request).note(request, action="resume", environment=held.id)
    resumed = held.state == "paused"
    if resumed:
        await service.lifecycle.resume(held)
        if body.memory is False or given(held).get("cold") or given(held).pop("cold_once", False):
            await _start_anew(service, held)
    await _expires(service, held, body.timeout, only_later=not resumed)
    return answer(sandbox_document(held, access_of(request), principal), 201 if resumed else 200)


@router.post("/sandboxes/{sandbox}/pause")
async def pause(
    request: Request, sandbox: str, service: Services, principal: Execs, body: Pause | None = None
) -> Response:
    held = shown(service, principal, sandbox)
    guard_of(request).note(request, action="pause", environment=held.id)
    if held.state == "paused":
        raise Exists(f"sandbox {held.id} is already paused")
    if body is not None and body.memory is False:
        held.row.foreign.setdefault("e2b", {})["cold_once"] = True
    await service.lifecycle.pause(held, "caller")
    held.row.expires = None
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox}/fork")
async def fork(
    request: Request, sandbox: str, service: Services, principal: Execs, body: Fork | None = None
) -> Response:
    held, asked, guard = shown(service, principal, sandbox), body or Fork(count=1), guard_of(request)
    guard.note(request, action="fork", environment=held.id, n=asked.count)
    if asked.count > service.settings.most_forks:
        raise UsageError(f"at most {service.settings.most_forks} forks at once")
    terms = Terms(held.row.metadata, max(1, asked.timeout), at_expiry=held.row.at_expiry, foreign=held.row.foreign)
    _, made = await service.making.fork(principal, held, asked.count, terms, from_snapshot=None, return_errors=True)
    results: list[dict[str, Any]] = []
    for one in made:
        if isinstance(one, WaypointError):
            results.append({"error": {"code": STATUS.get(one.code, 500), "message": one.message}})
        else:
            results.append({"sandbox": sandbox_document(one, access_of(request), principal)})
    guard.note(request, action="fork", made=[one.id for one in made if isinstance(one, Held)])
    return answer(results, 201)


@router.get("/sandboxes/{sandbox}/metrics")
async def metrics(sandbox: str, service: Services, principal: Reads) -> Response:
    """As it is now; no history is kept."""
    held = shown(service, principal, sandbox)
    live = held.live
    first, began = await service.commands.run(live.usage), time.monotonic()
    if first is None:
        return answer([])
    await asyncio.sleep(0.1)
    second = await service.commands.run(live.usage) or first
    share = max(0.0, second.cpu_seconds - first.cpu_seconds) / (time.monotonic() - began)
    disk = shutil.disk_usage(service.settings.home)
    now = time.time()
    return answer(
        [
            {
                "timestamp": moment(now),
                "timestampUnix": int(now),
                "cpuCount": os.cpu_count() or 1,
                "cpuUsedPct": round(100 * share, 2),
                "memUsed": second.memory_bytes,
                "memTotal": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
                "memCache": 0,
                "diskUsed": disk.used,
                "diskTotal": disk.total,
            }
        ]
    )


async def _start_anew(service: Service, held: Held) -> None:
    """Its files, and none of its processes: what E2B calls a cold boot."""
    async with service.use(held) as live:

        def call() -> None:
            live.restore(live.snapshot(mode="files"))

        await service.usage.sample(held)
        await service.do(held, "restore", call)
        service.usage.restarted(held)


def _refuse_unsupported(body: NewSandbox) -> None:
    for name in ("network", "mcp", "iam", "volumeMounts"):
        if getattr(body, name):
            raise Unsupported(f"{name} is not supported here; see docs/e2b.md")
    if body.autoPauseMemory is False and (body.autoResume or {}).get("enabled"):
        raise UsageError("a sandbox that is paused without its memory cannot resume by itself")


def _networked(wanted: Wanted, body: NewSandbox) -> Wanted:
    if body.allow_internet_access is None or wanted.method != "waypoint_build":
        return wanted
    network = wanted.arguments.get("network", "nat") if body.allow_internet_access else "none"
    return Wanted(wanted.method, {**wanted.arguments, "network": network}, wanted.trusted)


async def _expires(service: Service, held: Held, seconds: float, *, only_later: bool = False) -> None:
    row, at = held.row, time.time() + seconds
    if held.state == "paused" or (only_later and row.expires is not None and row.expires > at):
        return
    row.ttl_seconds, row.expires = seconds, at
    held.touch()
    await service.commands.run(lambda: service.records.put_environments(row))


def _moment_of(text: str) -> float:
    try:
        return datetime.fromisoformat(text.replace(" ", "+")).timestamp()
    except ValueError:
        raise UsageError(f"startedAfter: {text!r} is no time") from None
