"""Environments: made, listed, changed, forked, paused, resumed, deleted; what they use and what they did."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from statefork.errors import UsageError, WaypointError
from statefork.registry import backends
from statefork.server import schemas
from statefork.server.routes.asking import (
    PROBLEMS,
    Cursor,
    Execs,
    Ids,
    Key,
    Limit,
    Reads,
    Services,
    answer,
    by_age,
    encoded,
    guard_of,
    once,
    page,
)
from statefork.server.routes.shapes import environment_document, usage_document
from statefork.server.service.answers import Reply
from statefork.server.service.held import Held
from statefork.server.service.making import Terms, Wanted, new_identifier

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["environments"], responses=PROBLEMS)


@router.post(
    "/environments",
    operation_id="createEnvironment",
    status_code=201,
    response_model=schemas.Environment,
    summary="Make an environment; the answer comes when it has answered itself",
)
async def create_environment(
    request: Request, body: schemas.CreateEnvironment, service: Services, principal: Execs, key: Key = None
) -> Response:
    guard = guard_of(request)
    terms = Terms(body.metadata, body.ttl_seconds, body.idle_pause_seconds)
    if body.snapshot is not None and (body.arguments or "method" in body.model_fields_set):
        raise UsageError("give either a snapshot, or a method with its arguments")
    guard.note(request, action="create", method=body.method, snapshot=body.snapshot)

    async def do(identifier: str) -> Reply:
        if body.snapshot is None:
            held = await service.making.create(principal, Wanted(body.method, body.arguments), terms, identifier)
        else:
            tree, node = service.find_snapshot(body.snapshot, principal)
            held = await service.making.from_snapshot(principal, tree, node.snapshot.id, terms, identifier)
        guard.note(request, action="create", environment=held.id)
        return encoded(environment_document(held), 201)

    async def again(identifier: str) -> Reply | None:
        held = service.held.get(identifier)
        return encoded(environment_document(held), 201) if held is not None and not held.gone else None

    return await once(request, service, principal, key, new_identifier(), do, again)


@router.get(
    "/environments", operation_id="listEnvironments", response_model=schemas.EnvironmentPage, summary="Oldest first"
)
async def list_environments(
    service: Services,
    principal: Reads,
    limit: Limit = 100,
    cursor: Cursor = None,
    state: Annotated[str | None, Query(description="live, paused or lost")] = None,
    backend: str | None = None,
    tree: str | None = None,
    metadata: Annotated[list[str] | None, Query(description="key=value; all that are given have to fit")] = None,
) -> Response:
    wanted = [one.partition("=")[::2] for one in metadata or ()]
    found = [
        held
        for held in service.seen_by(principal)
        if (state is None or held.state == state)
        and (backend is None or held.backend == backend)
        and (tree is None or held.row.tree == tree)
        and all(held.row.metadata.get(name) == value for name, value in wanted)
    ]
    items, more = page(sorted(found, key=by_age), limit, cursor, by_age)
    return answer({"items": [environment_document(held) for held in items], "next_cursor": more})


@router.get("/environments/{environment}", operation_id="getEnvironment", response_model=schemas.Environment)
async def get_environment(environment: Ids, service: Services, principal: Reads) -> Response:
    return answer(environment_document(service.find(environment, principal)))


@router.patch(
    "/environments/{environment}",
    operation_id="patchEnvironment",
    response_model=schemas.Environment,
    summary="Change metadata, time-to-live and idle time; what is left out stays",
)
async def patch_environment(
    request: Request, environment: Ids, body: schemas.PatchEnvironment, service: Services, principal: Execs
) -> Response:
    held = service.find(environment, principal)
    guard_of(request).note(request, action="patch", environment=held.id, members=sorted(body.model_fields_set))
    row = held.row
    if "metadata" in body.model_fields_set:
        row.metadata = dict(body.metadata or {})
    if "ttl_seconds" in body.model_fields_set:
        row.ttl_seconds = body.ttl_seconds
        row.expires = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
    if "idle_pause_seconds" in body.model_fields_set:
        row.idle_pause_seconds = body.idle_pause_seconds
    held.touch()
    await service.commands.run(lambda: service.records.put_environments(row))
    return answer(environment_document(held))


@router.delete(
    "/environments/{environment}",
    operation_id="deleteEnvironment",
    status_code=204,
    response_class=Response,
    summary="End it; the last of a tree takes the snapshots along, unless one is pinned",
)
async def delete_environment(request: Request, environment: Ids, service: Services, principal: Execs) -> Response:
    held = service.find(environment, principal)
    guard_of(request).note(request, action="delete", environment=held.id)
    await service.making.delete(held)
    return Response(status_code=204)


@router.post(
    "/environments/{environment}/fork",
    operation_id="forkEnvironment",
    status_code=201,
    response_model=schemas.Forked,
    summary="Live, independent copies of its present state, or of a snapshot",
)
async def fork_environment(
    request: Request,
    environment: Ids,
    service: Services,
    principal: Execs,
    body: schemas.Fork | None = None,
    key: Key = None,
) -> Response:
    held = service.find(environment, principal)
    body = body or schemas.Fork.model_validate({})
    guard = guard_of(request)
    guard.note(request, action="fork", environment=held.id, n=body.n, snapshot=body.snapshot)
    terms = Terms(body.metadata, body.ttl_seconds, body.idle_pause_seconds)

    async def do(_: str) -> Reply:
        snapshot, made = await service.making.fork(
            principal, held, body.n, terms, from_snapshot=body.snapshot, return_errors=body.return_errors
        )
        forks = [environment_document(one) for one in made if isinstance(one, Held)]
        errors = [
            {"index": index, "code": one.code, "detail": one.message}
            for index, one in enumerate(made)
            if isinstance(one, WaypointError)
        ]
        guard.note(request, action="fork", made=[fork["id"] for fork in forks], errors=len(errors))
        return encoded({"snapshot": snapshot, "environments": forks, "errors": errors}, 201)

    return await once(request, service, principal, key, "", do)


@router.post(
    "/environments/{environment}/pause",
    operation_id="pauseEnvironment",
    response_model=schemas.Environment,
    summary="Release the CPU, and the memory where the backend can; only resume brings it back",
)
async def pause_environment(request: Request, environment: Ids, service: Services, principal: Execs) -> Response:
    held = service.find(environment, principal)
    guard_of(request).note(request, action="pause", environment=held.id)
    await service.lifecycle.pause(held, "caller")
    return answer(environment_document(held))


@router.post("/environments/{environment}/resume", operation_id="resumeEnvironment", response_model=schemas.Environment)
async def resume_environment(request: Request, environment: Ids, service: Services, principal: Execs) -> Response:
    held = service.find(environment, principal)
    guard_of(request).note(request, action="resume", environment=held.id)
    await service.lifecycle.resume(held)
    held.touch()
    return answer(environment_document(held))


@router.get(
    "/environments/{environment}/usage",
    operation_id="getUsage",
    response_model=schemas.Usage,
    summary="What it has used; nothing grows while it is paused",
)
async def get_usage(environment: Ids, service: Services, principal: Reads) -> Response:
    held = service.find(environment, principal)
    await service.usage.sample(held)
    return answer(usage_document(service.usage.of(held)))


@router.get(
    "/usage",
    operation_id="getTokenUsage",
    response_model=schemas.UsageReport,
    summary="By token, with what it has deleted; an admin sees all tokens",
    tags=["usage"],
)
async def get_token_usage(service: Services, principal: Reads) -> Response:
    past = await service.commands.run(service.records.past_usage)
    totals = service.usage.by_owner(past)
    items: list[dict[str, Any]] = [
        {"owner": owner, "environments": total.environments, **usage_document(total)}
        for owner, total in sorted(totals.items())
        if principal.may("admin") or owner == principal.token_id
    ]
    return answer({"items": items})


@router.get(
    "/environments/{environment}/history",
    operation_id="getHistory",
    response_model=schemas.OperationPage,
    summary="What was done with it since the daemon started, oldest first",
)
async def get_history(
    environment: Ids, service: Services, principal: Reads, limit: Limit = 100, cursor: Cursor = None
) -> Response:
    held = service.find(environment, principal)
    done = list(held.environment.history) if held.environment is not None else []
    items, more = page(done, limit, cursor, lambda record: f"{record.number:012d}")
    documents = [
        {
            "number": record.number,
            "operation": record.operation,
            "started_at": record.started_at.isoformat(),
            "duration_ms": round(record.duration_ms, 3),
            "error": record.error,
            "snapshot": record.snapshot,
            "files_bytes": record.files_bytes,
            "memory_bytes": record.memory_bytes,
            "details": dict(record.details),
        }
        for record in items
    ]
    return answer({"items": documents, "next_cursor": more})


@router.get(
    "/backends",
    operation_id="listBackends",
    response_model=schemas.BackendPage,
    summary="What environments can be made of here; whether a backend works on this host is found out by making one",
    tags=["backends"],
)
async def list_backends(service: Services, principal: Reads) -> Response:
    found = await service.commands.run(backends)
    items = [
        {
            "name": backend.name,
            "summary": backend.summary,
            "durable": backend.driver.durable,
            "methods": {method.name: [argument.name for argument in method.arguments] for method in backend.methods},
        }
        for backend in found.values()
    ]
    return answer({"items": items})
