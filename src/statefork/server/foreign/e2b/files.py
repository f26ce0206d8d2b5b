"""envd's `/files` (contents, in and out) and `/health`."""

from __future__ import annotations

import contextlib
import io
import posixpath
import tarfile
import tempfile
import time
import zlib
from typing import IO, Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

from statefork.environment import Environment
from statefork.errors import NotFound, UsageError
from statefork.server.foreign.e2b import rpc
from statefork.server.foreign.e2b.filesystem import give_to
from statefork.server.foreign.e2b.people import expanded, user_of
from statefork.server.guard.limits import large_body
from statefork.server.guard.problems import Refused
from statefork.server.routes.asking import Execs, Reads, Services, answer, guard_of

__all__ = ["router"]

router = APIRouter(include_in_schema=False)

_SPOOL_BYTES = 8 << 20


@router.get("/health")
async def health(request: Request, service: Services, principal: Reads) -> Response:
    rpc.sandbox_held(request, service, principal)
    return Response(status_code=204)


@router.get("/files")
async def read(request: Request, service: Services, principal: Reads, path: str = "") -> Response:
    held = rpc.sandbox_held(request, service, principal)
    user = user_of(request)
    guard_of(request).note(request, action="read_file", environment=held.id)

    def call(live: Environment) -> bytes:
        return live.read_file(expanded(live, path, user), limit_bytes=service.settings.file_bytes)

    async with service.use(held) as live:
        try:
            data = await service.do(held, "read_file", lambda: call(live), gate=service.commands)
        except NotFound as error:
            raise NotFound(f"path '{path}' does not exist: {error.message}") from None
    name = posixpath.basename(path).encode("ascii", "replace").decode().replace('"', "_").replace("\\", "_")
    headers = {"Content-Disposition": f'inline; filename="{name}"'}
    return Response(data, headers=headers, media_type="application/octet-stream")


@router.post("/files", dependencies=[Depends(large_body)])
async def write(request: Request, service: Services, principal: Execs, path: str = "") -> Response:
    held = rpc.sandbox_held(request, service, principal)
    user, guard = user_of(request), guard_of(request)
    async with contextlib.AsyncExitStack() as stack:
        files: list[tuple[str, IO[bytes]]] = []
        if request.headers.get("content-type", "").startswith("multipart/form-data"):
            form = await stack.enter_async_context(request.form(max_files=10_000))
            for _, part in form.multi_items():
                if isinstance(part, UploadFile):
                    files.append((path or part.filename or "", part.file))
        else:
            spool = await _spooled(request, service.guard.limits.large_body_bytes)
            stack.callback(spool.close)
            files.append((path, spool))
        if not files or not all(name for name, _ in files):
            raise UsageError("name the file: ?path=, or a multipart part with a file name")
        sizes = [file.seek(0, io.SEEK_END) for _, file in files]
        guard.note(request, action="write_file", environment=held.id, bytes=sum(sizes))

        def call(live: Environment) -> list[dict[str, Any]]:
            return [_put(live, expanded(live, name, user), file, user) for name, file in files]

        async with service.use(held) as live:
            written = await service.do(held, "write_file", lambda: call(live), gate=service.commands)
    return answer(written)


def _put(live: Environment, target: str, file: IO[bytes], user: str | None) -> dict[str, Any]:
    """On a thread. Large ones go as an archive of one, so that they are never whole in memory."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if size <= _SPOOL_BYTES:
        live.write_file(target, file.read())
    else:
        with contextlib.suppress(NotFound):
            if live.stat_file(target).kind == "directory":  # tar would put another in its place, if it is empty
                raise UsageError(f"write {target}: it is a directory")
        with tempfile.TemporaryFile() as packed:
            with tarfile.open(fileobj=packed, mode="w") as archive:
                entry = tarfile.TarInfo(posixpath.basename(target))
                entry.size, entry.mode, entry.mtime = size, 0o644, int(time.time())
                archive.addfile(entry, file)
            packed.seek(0)
            live.unpack_archive(packed, posixpath.dirname(target))
    give_to(live, user, target)
    return {"name": posixpath.basename(target), "type": "file", "path": target}


async def _spooled(request: Request, most: int) -> IO[bytes]:
    """The body, without its gzip coding; that is counted unpacked, so that a small one cannot become a huge one."""
    spool: IO[bytes] = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115
    coding = request.headers.get("content-encoding", "identity")
    if coding not in ("identity", "gzip"):
        raise UsageError(f"content-encoding {coding} is not known here")
    unpack = zlib.decompressobj(16 + zlib.MAX_WBITS) if coding == "gzip" else None
    size = 0
    try:
        async for piece in request.stream():
            rest = piece
            while rest:
                if unpack is None:
                    data, rest = rest, b""
                else:
                    if unpack.eof:  # several pieces of gzip in a row are one
                        unpack = zlib.decompressobj(16 + zlib.MAX_WBITS)
                    data = unpack.decompress(rest, 1 << 20)
                    rest = unpack.unused_data if unpack.eof else unpack.unconsumed_tail
                size += len(data)
                if size > most:
                    raise Refused(413, "too_large", f"the file is larger than {most} bytes")
                if size > _SPOOL_BYTES:
                    await run_in_threadpool(spool.write, data)
                else:
                    spool.write(data)
        if unpack is not None and not unpack.eof:
            raise zlib.error("it ends too soon")
    except zlib.error:
        spool.close()
        raise UsageError("the body is not gzip") from None
    except BaseException:
        spool.close()
        raise
    return spool
