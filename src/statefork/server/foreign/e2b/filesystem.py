"""envd's `filesystem.Filesystem`: looked at, made, moved, removed. Watching is in watching.py, contents are in files.py."""

from __future__ import annotations

import posixpath
import stat
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from statefork.environment import Environment
from statefork.errors import Exists, NotFound, UsageError
from statefork.server.foreign.attendant import installed, new_name
from statefork.server.foreign.e2b import rpc
from statefork.server.foreign.e2b.people import expanded, user_of
from statefork.server.foreign.frames import Frames
from statefork.server.routes.asking import Execs, Reads, Services, guard_of
from statefork.server.service.held import Held
from statefork.server.service.service import Service

__all__ = ["entries_of", "give_to", "router"]

router = APIRouter(prefix="/filesystem.Filesystem", include_in_schema=False)

_KINDS = {"f": "FILE_TYPE_FILE", "d": "FILE_TYPE_DIRECTORY", "l": "FILE_TYPE_SYMLINK"}
_MOST_DEPTH = 64


@router.post("/Stat")
async def stat_path(request: Request, service: Services, principal: Reads) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    path = _text(await rpc.unary(request), "path")
    user = user_of(request)
    found = await _inside(service, held, "stat_file", lambda live: entries_of(live, expanded(live, path, user), 0))
    return rpc.reply({"entry": found[0]})


@router.post("/ListDir")
async def list_directory(request: Request, service: Services, principal: Reads) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    message = await rpc.unary(request)
    path, user = _text(message, "path"), user_of(request)
    depth = message.get("depth") or 1
    if not isinstance(depth, int) or depth < 1:
        raise UsageError("depth is at least 1")

    def call(live: Environment) -> list[dict[str, Any]]:
        return entries_of(live, expanded(live, path, user), min(depth, _MOST_DEPTH))

    return rpc.reply({"entries": await _inside(service, held, "list_files", call)})


@router.post("/MakeDir")
async def make_directory(request: Request, service: Services, principal: Execs) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    path, user = _text(await rpc.unary(request), "path"), user_of(request)
    guard_of(request).note(request, action="make_directory", environment=held.id)

    def call(live: Environment) -> dict[str, Any]:
        target = expanded(live, path, user)
        try:
            kind = live.stat_file(target).kind
        except NotFound:
            kind = None
        if kind == "directory":
            raise Exists(f"directory already exists: {target}")
        if kind is not None:
            raise UsageError(f"path already exists but it is not a directory: {target}")
        live.make_directory(target)
        give_to(live, user, target)
        return entries_of(live, target, 0)[0]

    return rpc.reply({"entry": await _inside(service, held, "make_directory", call)})


@router.post("/Move")
async def move(request: Request, service: Services, principal: Execs) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    message = await rpc.unary(request)
    source, target, user = _text(message, "source"), _text(message, "destination"), user_of(request)
    guard_of(request).note(request, action="move_file", environment=held.id)

    def call(live: Environment) -> dict[str, Any]:
        there = expanded(live, target, user)
        parent = posixpath.dirname(there)
        if parent != "/":
            live.make_directory(parent)
        live.move_file(expanded(live, source, user), there)
        return entries_of(live, there, 0)[0]

    return rpc.reply({"entry": await _inside(service, held, "move_file", call)})


@router.post("/Remove")
async def remove(request: Request, service: Services, principal: Execs) -> Response:
    """With all that is in it; what is not there is gone already."""
    held = rpc.sandbox_held(request, service, principal)
    path, user = _text(await rpc.unary(request), "path"), user_of(request)
    guard_of(request).note(request, action="remove_file", environment=held.id)

    def call(live: Environment) -> None:
        try:
            live.remove_file(expanded(live, path, user), recursive=True)
        except NotFound:
            return

    await _inside(service, held, "remove_file", call)
    return rpc.reply({})


async def _inside(service: Service, held: Held, verb: str, call: Any) -> Any:
    async with service.use(held) as live:
        return await service.do(held, verb, lambda: call(live), gate=service.commands)


def _text(message: dict[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or not value or "\0" in value or len(value) > 4096:
        raise UsageError(f"{name} is a path of 1 to 4096 characters")
    return value


def entries_of(live: Environment, path: str, depth: int) -> list[dict[str, Any]]:
    """On a thread: the thing itself (depth 0), or what is in it. Raises: NotFound, UsageError."""
    for again in (False, True):
        argv = [installed(live, again=again), new_name(), "-l", path, "-D", str(depth)]
        done = live.run(argv, timeout=60, output_limit_bytes=64 << 20)
        if done.exit_code not in (126, 127):
            break
    found = []
    for kind, payload in Frames().feed(done.stdout_bytes):
        if kind == "f":
            raise _failure(payload.decode(errors="replace"), path)
        if kind == "n":
            found.append(_entry(payload.decode(errors="surrogateescape").split("\0")))
    return found


def _failure(text: str, path: str) -> NotFound | UsageError:
    number, _, words = text.partition(" ")
    return NotFound(f"file not found: {path}") if number == "2" else UsageError(f"{path}: {words}")


def _entry(fields: list[str]) -> dict[str, Any]:
    kind, mode, size, modified, owner, group, target, behind, path = fields[:9]
    seconds, rest = divmod(int(modified), 1_000_000_000)
    moment = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    entry = {
        "name": posixpath.basename(path) or "/",
        "type": _KINDS.get(kind, "FILE_TYPE_UNSPECIFIED"),
        "path": path,
        "size": size,
        "mode": int(mode),
        "permissions": stat.filemode(int(mode))[1:],
        "owner": owner,
        "group": group,
        "modifiedTime": f"{moment}.{rest:09d}Z",
    }
    if kind == "l":
        entry |= {"type": _KINDS.get(behind, "FILE_TYPE_SYMLINK"), "symlinkTarget": target, "isSymlink": True}
    return {name: _printable(value) if isinstance(value, str) else value for name, value in entry.items()}


def _printable(text: str) -> str:
    return text.encode(errors="surrogateescape").decode(errors="replace")


def give_to(live: Environment, user: str | None, *paths: str) -> None:
    """On a thread: what was made for a user is theirs."""
    if user is not None and user != "root":
        live.run(["chown", "-h", f"{user}:", *paths], timeout=30)
