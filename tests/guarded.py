"""A small application behind the daemon's guard, served by a real uvicorn on a thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import uvicorn
from fastapi import Depends, FastAPI, Request, WebSocket
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from statefork.errors import DiskFull, NotFound, WrongState
from statefork.server.guard.install import Guard, GuardSettings, install
from statefork.server.guard.limits import Limits, check_environments, large_body
from statefork.server.guard.listening import TlsFiles, bind_unix, uvicorn_config
from statefork.server.guard.principal import Principal, require

Reader = Annotated[Principal, Depends(require("read"))]
Runner = Annotated[Principal, Depends(require("exec"))]
OWNERS = {"e-foreign": "somebody", "e-listed": "somebody"}


class Command(BaseModel):
    command: str
    timeout: float | None = None


def make_app(guard: Guard) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/environments/{identifier}")
    def get(identifier: str, caller: Reader) -> dict[str, str]:
        owner = OWNERS.get(identifier)
        if owner is None or not caller.sees(owner, identifier):
            raise NotFound(f"there is no environment {identifier}")
        return {"id": identifier}

    @app.post("/v1/environments")
    def create(caller: Runner, count: int = 0) -> dict[str, str]:
        check_environments(caller, count)
        return {"id": "e-new"}

    @app.post("/v1/exec")
    def execute(request: Request, command: Command, caller: Runner) -> dict[str, Any]:
        guard.note(request, action="exec", environment="e1", command=guard.fingerprint(command.command))
        return {"length": len(command.command)}

    @app.put("/v1/upload", dependencies=[Depends(large_body)])
    async def upload(request: Request, caller: Runner) -> dict[str, int]:
        return {"bytes": sum([len(piece) async for piece in request.stream()])}

    @app.get("/v1/flood")
    async def flood(caller: Reader) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield bytes(64 * 1024)

        return StreamingResponse(pieces())

    @app.get("/v1/events")
    async def events(request: Request, caller: Reader) -> StreamingResponse:
        guard.note(request, action="watch", environment="e1")

        async def pieces() -> AsyncIterator[str]:
            yield "data: 1\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    @app.get("/v1/fail/{kind}")
    def fail(kind: str, caller: Reader) -> None:
        if kind == "state":
            raise WrongState("environment e1 is paused; resume it first", environment="e1")
        if kind == "disk":
            raise DiskFull("no space")
        raise RuntimeError("sft_0123456789ab_" + "S" * 43 + " is in this message")

    @app.websocket("/v1/talk")
    async def talk(socket: WebSocket, caller: Runner) -> None:
        guard.note(socket, action="terminal", environment="e1")
        await socket.accept()
        await socket.send_text(f"hello {caller.name}: {await socket.receive_text()}")
        await socket.close()

    install(app, guard)
    return app


@dataclass(frozen=True, slots=True)
class Served:
    guard: Guard
    directory: Path
    port: int
    base_url: str

    def token(self, *scopes: str, **more: Any) -> dict[str, str]:
        """The header that a new token makes."""
        return {"Authorization": f"Bearer {self.guard.tokens.create(scopes, **more)[1]}"}

    def get(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        return httpx.get(self.base_url + path, headers=headers, timeout=30, trust_env=False)

    def post(self, path: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        return httpx.post(self.base_url + path, headers=headers, timeout=30, trust_env=False, **more)

    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "audit.jsonl").read_text().splitlines()]


@contextmanager
def served(
    directory: Path,
    *,
    limits: Limits | None = None,
    socket: Path | None = None,
    tls: TlsFiles | None = None,
    **settings: Any,
) -> Iterator[Served]:
    chosen = GuardSettings(directory, unix_socket=socket is not None, limits=limits or Limits(), **settings)
    guard = Guard(chosen)
    sockets = [bind_unix(socket)] if socket else None
    server = uvicorn.Server(uvicorn_config(make_app(guard), guard.limits, tls, host="127.0.0.1", port=0))
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        port = 0 if socket else server.servers[0].sockets[0].getsockname()[1]
        yield Served(guard, directory, port, f"{'https' if tls else 'http'}://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join(30)
        guard.close()
        assert not thread.is_alive()
