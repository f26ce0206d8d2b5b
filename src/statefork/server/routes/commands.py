"""Commands: in one call, as a stream of events, in the background; listed, followed, signalled and fed."""

from __future__ import annotations

import asyncio
import json
import signal as signals
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.responses import StreamingResponse

from statefork.errors import ExecTimeout, Unsupported, UsageError
from statefork.server import schemas
from statefork.server.guard.principal import Principal, require
from statefork.server.guard.problems import Refused
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
    decode_bytes,
    encoded,
    guard_of,
    once,
    page,
    service_of,
    text_of,
)
from statefork.server.routes.shapes import command_document, problem_document, result_document
from statefork.server.service.answers import Reply
from statefork.server.service.command import Command
from statefork.server.service.held import Held
from statefork.server.service.running import Program
from statefork.server.service.service import Service
from statefork.tree import mint

__all__ = ["events", "router", "signal_number"]

router = APIRouter(prefix="/v1", tags=["commands"], responses=PROBLEMS)

HEARTBEAT_SECONDS = 15.0
_STREAM: dict[str, Any] = {"text/event-stream": {}}
_EVENTS = (
    "With `Accept: text/event-stream` these events: `started` {command}; `stdout` and `stderr` {offset, data} with data as "
    "base64; `exit` with an ExecResult that has empty outputs; `problem` with a Problem."
)
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": schemas.ExecResult,
        "description": "It has ended; a non-zero exit code is a result.",
        "content": _STREAM,
    },
    202: {"model": schemas.Command, "description": "With `background`: it is under way."},
}
_may_exec = require("exec")
Commands = Annotated[str, Path(description="A command's id, or a unique prefix.", max_length=128)]


@router.post(
    "/environments/{environment}/exec",
    operation_id="exec",
    response_model=schemas.ExecResult,
    responses=_ANSWERS,
    summary="Evaluate a command in the persistent shell",
)
async def execute(
    request: Request,
    environment: Ids,
    body: schemas.Exec,
    key: Key = None,
) -> Response:
    service, principal, accept = await _asked(request)
    held = service.find(environment, principal)
    guard = guard_of(request)
    command = decode_bytes(body.command, body.command_base64, "command")
    if command is None:
        raise UsageError("give a command")
    guard.note(request, action="exec", environment=held.id, command=guard.fingerprint(command))
    program = _program(service, body, command=command, wait=body.wait)
    return await _started(request, service, principal, held, body, program, key, accept)


@router.post(
    "/environments/{environment}/run",
    operation_id="run",
    response_model=schemas.ExecResult,
    responses=_ANSWERS,
    summary="Run a program beside the shell",
)
async def run(
    request: Request,
    environment: Ids,
    body: schemas.Run,
    key: Key = None,
) -> Response:
    service, principal, accept = await _asked(request)
    held = service.find(environment, principal)
    guard = guard_of(request)
    guard.note(request, action="run", environment=held.id, command=guard.fingerprint("\0".join(body.argv)))
    program = _program(service, body, argv=tuple(body.argv), cwd=body.cwd, env=body.env)
    return await _started(request, service, principal, held, body, program, key, accept)


async def _asked(request: Request) -> tuple[Service, Principal, str | None]:
    """What other routes get from FastAPI, which takes a tenth of a millisecond for each: on this path that is much."""
    return await service_of(request), await _may_exec(request), request.headers.get("accept")


def _program(service: Service, body: schemas.Program, **rest: Any) -> Program:
    if body.interactive and not body.background:
        raise UsageError("interactive goes with background; or use the WebSocket")
    if b"\0" in rest.get("command", b"") or any(
        "\0" in word for word in (*rest.get("argv", ()), rest.get("cwd") or "")
    ):
        raise UsageError("a command cannot hold a NUL character; send such data on stdin")
    limit = service.settings.output_bytes if body.output_limit_bytes is None else body.output_limit_bytes
    return Program(
        timeout=body.timeout,
        stdin=decode_bytes(body.stdin, body.stdin_base64, "stdin"),
        feed=body.interactive,
        output_bytes=min(limit, service.settings.most_output_bytes),
        **rest,
    )


async def _started(
    request: Request,
    service: Service,
    principal: Principal,
    held: Held,
    body: schemas.Program,
    program: Program,
    key: str | None,
    accept: str | None,
) -> Response:
    if accept is not None and "text/event-stream" in accept:
        if key is not None:
            raise UsageError("a stream cannot be repeated; start it with background and a key, and follow its output")
        command = await service.running.launch(held, replace(program, followed=True), detached=True)
        return _stream(request, command, (0, 0))

    async def do(identifier: str) -> Reply:
        if body.background:
            command = await service.running.launch(held, program, detached=True, identifier=identifier or None)
            return encoded(command_document(command, held.id, body.encoding), 202)
        try:
            command = await service.running.run(held, program, identifier=identifier or None)
        except ExecTimeout as error:
            error.details["result"] = result_document(error.details["command"], error.result, body.encoding)
            raise
        assert command.result is not None
        return encoded(result_document(command.id, command.result, body.encoding))

    async def again(identifier: str) -> Reply | None:
        """An earlier process started it, and this one has found it again."""
        command = held.commands.get(identifier)
        if command is None:
            return None
        if body.background:
            return encoded(command_document(command, held.id, body.encoding), 202)
        await command.done.wait()
        if command.result is None:
            return None
        return encoded(result_document(command.id, command.result, body.encoding))

    return await once(request, service, principal, key, mint("c") if key else "", do, again)


# -- those that are there ---------------------------------------------------------------------------------------------


@router.get(
    "/environments/{environment}/commands",
    operation_id="listCommands",
    response_model=schemas.CommandPage,
    summary="Commands under way, and those that ended in the background lately",
)
async def list_commands(
    environment: Ids, service: Services, principal: Reads, limit: Limit = 100, cursor: Cursor = None
) -> Response:
    held = service.find(environment, principal)
    found = sorted(held.commands.values(), key=_by_start)
    items, more = page(found, limit, cursor, _by_start)
    return answer({"items": [command_document(one, held.id) for one in items], "next_cursor": more})


@router.get(
    "/environments/{environment}/commands/{command}",
    operation_id="getCommand",
    response_model=schemas.Command,
    summary="One command; with `wait` the answer comes when it has ended, or that many seconds later",
)
async def get_command(
    environment: Ids,
    command: Commands,
    service: Services,
    principal: Reads,
    wait: Annotated[float, Query(ge=0, le=3600, allow_inf_nan=False)] = 0,
    encoding: Literal["utf-8", "base64"] = "utf-8",
) -> Response:
    held = service.find(environment, principal)
    found = service.running.find(held, command)
    if wait:
        try:
            async with asyncio.timeout(wait):
                await found.done.wait()
        except TimeoutError:
            pass
    return answer(command_document(found, held.id, encoding))


@router.get(
    "/environments/{environment}/commands/{command}/output",
    operation_id="followCommand",
    responses={200: {"description": f"Until it has ended. {_EVENTS}", "content": _STREAM}},
    summary="Follow a command from any offset: the newest megabyte is known",
)
async def follow_command(
    request: Request,
    environment: Ids,
    command: Commands,
    service: Services,
    principal: Reads,
    stdout_offset: Annotated[int, Query(ge=0, le=1 << 62)] = 0,
    stderr_offset: Annotated[int, Query(ge=0, le=1 << 62)] = 0,
) -> Response:
    held = service.find(environment, principal)
    guard_of(request).note(request, action="follow", environment=held.id, command=command)
    return _stream(request, service.running.find(held, command), (stdout_offset, stderr_offset))


@router.post(
    "/environments/{environment}/commands/{command}/signal",
    operation_id="signalCommand",
    status_code=204,
    response_class=Response,
)
async def signal_command(
    request: Request, environment: Ids, command: Commands, body: schemas.Signal, service: Services, principal: Execs
) -> Response:
    held = service.find(environment, principal)
    found = service.running.find(held, command)
    number = signal_number(body.signal)
    guard_of(request).note(request, action="signal", environment=held.id, signal=body.signal)
    await send_signal(service, held, found, number)
    return Response(status_code=204)


async def send_signal(service: Service, held: Held, command: Command, number: int) -> None:
    if not command.done.is_set():
        if command.kind == "run" and command.number is None:
            raise Unsupported(f"{held.backend} cannot signal what was started with run; kill it inside")
        async with service.use(held) as live:
            await service.do(held, "signal", lambda: live.signal_command(number, command.number), gate=service.commands)


@router.post(
    "/environments/{environment}/commands/{command}/stdin",
    operation_id="writeStdin",
    status_code=204,
    response_class=Response,
    summary="Feed a command that was started with `interactive`; waits while it does not read",
)
async def write_stdin(
    request: Request, environment: Ids, command: Commands, body: schemas.Stdin, service: Services, principal: Execs
) -> Response:
    held = service.find(environment, principal)
    found = service.running.find(held, command)
    data = decode_bytes(body.data, body.data_base64, "data") or b""
    guard_of(request).note(request, action="stdin", environment=held.id, bytes=len(data))
    if found.input is None:
        raise UsageError(f"command {found.id} takes no input; start it with interactive")
    try:
        async with asyncio.timeout(30):
            await found.input.send(data)
    except TimeoutError:
        raise Refused(429, "overloaded", f"command {found.id} does not read its input", retry_after=1) from None
    if body.end:
        found.input.end()
    return Response(status_code=204)


def signal_number(name: str) -> int:
    try:
        return int(signals.Signals[name if name.startswith("SIG") else f"SIG{name}"])
    except KeyError:
        raise UsageError(f"there is no signal {name}") from None


def _by_start(command: Command) -> str:
    return f"{command.started:020.6f} {command.id}"


# -- streams ----------------------------------------------------------------------------------------------------------


def _stream(request: Request, command: Command, seen: tuple[int, int]) -> Response:
    return StreamingResponse(
        events(command, seen, request.state.request_id),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def events(command: Command, seen: tuple[int, int], request_id: str) -> AsyncIterator[bytes]:
    """Leaving the stream leaves the command alone."""
    yield _event("started", {"command": command.id})
    pieces = command.follow(seen).__aiter__()
    waiting = asyncio.ensure_future(anext(pieces, None))
    try:
        while True:
            done, _ = await asyncio.wait([waiting], timeout=HEARTBEAT_SECONDS)
            if not done:
                yield b": still here\n\n"
                continue
            piece = waiting.result()
            if piece is None:
                break
            stream, offset, data = piece
            yield _event(stream, {"offset": offset, "data": text_of(data, "base64")})
            waiting = asyncio.ensure_future(anext(pieces, None))
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await pieces.aclose()  # type: ignore[attr-defined]
    yield _event(*ending(command, request_id))


def ending(command: Command, request_id: str) -> tuple[str, dict[str, Any]]:
    """How it ended, without the output: whoever followed has that."""
    if command.error is not None:
        problem = problem_document(command.error, request_id)
        if isinstance(command.error, ExecTimeout):
            problem["result"] = _bare(command)
        return "problem", problem
    return "exit", _bare(command)


def _bare(command: Command) -> dict[str, Any]:
    assert command.result is not None
    document = result_document(command.id, command.result)
    return {**document, "stdout": "", "stderr": "", "output": ""}


def _event(name: str, document: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(document, default=str)}\n\n".encode()
