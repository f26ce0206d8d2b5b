"""Warm pools: templates of which some environments are always ready."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from statefork.registry import find_method
from statefork.server import schemas
from statefork.server.routes.asking import PROBLEMS, Admins, Reads, Services, answer, guard_of
from statefork.server.routes.shapes import pool_document
from statefork.server.service.records import PoolRow

__all__ = ["router"]

router = APIRouter(prefix="/v1/pools", tags=["pools"], responses=PROBLEMS)
Names = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


@router.get("", operation_id="listPools", response_model=schemas.PoolList)
async def list_pools(service: Services, principal: Reads) -> Response:
    return answer({"items": [pool_document(pool) for pool in service.pools.list()]})


@router.get("/{pool}", operation_id="getPool", response_model=schemas.Pool)
async def get_pool(pool: Names, service: Services, principal: Reads) -> Response:
    return answer(pool_document(service.pools.find(pool)))


@router.put(
    "/{pool}",
    operation_id="putPool",
    response_model=schemas.Pool,
    summary="Keep so many environments ready; one who creates with exactly this method and these arguments gets one at once",
)
async def put_pool(
    request: Request, pool: Names, body: schemas.PutPool, service: Services, principal: Admins
) -> Response:
    guard_of(request).note(request, action="put_pool", pool=pool, method=body.method, size=body.size)
    await service.commands.run(lambda: find_method(body.method))
    made = await service.pools.put(PoolRow(pool, body.method, body.arguments, body.size))
    return answer(pool_document(made))


@router.delete("/{pool}", operation_id="deletePool", status_code=204, response_class=Response)
async def delete_pool(request: Request, pool: Names, service: Services, principal: Admins) -> Response:
    guard_of(request).note(request, action="delete_pool", pool=pool)
    await service.pools.remove(pool)
    return Response(status_code=204)
