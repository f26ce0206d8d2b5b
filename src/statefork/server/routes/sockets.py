"""WebSockets: commands with their input, and terminals.

A binary message is one byte that says which stream, and its bytes: 0 stdin (from the caller), 1 stdout, 2 stderr (to it). A
text message is a JSON document with a `type`. docs/api.md has the whole protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable
from typing import Any

from fastapi import APIRouter, WebSocket
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.websockets import WebSocketDisconnect, WebSocketState

from statefork.errors import UsageError, WaypointError
from statefork.server.guard.problems import Refused, problem_response
from statefork.server.routes.asking import Execs, Ids, Services, guard_of
from statefork.server.routes.commands import Commands, ending, send_signal, signal_number
from statefork.server.schemas import Seconds
from statefork.server.service.command import Command
from statefork.server.service.held import Held
from statefork.server.service.running import Program
from statefork.server.service.service import Service

__all__ = ["router"]

router = APIRouter(prefix="/v1")


class Start(BaseModel):
    """The first message of a caller who starts a command."""

    model_config = ConfigDict(extra="forbid")

    type: str = "start"
    command: str | None = None
    argv: list[str] | None = None
    cwd: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    timeout: Seconds | None = None
    stdin: bool = True
    """False: it reads from /dev/null."""
    rows: int | None = Field(None, ge=1, le=10000)
    columns: int | None = Field(None, ge=1, le=10000)


@router.websocket("/environments/{environment}/stream")
async def stream_command(socket: WebSocket, environment: Ids, service: Services, principal: Execs) -> None:
    """Start a command and stay with it."""
    held = service.find(environment, principal)
    await socket.accept()
    async with _telling(socket):
        start = _start(await _text(socket))
        guard = guard_of(socket)
        said = start.command if start.command is not None else "\0".join(start.argv or ())
        guard.note(socket, action="exec", environment=held.id, command=guard.fingerprint(said))
        program = Program(
            command=start.command,
            argv=tuple(start.argv or ()),
            cwd=start.cwd,
            env=start.env,
            timeout=start.timeout,
            feed=start.stdin,
            followed=True,
            output_bytes=service.settings.output_bytes,
        )
        if start.rows and start.columns:
            await _resize(service, held, start.rows, start.columns)
        command = await service.running.launch(held, program, detached=True)
        await _attend(socket, service, held, command, (0, 0))


@router.websocket("/environments/{environment}/commands/{command}/stream")
async def attach_command(
    socket: WebSocket,
    environment: Ids,
    command: Commands,
    service: Services,
    principal: Execs,
    stdout_offset: int = 0,
    stderr_offset: int = 0,
) -> None:
    """Come back to a command that runs."""
    held = service.find(environment, principal)
    found = service.running.find(held, command)
    await socket.accept()
    guard_of(socket).note(socket, action="follow", environment=held.id, command=found.id)
    async with _telling(socket):
        await _attend(socket, service, held, found, (stdout_offset, stderr_offset))


@router.websocket("/environments/{environment}/terminal")
async def open_terminal(
    socket: WebSocket, environment: Ids, service: Services, principal: Execs, rows: int = 24, columns: int = 80
) -> None:
    """A terminal: binary messages are keys and screen, as they are; text messages resize it."""
    held = service.find(environment, principal)
    if not (0 < rows <= 10000 and 0 < columns <= 10000):
        raise UsageError("a terminal has 1 to 10000 rows and columns")
    await socket.accept()
    guard_of(socket).note(socket, action="terminal", environment=held.id)
    loop = asyncio.get_running_loop()
    async with _telling(socket), service.use(held) as live:
        terminal = await service.do(held, "terminal", lambda: live.terminal(rows, columns), gate=service.commands)

        def draw(data: bytes) -> None:
            asyncio.run_coroutine_threadsafe(socket.send_bytes(data), loop).result()

        showing = service.terminals.start(lambda: terminal.run(draw))
        typing = asyncio.ensure_future(_keys(socket, service, terminal))
        try:
            both: list[asyncio.Future[Any]] = [showing, typing]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if typing.done():
                typing.result()
            if showing.done():
                await _send(socket, {"type": "closed", "reason": showing.result()})
        finally:
            typing.cancel()
            terminal.close()
            await asyncio.gather(typing, return_exceptions=True)
            with contextlib.suppress(Exception):
                await showing


async def _keys(socket: WebSocket, service: Service, terminal: Any) -> None:
    with contextlib.suppress(WebSocketDisconnect):
        while True:
            message = await _message(socket)
            if isinstance(message, bytes):
                await service.commands.run(lambda message=message: terminal.type(message))  # type: ignore[misc]
            elif message.get("type") == "resize":
                terminal.resize(*_size(message))
            elif message.get("type") == "detach":
                return
            else:
                raise UsageError(
                    f"a terminal knows no message {message.get('type')!r}: resize, detach, or keys as bytes"
                )


# -- commands ---------------------------------------------------------------------------------------------------------


async def _attend(socket: WebSocket, service: Service, held: Held, command: Command, seen: tuple[int, int]) -> None:
    """Until the command ends or the caller leaves; the command does not mind."""
    await _send(socket, {"type": "started", "command": command.id, "kind": command.kind})
    listening = asyncio.ensure_future(_listen(socket, service, held, command))
    telling = asyncio.ensure_future(_tell(socket, command, seen))
    try:
        done, _ = await asyncio.wait([listening, telling], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (listening, telling):
            task.cancel()
        await asyncio.gather(listening, telling, return_exceptions=True)


async def _tell(socket: WebSocket, command: Command, seen: tuple[int, int]) -> None:
    async for stream, _, data in command.follow(seen):
        await socket.send_bytes((b"\x01" if stream == "stdout" else b"\x02") + data)
    kind, document = ending(command, socket.state.request_id)
    name = "result" if kind == "exit" else "problem"
    await _send(socket, {"type": kind, name: document})


async def _listen(socket: WebSocket, service: Service, held: Held, command: Command) -> None:
    with contextlib.suppress(WebSocketDisconnect):
        while True:
            message = await _message(socket)
            if isinstance(message, bytes):
                if message[:1] != b"\x00":
                    raise UsageError("the first byte of a binary message is 0: stdin")
                if command.input is not None:
                    await command.input.send(message[1:])
                continue
            kind = message.get("type")
            if kind == "end_of_input" and command.input is not None:
                command.input.end()
            elif kind == "signal":
                await send_signal(service, held, command, signal_number(str(message.get("signal", "INT"))))
            elif kind == "resize":
                await _resize(service, held, *_size(message))
            elif kind != "end_of_input":
                raise UsageError(f"there is no message {kind!r}: end_of_input, signal, resize, or stdin as bytes")


async def _resize(service: Service, held: Held, rows: int, columns: int) -> None:
    async with service.use(held) as live:
        await service.commands.run(lambda: live.resize(rows, columns))


# -- messages ---------------------------------------------------------------------------------------------------------


def _start(text: str) -> Start:
    try:
        start = Start.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"the first message: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if (start.command is None) == (not start.argv) or start.type != "start":
        raise UsageError('the first message is {"type": "start"} with either a command or an argv')
    if any("\0" in word for word in (start.command or "", *(start.argv or ()))):
        raise UsageError("a command cannot hold a NUL character")
    return start


async def _text(socket: WebSocket) -> str:
    try:
        async with asyncio.timeout(30):
            message = await socket.receive()
    except TimeoutError:
        raise Refused(408, "too_slow", "no first message came within 30 s") from None
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1000))
    text = message.get("text")
    if text is None:
        raise UsageError("the first message is text: JSON")
    return str(text)


async def _message(socket: WebSocket) -> bytes | dict[str, Any]:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1000))
    if message.get("bytes") is not None:
        return bytes(message["bytes"])
    try:
        document = json.loads(message.get("text") or "")
    except ValueError:
        raise UsageError("a text message is a JSON document") from None
    if not isinstance(document, dict):
        raise UsageError("a text message is a JSON object with a type")
    return document


def _size(message: dict[str, Any]) -> tuple[int, int]:
    rows, columns = message.get("rows"), message.get("columns")
    if not (isinstance(rows, int) and isinstance(columns, int) and 0 < rows <= 10000 and 0 < columns <= 10000):
        raise UsageError("resize takes rows and columns, 1 to 10000")
    return rows, columns


async def _send(socket: WebSocket, document: dict[str, Any]) -> None:
    await socket.send_text(json.dumps(document, default=str))


@contextlib.asynccontextmanager
async def _telling(socket: WebSocket) -> Any:
    """An error becomes a last message, `problem`, and the end of the conversation."""
    code = 1000
    try:
        yield
    except WebSocketDisconnect:
        return
    except (WaypointError, Refused) as error:
        code = 1008
        socket.state.problem_code = error.code
        problem = json.loads(bytes(problem_response(error, socket.state.request_id).body))
        await _quietly(_send(socket, {"type": "problem", "problem": problem}))
    if socket.application_state is WebSocketState.CONNECTED:
        await _quietly(socket.close(code))


async def _quietly(sending: Awaitable[None]) -> None:
    """The other side may have left meanwhile."""
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await sending
