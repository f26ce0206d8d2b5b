"""Snapshots: taken, listed, drawn as a tree, looked into, renamed, pinned, deleted; and going back to one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from statefork.errors import NotFound, UsageError, WaypointError
from statefork.server import schemas
from statefork.server.guard.principal import Principal
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
    encoded,
    guard_of,
    once,
    page,
)
from statefork.server.routes.shapes import snapshot_document, tree_document
from statefork.server.service.answers import Reply
from statefork.server.service.held import Held
from statefork.server.service.service import Service, Tree
from statefork.tree import Node, check_name

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["snapshots"], responses=PROBLEMS)

References = Annotated[
    str, Path(description="A snapshot's id, its name, or a unique prefix of the id.", max_length=128)
]


def _tree(service: Service, held: Held) -> Tree:
    held.live  # noqa: B018  says that it is lost, and why
    tree = service.trees.get(held.row.tree)
    if tree is None:
        raise NotFound(f"environment {held.id} has just been deleted")
    return tree


def _document(key: str, tree: Tree, node: Node) -> dict[str, object]:
    return snapshot_document(node.snapshot, key, tree.family.tree.is_pinned(node.snapshot.id))


@router.post(
    "/environments/{environment}/snapshots",
    operation_id="createSnapshot",
    status_code=201,
    response_model=schemas.Snapshot,
    summary="Store the present state; the environment goes on",
)
async def create_snapshot(
    request: Request,
    environment: Ids,
    service: Services,
    principal: Execs,
    body: schemas.CreateSnapshot | None = None,
    key: Key = None,
) -> Response:
    held = service.find(environment, principal)
    asked = body or schemas.CreateSnapshot.model_validate({})
    guard = guard_of(request)
    guard.note(request, action="snapshot", environment=held.id, name=asked.name, mode=asked.mode)

    async def do(_: str) -> Reply:
        async with service.use(held) as live:
            taken = await service.do(held, "snapshot", lambda: live.snapshot(asked.name, mode=asked.mode))
        guard.note(request, action="snapshot", snapshot=taken)
        tree = _tree(service, held)
        return encoded(_document(held.row.tree, tree, tree.family.tree.find(taken)), 201)

    return await once(request, service, principal, key, "", do)


@router.get(
    "/environments/{environment}/snapshots",
    operation_id="listSnapshots",
    response_model=schemas.SnapshotPage,
    summary="All of its tree, oldest first: forks share it",
)
async def list_snapshots(
    environment: Ids, service: Services, principal: Reads, limit: Limit = 100, cursor: Cursor = None
) -> Response:
    held = service.find(environment, principal)
    tree = service.trees.get(held.row.tree)
    return _listed({held.row.tree: tree} if tree is not None else {}, limit, cursor)


@router.get(
    "/environments/{environment}/tree",
    operation_id="getTree",
    response_model=schemas.Tree,
    summary="Who came from whom",
)
async def get_tree(environment: Ids, service: Services, principal: Reads) -> Response:
    held = service.find(environment, principal)
    return answer(tree_document(held.row.tree, _tree(service, held)))


@router.get(
    "/environments/{environment}/snapshots/{snapshot}",
    operation_id="getSnapshot",
    response_model=schemas.SnapshotDetail,
)
async def get_snapshot(environment: Ids, snapshot: References, service: Services, principal: Reads) -> Response:
    held = service.find(environment, principal)
    tree = _tree(service, held)
    return await _detail(service, held.row.tree, tree, tree.family.tree.find(snapshot))


@router.patch(
    "/environments/{environment}/snapshots/{snapshot}",
    operation_id="patchSnapshot",
    response_model=schemas.Snapshot,
    summary="Rename it, pin it",
)
async def patch_snapshot(
    request: Request,
    environment: Ids,
    snapshot: References,
    body: schemas.PatchSnapshot,
    service: Services,
    principal: Execs,
) -> Response:
    held = service.find(environment, principal)
    tree = _tree(service, held)
    return await _patch(request, service, held.row.tree, tree, tree.family.tree.find(snapshot), body)


@router.delete(
    "/environments/{environment}/snapshots/{snapshot}",
    operation_id="deleteSnapshot",
    status_code=204,
    response_class=Response,
    summary="Free its storage; refused while it has children (unless `cascade`), carries a live environment, or is pinned",
)
async def delete_snapshot(
    request: Request,
    environment: Ids,
    snapshot: References,
    service: Services,
    principal: Execs,
    cascade: Annotated[bool, Query(description="Its descendants too.")] = False,
) -> Response:
    held = service.find(environment, principal)
    tree = _tree(service, held)
    return await _delete(request, service, held.row.tree, tree, tree.family.tree.find(snapshot), cascade)


@router.post(
    "/environments/{environment}/restore",
    operation_id="restore",
    response_model=schemas.Restored,
    summary="Go back, or sideways, to a snapshot; if that fails, what is live goes on",
)
async def restore(
    request: Request, environment: Ids, body: schemas.Restore, service: Services, principal: Execs, key: Key = None
) -> Response:
    held = service.find(environment, principal)
    guard_of(request).note(request, action="restore", environment=held.id, snapshot=body.snapshot)

    async def do(_: str) -> Reply:
        async with service.use(held, awake=False) as live:
            await service.usage.sample(held)
            done = await service.do(held, "restore", lambda: live.restore(body.snapshot))
            service.usage.restarted(held)
            held.row.paused_by = None
        return encoded(
            {
                "environment": done.environment,
                "snapshot": done.snapshot,
                "duration_ms": round(done.duration_ms, 3),
                "restored": list(done.restored),
                "shell_restarted": done.shell_restarted,
            }
        )

    return await once(request, service, principal, key, "", do)


@router.get(
    "/environments/{environment}/diff",
    operation_id="diff",
    response_model=schemas.Diff,
    summary="What changed from snapshot `a` to snapshot `b`, or to the present state without `b`",
)
async def diff(
    request: Request,
    environment: Ids,
    service: Services,
    principal: Reads,
    a: Annotated[str, Query(max_length=128)],
    b: Annotated[str | None, Query(max_length=128)] = None,
) -> Response:
    held = service.find(environment, principal)
    guard_of(request).note(request, action="diff", environment=held.id)
    async with service.use(held, awake=b is None) as live:
        found = await service.do(held, "diff", lambda: live.diff(a, b))
    names = ("added", "changed", "removed", "processes_added", "processes_removed")
    lists = {name: [_text(line) for line in getattr(found, name)] for name in names}
    return answer({"a": found.a, "b": found.b, **lists})


# -- without an environment: pinned snapshots outlive theirs ----------------------------------------------------------


@router.get(
    "/snapshots",
    operation_id="listAllSnapshots",
    response_model=schemas.SnapshotPage,
    summary="Of all trees, oldest first",
)
async def list_all_snapshots(
    service: Services, principal: Reads, limit: Limit = 100, cursor: Cursor = None
) -> Response:
    seen = service.trees_seen_by(principal)
    return _listed({key: tree for key, tree in service.trees.items() if tree in seen}, limit, cursor)


@router.get("/snapshots/{snapshot}", operation_id="findSnapshot", response_model=schemas.SnapshotDetail)
async def find_snapshot(snapshot: References, service: Services, principal: Reads) -> Response:
    key, tree, node = _found(service, snapshot, principal)
    return await _detail(service, key, tree, node)


@router.patch("/snapshots/{snapshot}", operation_id="patchAnySnapshot", response_model=schemas.Snapshot)
async def patch_any_snapshot(
    request: Request, snapshot: References, body: schemas.PatchSnapshot, service: Services, principal: Execs
) -> Response:
    return await _patch(request, service, *_found(service, snapshot, principal), body)


@router.delete("/snapshots/{snapshot}", operation_id="deleteAnySnapshot", status_code=204, response_class=Response)
async def delete_any_snapshot(
    request: Request, snapshot: References, service: Services, principal: Execs, cascade: bool = False
) -> Response:
    return await _delete(request, service, *_found(service, snapshot, principal), cascade)


# -- inside -----------------------------------------------------------------------------------------------------------


def _found(service: Service, reference: str, principal: Principal) -> tuple[str, Tree, Node]:
    tree, node = service.find_snapshot(reference, principal)
    return tree.key, tree, node


def _listed(trees: dict[str, Tree], limit: int, cursor: str | None) -> Response:
    found = [
        (f"{snapshot.created_at.isoformat()} {snapshot.id}", snapshot, key, tree)
        for key, tree in trees.items()
        for snapshot in tree.family.tree.snapshots()
    ]
    found.sort(key=lambda one: one[0])
    items, more = page(found, limit, cursor, lambda one: one[0])
    documents = [snapshot_document(s, key, tree.family.tree.is_pinned(s.id)) for _, s, key, tree in items]
    return answer({"items": documents, "next_cursor": more})


async def _detail(service: Service, key: str, tree: Tree, node: Node) -> Response:
    manifest = await service.commands.run(lambda: tree.family.driver.describe(node.captured))
    return answer({**_document(key, tree, node), "manifest": dict(manifest)})


async def _patch(
    request: Request, service: Service, key: str, tree: Tree, node: Node, body: schemas.PatchSnapshot
) -> Response:
    snapshot, given = node.snapshot.id, body.model_fields_set
    guard_of(request).note(request, action="patch_snapshot", snapshot=snapshot, members=sorted(given))
    if "pinned" in given and body.pinned is None:
        raise UsageError("pinned is true or false")
    if body.name is not None:
        check_name(body.name)

    def change() -> None:
        if "name" in given:
            service.records.rename_node(tree.family.tree.rename(snapshot, body.name).snapshot)
        if body.pinned is not None:
            tree.family.tree.pin(snapshot, body.pinned)
            service.records.pin(snapshot, body.pinned)

    await service.commands.run(change)
    document = _document(key, tree, tree.family.tree.find(snapshot))
    await service.making.close_tree(key)
    return answer(document)


async def _delete(request: Request, service: Service, key: str, tree: Tree, node: Node, cascade: bool) -> Response:
    snapshot = node.snapshot.id
    guard_of(request).note(request, action="delete_snapshot", snapshot=snapshot, cascade=cascade)

    def remove() -> None:
        for doomed in tree.family.tree.branch(snapshot, cascade):
            tree.family.discard(doomed)

    try:
        await service.work.run(remove)
    except OSError as error:
        raise WaypointError(f"removing snapshot {snapshot}: {error}") from error
    await service.making.close_tree(key)
    return Response(status_code=204)


def _text(line: str) -> str:
    return line.encode(errors="surrogateescape").decode(errors="replace")
