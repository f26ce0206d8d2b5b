"""Snapshots as E2B has them: they outlive their sandbox, and sandboxes are made from them as from templates."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from statefork.errors import HasChildren, NotFound, Unsupported, WrongState
from statefork.server.foreign.e2b.shapes import shown
from statefork.server.foreign.e2b.templates import pinned_snapshot, template_names
from statefork.server.routes.asking import Execs, Reads, Services, answer, guard_of, page
from statefork.server.service.service import Service, Tree
from statefork.tree import check_name

__all__ = ["rest", "router"]

router = APIRouter(include_in_schema=False)
rest = APIRouter(include_in_schema=False)
"""All that is E2B's and not served: included last."""


class NewSnapshot(BaseModel):
    name: str | None = None
    memory: bool | None = None


@router.post("/sandboxes/{sandbox}/snapshots")
async def create(
    request: Request, sandbox: str, service: Services, principal: Execs, body: NewSnapshot | None = None
) -> Response:
    held, asked, guard = shown(service, principal, sandbox), body or NewSnapshot(), guard_of(request)
    guard.note(request, action="snapshot", environment=held.id, name=asked.name)
    name = check_name(asked.name) if asked.name else None
    mode: Any = "files" if asked.memory is False else "auto"
    tree = service.trees[held.row.tree]
    if name is not None:
        await service.commands.run(lambda: _free_name(service, tree, name))
    async with service.use(held) as live:
        taken = await service.do(held, "snapshot", lambda: live.snapshot(name, mode=mode))
    guard.note(request, action="snapshot", snapshot=taken)
    await service.commands.run(lambda: _pin(service, tree, taken, True))
    return answer({"snapshotID": taken, "names": [name] if name else []}, 201)


@router.get("/snapshots")
async def list_snapshots(
    service: Services,
    principal: Reads,
    sandboxID: str | None = None,
    name: str | None = None,
    nextToken: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    found = sorted(
        (f"{one.created_at.isoformat()} {one.id}", one)
        for tree in service.trees_seen_by(principal)
        for one in tree.family.tree.snapshots()
        if tree.family.tree.is_pinned(one.id)
        and (sandboxID is None or one.environment == sandboxID)
        and (name is None or one.name == name)
    )
    items, more = page(found, limit, nextToken, lambda one: one[0])
    response = answer([{"snapshotID": one.id, "names": [one.name] if one.name else []} for _, one in items])
    if more is not None:
        response.headers["X-Next-Token"] = more
    return response


@router.delete("/templates/{template}")
async def delete(request: Request, template: str, service: Services, principal: Execs) -> Response:
    """It is gone for callers at once; its storage goes when no sandbox stands on it and no other snapshot needs it."""
    found = pinned_snapshot(service, principal, template)
    if found is None:
        raise NotFound(f"template '{template}' not found")
    tree, node = found
    snapshot = node.snapshot.id
    guard_of(request).note(request, action="delete_snapshot", snapshot=snapshot)

    def remove() -> None:
        _pin(service, tree, snapshot, False)
        with contextlib.suppress(HasChildren, WrongState):
            for doomed in tree.family.tree.branch(snapshot, False):
                tree.family.discard(doomed)

    await service.work.run(remove)
    await service.making.close_tree(tree.key)
    return Response(status_code=204)


@router.get("/templates/aliases/{alias}")
async def find_alias(alias: str, service: Services, principal: Reads) -> Response:
    if alias not in template_names(service) and pinned_snapshot(service, principal, alias) is None:
        raise NotFound(f"template '{alias}' not found")
    return answer({"templateID": alias, "public": True})


def _free_name(service: Service, tree: Tree, name: str) -> None:
    """A name leads to the newest snapshot that was given it; the older one keeps its id."""
    for snapshot in tree.family.tree.snapshots():
        if snapshot.name == name:
            service.records.rename_node(tree.family.tree.rename(snapshot.id, None).snapshot)


def _pin(service: Service, tree: Tree, snapshot: str, pinned: bool) -> None:
    tree.family.tree.pin(snapshot, pinned)
    service.records.pin(snapshot, pinned)


_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@rest.api_route("/sandboxes/{path:path}", methods=_METHODS)
@rest.api_route("/v2/{path:path}", methods=_METHODS)
@rest.api_route("/v3/{path:path}", methods=_METHODS)
@rest.api_route("/templates", methods=_METHODS)
@rest.api_route("/templates/{path:path}", methods=_METHODS)
@rest.api_route("/volumes", methods=_METHODS)
@rest.api_route("/volumes/{path:path}", methods=_METHODS)
@rest.api_route("/volumecontent/{path:path}", methods=_METHODS)
@rest.api_route("/secrets", methods=_METHODS)
@rest.api_route("/secrets/{path:path}", methods=_METHODS)
@rest.api_route("/teams/{path:path}", methods=_METHODS)
async def not_served(request: Request, principal: Reads) -> Response:
    raise Unsupported(f"{request.method} {request.url.path} of E2B is not supported here; see docs/e2b.md")
