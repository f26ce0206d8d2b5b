"""Files of an environment: read, written, listed, moved, removed, as archives, and watched. Paths are absolute inside it."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator
from typing import IO, Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from statefork.environment import Environment
from statefork.errors import WaypointError
from statefork.files import absolute
from statefork.server import schemas
from statefork.server.guard.limits import large_body
from statefork.server.routes.asking import PROBLEMS, Execs, Ids, Reads, Services, answer, guard_of
from statefork.server.routes.shapes import file_document, problem_document
from statefork.server.service.archives import check_archive
from statefork.server.service.held import Held
from statefork.server.service.service import Service

__all__ = ["router"]

router = APIRouter(prefix="/v1/environments/{environment}/files", tags=["files"], responses=PROBLEMS)

_SPOOL_BYTES = 8 << 20
_BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {}}, "description": "Its bytes."}
}
_TAR: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-tar": {}}, "description": "A tar stream."}}


async def plain_path(
    path: Annotated[str, Query(description="Absolute, inside the environment.", max_length=4096)],
) -> str:
    return absolute(path)


Paths = Annotated[str, Depends(plain_path)]


@router.get("", operation_id="listFiles", response_model=schemas.FileList, summary="What is directly in a directory")
async def list_files(environment: Ids, service: Services, principal: Reads, path: Paths) -> Response:
    held = service.find(environment, principal)
    async with service.use(held) as live:
        found = await service.do(held, "list_files", lambda: live.list_files(path), gate=service.commands)
    return answer({"path": path, "items": [file_document(info) for info in found]})


@router.delete("", operation_id="deleteFile", status_code=204, response_class=Response)
async def delete_file(
    request: Request, environment: Ids, service: Services, principal: Execs, path: Paths, recursive: bool = False
) -> Response:
    held = service.find(environment, principal)
    guard_of(request).note(request, action="remove_file", environment=held.id, recursive=recursive)
    async with service.use(held) as live:
        call = lambda: live.remove_file(path, recursive=recursive)  # noqa: E731
        await service.do(held, "remove_file", call, gate=service.commands)
    return Response(status_code=204)


@router.get("/stat", operation_id="statFile", response_model=schemas.FileInfo)
async def stat_file(
    environment: Ids, service: Services, principal: Reads, path: Paths, follow: Annotated[bool, Query()] = True
) -> Response:
    held = service.find(environment, principal)
    async with service.use(held) as live:
        call = lambda: live.stat_file(path, follow=follow)  # noqa: E731
        found = await service.do(held, "stat_file", call, gate=service.commands)
    return answer(file_document(found))


@router.get("/content", operation_id="readFile", response_class=Response, responses=_BYTES)
async def read_file(request: Request, environment: Ids, service: Services, principal: Reads, path: Paths) -> Response:
    held = service.find(environment, principal)
    guard_of(request).note(request, action="read_file", environment=held.id)
    limit = service.settings.file_bytes
    async with service.use(held) as live:
        call = lambda: live.read_file(path, limit_bytes=limit)  # noqa: E731
        data = await service.do(held, "read_file", call, gate=service.commands)
    return Response(data, media_type="application/octet-stream")


@router.put(
    "/content",
    operation_id="writeFile",
    status_code=204,
    response_class=Response,
    summary="Make or overwrite a file, and the directories above it; the body is its content",
    openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {}}}},
)
async def write_file(
    request: Request,
    environment: Ids,
    service: Services,
    principal: Execs,
    path: Paths,
    mode: Annotated[int | None, Query(ge=0, le=0o7777, description="Permission bits, as a number.")] = None,
) -> Response:
    held = service.find(environment, principal)
    data = await request.body()
    guard_of(request).note(request, action="write_file", environment=held.id, bytes=len(data))
    async with service.use(held) as live:
        await service.do(held, "write_file", lambda: live.write_file(path, data, mode), gate=service.commands)
    return Response(status_code=204)


@router.post("/directory", operation_id="makeDirectory", status_code=204, response_class=Response)
async def make_directory(
    request: Request, environment: Ids, body: schemas.MakeDirectory, service: Services, principal: Execs
) -> Response:
    held = service.find(environment, principal)
    guard_of(request).note(request, action="make_directory", environment=held.id)
    async with service.use(held) as live:
        await service.do(held, "make_directory", lambda: live.make_directory(body.path), gate=service.commands)
    return Response(status_code=204)


@router.post("/move", operation_id="moveFile", status_code=204, response_class=Response)
async def move_file(
    request: Request, environment: Ids, body: schemas.MoveFile, service: Services, principal: Execs
) -> Response:
    held = service.find(environment, principal)
    guard_of(request).note(request, action="move_file", environment=held.id)
    async with service.use(held) as live:
        call = lambda: live.move_file(body.source, body.target)  # noqa: E731
        await service.do(held, "move_file", call, gate=service.commands)
    return Response(status_code=204)


# -- archives ---------------------------------------------------------------------------------------------------------


@router.put(
    "/archive",
    operation_id="uploadArchive",
    status_code=204,
    response_class=Response,
    dependencies=[Depends(large_body)],
    summary="Unpack a tar archive (not compressed) into a directory, which is made",
    openapi_extra={"requestBody": {"required": True, "content": {"application/x-tar": {}}}},
)
async def upload_archive(
    request: Request, environment: Ids, service: Services, principal: Execs, path: Paths
) -> Response:
    held = service.find(environment, principal)
    spool: IO[bytes] = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115
    with spool:
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > _SPOOL_BYTES:
                await run_in_threadpool(spool.write, piece)
            else:
                spool.write(piece)
        guard_of(request).note(request, action="upload", environment=held.id, bytes=size)
        async with service.use(held) as live:
            await service.do(held, "upload", lambda: _unpack(live, spool, path), gate=service.commands)
    return Response(status_code=204)


def _unpack(live: Environment, spool: IO[bytes], path: str) -> None:
    spool.seek(0)
    check_archive(spool)
    spool.seek(0)
    live.unpack_archive(spool, path)


@router.get(
    "/archive",
    operation_id="downloadArchive",
    response_class=Response,
    responses=_TAR,
    summary="A directory's contents, or one file under its name, as a tar stream; links in a directory stay links",
)
async def download_archive(
    request: Request, environment: Ids, service: Services, principal: Reads, path: Paths
) -> Response:
    held = service.find(environment, principal)
    guard_of(request).note(request, action="download", environment=held.id)
    pieces = _Pieces()
    packing = asyncio.ensure_future(_pack(service, held, path, pieces))
    try:
        first = await pieces.next()
        if first is None:
            await packing  # nothing came: it says why
    except BaseException:
        packing.cancel()
        raise
    return StreamingResponse(_tar(first, pieces, packing), media_type="application/x-tar")


async def _pack(service: Service, held: Held, path: str, pieces: _Pieces) -> None:
    try:
        async with service.use(held) as live:
            call = lambda: live.pack_archive(path, pieces.put)  # noqa: E731
            await service.do(held, "download", call, gate=service.commands)
    finally:
        await pieces.end()


async def _tar(first: bytes | None, pieces: _Pieces, packing: asyncio.Future[None]) -> AsyncIterator[bytes]:
    try:
        piece = first
        while piece is not None:
            yield piece
            piece = await pieces.next()
        await packing  # an error here cuts the answer short, and its length does not fit: the caller notices
    finally:
        pieces.abandon()


class _Pieces:
    """From a thread to the loop, a few at a time: whoever reads slowly slows the guest's `tar` down."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(16)
        self._abandoned = False

    def put(self, data: bytes) -> None:
        """On the thread."""
        if not self._abandoned:
            asyncio.run_coroutine_threadsafe(self._queue.put(data), self._loop).result()

    async def next(self) -> bytes | None:
        return await self._queue.get()

    async def end(self) -> None:
        await self._queue.put(None)

    def abandon(self) -> None:
        self._abandoned = True
        while not self._queue.empty():
            self._queue.get_nowait()


# -- watching ---------------------------------------------------------------------------------------------------------


@router.get(
    "/watch",
    operation_id="watchFiles",
    response_class=Response,
    responses={
        200: {
            "description": "Events `added`, `changed`, `removed` {path}, and `watching` once at the beginning. The directory is looked at "
            "every `interval` seconds: what comes and goes between two looks is not seen.",
            "content": {"text/event-stream": {}},
        }
    },
    summary="What changes in a directory, as it happens",
)
async def watch_files(
    request: Request,
    environment: Ids,
    service: Services,
    principal: Reads,
    path: Paths,
    recursive: bool = False,
    interval: Annotated[float, Query(ge=0.1, le=60, allow_inf_nan=False)] = 0.5,
) -> Response:
    held = service.find(environment, principal)
    guard_of(request).note(request, action="watch", environment=held.id)
    first = await _scan(service, held, path, recursive)
    return StreamingResponse(
        _changes(service, held, path, recursive, interval, first, request.state.request_id),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _scan(service: Service, held: Held, path: str, recursive: bool) -> dict[str, str]:
    async with service.use(held) as live:
        return await service.commands.run(lambda: live.scan_files(path, recursive=recursive))


async def _changes(
    service: Service, held: Held, path: str, recursive: bool, interval: float, before: dict[str, str], request_id: str
) -> AsyncIterator[bytes]:
    yield _event("watching", {"path": path, "entries": len(before)})
    quiet = 0.0
    while not held.gone:
        await asyncio.sleep(interval)
        try:
            now = await _scan(service, held, path, recursive)
        except WaypointError as error:
            yield _event("problem", problem_document(error, request_id))
            return
        found = [("removed", name) for name in before if name not in now]
        found += [("changed" if name in before else "added", name) for name in now if before.get(name) != now[name]]
        before = now
        for kind, name in found:
            text = os.fsencode(name).decode(errors="replace")
            yield _event(kind, {"path": f"{path.rstrip('/')}/{text}"})
        quiet = 0.0 if found else quiet + interval
        if quiet > 15:
            quiet = 0.0
            yield b": still here\n\n"


def _event(name: str, document: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(document)}\n\n".encode()
