"""Directories watched with the kernel's own events, by an attendant inside: as a stream, or asked for from time to time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response

from statefork.errors import NotFound, UsageError
from statefork.server.foreign.attendant import Attended, Listener, Wish, installed, new_name
from statefork.server.foreign.e2b import rpc
from statefork.server.foreign.e2b.people import expanded, user_of
from statefork.server.routes.asking import Reads, Services, guard_of
from statefork.server.service.held import Held
from statefork.server.service.running import Program
from statefork.server.service.service import Service

__all__ = ["Watchers", "router"]

router = APIRouter(prefix="/filesystem.Filesystem", include_in_schema=False)

_TYPES = {
    "c": "EVENT_TYPE_CREATE",
    "w": "EVENT_TYPE_WRITE",
    "d": "EVENT_TYPE_REMOVE",
    "m": "EVENT_TYPE_RENAME",
    "a": "EVENT_TYPE_CHMOD",
}
_MOST_EVENTS = 10_000
_MOST_WATCHERS = 256


@dataclass(slots=True)
class _Watcher:
    process: Attended
    sandbox: str
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_EVENTS))


class Watchers:
    """Those that are asked from time to time."""

    def __init__(self) -> None:
        self._known: dict[str, _Watcher] = {}

    def add(self, process: Attended, listener: Listener) -> str:
        for key in [key for key, one in self._known.items() if not one.process.alive]:
            del self._known[key]
        watcher = _Watcher(process, process.held.id)
        self._known[process.name] = watcher
        asyncio.ensure_future(self._collect(watcher, listener))  # noqa: RUF006  it ends with the watcher
        return process.name

    def check_room(self) -> None:
        if sum(one.process.alive for one in self._known.values()) >= _MOST_WATCHERS:
            raise UsageError(f"there are {_MOST_WATCHERS} watchers already; stop one")

    def take(self, sandbox: str, key: str) -> list[dict[str, Any]]:
        watcher = self._find(sandbox, key)
        events = list(watcher.events)
        watcher.events.clear()
        return events

    async def remove(self, sandbox: str, key: str) -> None:
        await _stop(self._find(sandbox, key).process)
        del self._known[key]

    def _find(self, sandbox: str, key: str) -> _Watcher:
        watcher = self._known.get(key)
        if watcher is None or watcher.sandbox != sandbox:
            raise NotFound(f"watcher with id {key} not found")
        return watcher

    async def _collect(self, watcher: _Watcher, listener: Listener) -> None:
        async for kind, data in listener:
            if kind == "v":
                watcher.events.append(_event(data))


@router.post("/WatchDir")
async def watch_directory(request: Request, service: Services, principal: Reads) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    process, listener = await _watching(request, service, held, await rpc.only_message(request))
    return rpc.stream(_events(process, listener, rpc.keepalive_of(request)), request)


@router.post("/CreateWatcher")
async def create_watcher(request: Request, service: Services, principal: Reads) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    watchers: Watchers = request.app.state.e2b_watchers
    watchers.check_room()
    process, listener = await _watching(request, service, held, await rpc.unary(request))
    return rpc.reply({"watcherId": watchers.add(process, listener)})


@router.post("/GetWatcherEvents")
async def get_events(request: Request, service: Services, principal: Reads) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    key = str((await rpc.unary(request)).get("watcherId", ""))
    return rpc.reply({"events": request.app.state.e2b_watchers.take(held.id, key)})


@router.post("/RemoveWatcher")
async def remove_watcher(request: Request, service: Services, principal: Reads) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    await request.app.state.e2b_watchers.remove(held.id, str((await rpc.unary(request)).get("watcherId", "")))
    return rpc.reply({})


async def _watching(
    request: Request, service: Service, held: Held, message: dict[str, Any]
) -> tuple[Attended, Listener]:
    """Begun: what happens from now on is told."""
    path, user = message.get("path"), user_of(request)
    if not isinstance(path, str) or not path or "\0" in path:
        raise UsageError("path is a directory of the sandbox")
    guard_of(request).note(request, action="watch", environment=held.id)
    async with service.use(held) as live:
        attend, root = await service.commands.run(lambda: (installed(live), expanded(live, path, user)))
    name, listener = new_name(), Listener()
    argv = (attend, name, "-w", root, *(["-r"] if message.get("recursive") else []))
    command = await service.running.launch(
        held, Program(argv=argv, feed=True, followed=True, output_bytes=4096), detached=False
    )
    command.dozes = True
    process = Attended(held, command, name, Wish(argv), listener)
    try:
        await process.began()
    except UsageError as error:
        if error.message.startswith("No such file"):
            raise NotFound(f"path not found: {root}") from None
        raise UsageError(f"{root}: {error.message}") from None
    return process, listener


async def _events(process: Attended, listener: Listener, every: float) -> AsyncIterator[dict[str, Any]]:
    try:
        yield {"start": {}}
        while True:
            try:
                frame = await listener.next(every)
            except TimeoutError:
                yield {"keepalive": {}}
                continue
            if frame is None:
                return
            if frame[0] == "v":
                yield {"filesystem": _event(frame[1])}
    finally:
        process.unlisten(listener)
        await _stop(process)


async def _stop(process: Attended) -> None:
    """Its input ends, and so does it."""
    if process.command.input is not None:
        process.command.input.end()


def _event(data: bytes) -> dict[str, Any]:
    text = data.decode(errors="replace")
    return {"name": text[1:], "type": _TYPES.get(text[:1], "EVENT_TYPE_UNSPECIFIED")}
