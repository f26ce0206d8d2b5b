"""envd's `process.Process`: commands and terminals, started, followed, fed, resized, signalled."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import signal as signals
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from statefork.errors import Exists, NotFound, SessionDead, UsageError
from statefork.server.foreign.attendant import Attended, Ending, Listener, Wish
from statefork.server.foreign.book import Book
from statefork.server.foreign.e2b import rpc
from statefork.server.foreign.e2b.people import user_of
from statefork.server.foreign.e2b.shapes import given
from statefork.server.guard.problems import Refused
from statefork.server.routes.asking import Execs, Reads, Services, guard_of
from statefork.server.service.held import Held

__all__ = ["router"]

router = APIRouter(prefix="/process.Process", include_in_schema=False)

_SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, "15": 15, "9": 9}
_HIDDEN = "swerex:"
_OUTPUTS = {"o": "stdout", "e": "stderr", "p": "pty"}


def book_of(request: Request) -> Book:
    found: Book = request.app.state.book
    return found


@router.post("/List")
async def list_processes(request: Request, service: Services, principal: Reads) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    await rpc.unary(request)
    return rpc.reply({"processes": [_info(one) for one in await book_of(request).running(held) if _is_shown(one)]})


@router.post("/Start")
async def start(request: Request, service: Services, principal: Execs) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    wish = _wish(request, held, await rpc.only_message(request))
    guard = guard_of(request)
    guard.note(request, action="run", environment=held.id, command=guard.fingerprint("\0".join(wish.argv)))
    if wish.tag is not None and any(one.wish.tag == wish.tag for one in await book_of(request).running(held)):
        raise Exists(f"a process with tag {wish.tag!r} runs already")
    listener = Listener()
    try:
        process = await book_of(request).start(held, wish, listener)
    except NotFound as error:  # envd's answer to a user that it does not know
        raise Refused(401, "unauthenticated", f"invalid username: {error.message}") from None
    timeout = rpc.timeout_of(request)
    if timeout is not None:
        killing = asyncio.get_running_loop().call_later(timeout, _kill_late, process)
        asyncio.ensure_future(_when_over(process, killing))  # noqa: RUF006  it ends with the process
    return rpc.stream(_events(process, listener, rpc.keepalive_of(request)), request)


@router.post("/Connect")
async def connect(request: Request, service: Services, principal: Execs) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    process = await _selected(request, held, await rpc.only_message(request))
    guard_of(request).note(request, action="follow", environment=held.id)
    events = _events(process, process.listen(), rpc.keepalive_of(request))
    return rpc.stream(_within(events, rpc.timeout_of(request)), request)


@router.post("/SendInput")
async def send_input(request: Request, service: Services, principal: Execs) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    message = await rpc.unary(request)
    process = await _selected(request, held, message)
    data = _input(message)
    guard_of(request).note(request, action="stdin", environment=held.id, bytes=len(data))
    await _feed(process, data)
    return rpc.reply({})


@router.post("/StreamInput")
async def stream_input(request: Request, service: Services, principal: Execs) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    guard_of(request).note(request, action="stdin", environment=held.id)
    incoming = rpc.messages(request)

    async def take() -> None:
        process: Attended | None = None
        async for message in incoming:
            if "start" in message:
                process = await _selected(request, held, rpc.member(message, "start"))
            elif "data" in message:
                if process is None:
                    raise UsageError("the first message of a stream of input is `start`")
                await _feed(process, _input(rpc.member(message, "data")))

    return await rpc.unary_of_stream(take(), request)


@router.post("/CloseStdin")
async def close_stdin(request: Request, service: Services, principal: Execs) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    process = await _selected(request, held, await rpc.unary(request))
    guard_of(request).note(request, action="stdin", environment=held.id)
    if process.wish.size is None and not process.wish.feed:
        raise UsageError("its stdin is not open: start it with stdin=True")
    await process.end_input()
    return rpc.reply({})


@router.post("/SendSignal")
async def send_signal(request: Request, service: Services, principal: Execs) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    message = await rpc.unary(request)
    process = await _selected(request, held, message)
    number = _SIGNALS.get(str(message.get("signal", "")))
    if number is None:
        raise UsageError(f"signal {message.get('signal')!r} cannot be sent: SIGTERM or SIGKILL")
    guard_of(request).note(request, action="signal", environment=held.id, signal=number)
    await process.signal(number)
    return rpc.reply({})


@router.post("/Update")
async def update(request: Request, service: Services, principal: Execs) -> Response:
    held = rpc.sandbox_held(request, service, principal)
    message = await rpc.unary(request)
    process = await _selected(request, held, message)
    guard_of(request).note(request, action="resize", environment=held.id)
    if process.wish.size is None:
        raise UsageError("it has no terminal")
    await process.resize(*_size(rpc.member(message, "pty")))
    return rpc.reply({})


# -- what was asked ---------------------------------------------------------------------------------------------------


def _wish(request: Request, held: Held, message: Mapping[str, Any]) -> Wish:
    config = rpc.member(message, "process")
    envs, arguments = rpc.member(config, "envs"), config.get("args") or []
    if not isinstance(arguments, list) or not all(isinstance(one, str) for one in (*arguments, *envs, *envs.values())):
        raise UsageError("args is a list of texts, and envs are texts with names")
    command = rpc.text(config, "cmd")
    if command is None:
        raise UsageError("a process has a cmd")
    if any(not name or "=" in name for name in envs):
        raise UsageError("that cannot name a variable")
    tag = rpc.text(message, "tag")
    if (tag or "").startswith(_HIDDEN):
        raise UsageError(f"tags that begin with {_HIDDEN!r} are taken")
    terminal = rpc.member(message, "pty") if "pty" in message else None
    return Wish(
        argv=(command, *arguments),
        env={**given(held).get("envs", {}), **envs},
        cwd=rpc.text(config, "cwd"),
        user=user_of(request),
        size=_size(terminal) if terminal is not None else None,
        feed=message.get("stdin", True) is not False,
        tag=tag,
    )


def _size(terminal: Mapping[str, Any]) -> tuple[int, int]:
    size = rpc.member(terminal, "size")
    rows, columns = size.get("rows", 24), size.get("cols", 80)
    if not (isinstance(rows, int) and isinstance(columns, int) and 0 < rows <= 10000 and 0 < columns <= 10000):
        raise UsageError("a terminal has 1 to 10000 rows and columns")
    return rows, columns


async def _selected(request: Request, held: Held, message: Mapping[str, Any]) -> Attended:
    selector = rpc.member(message, "process")
    pid, tag = selector.get("pid"), rpc.text(selector, "tag")
    if (not isinstance(pid, int) and tag is None) or (tag or "").startswith(_HIDDEN):
        raise UsageError("select a process by its pid or its tag")
    return await book_of(request).find(held, pid=pid, tag=tag)


def _input(message: Mapping[str, Any]) -> bytes:
    given_input = rpc.member(message, "input")
    text = given_input.get("stdin", given_input.get("pty", ""))
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise UsageError("input is bytes, as base64") from None


async def _feed(process: Attended, data: bytes) -> None:
    if process.wish.size is None and not process.wish.feed:
        raise UsageError("its stdin is not open: start it with stdin=True")
    await process.feed(data)


# -- what is told -----------------------------------------------------------------------------------------------------


def _is_shown(process: Attended) -> bool:
    return not (process.wish.tag or "").startswith(_HIDDEN)


def _info(process: Attended) -> dict[str, Any]:
    wish = process.wish
    config: dict[str, Any] = {"cmd": wish.argv[0], "args": list(wish.argv[1:]), "envs": dict(wish.env)}
    if wish.cwd:
        config["cwd"] = wish.cwd
    return {"config": config, "pid": process.pid, **({"tag": wish.tag} if wish.tag else {})}


async def _events(process: Attended, listener: Listener, every: float) -> AsyncIterator[dict[str, Any]]:
    """Leaving the stream leaves the process alone."""
    try:
        yield {"event": {"start": {"pid": process.pid}}}
        while True:
            try:
                frame = await listener.next(every)
            except TimeoutError:
                yield {"event": {"keepalive": {}}}
                continue
            if frame is None:
                break
            kind, data = frame
            if kind in _OUTPUTS:
                yield {"event": {"data": {_OUTPUTS[kind]: base64.b64encode(data).decode()}}}
        if process.ending is None:
            raise Refused(408, "too_slow", "the output was not read; connect to the process again")
        yield {"event": {"end": _end(process.ending)}}
    finally:
        process.unlisten(listener)


def _end(ending: Ending) -> dict[str, Any]:
    if ending.error is not None:
        raise ending.error if ending.error.code != "internal" else SessionDead(ending.error.message)
    if ending.signal:
        name = f"signal: {_signal_word(ending.signal)}"
        return {"exitCode": -1, "exited": False, "status": name, "error": name}
    status = f"exit status {ending.code}"
    return {"exitCode": ending.code, "exited": True, "status": status, **({"error": status} if ending.code else {})}


def _signal_word(number: int) -> str:
    """As Go calls them."""
    with contextlib.suppress(ValueError):
        return (signals.strsignal(number) or str(number)).lower()
    return str(number)


async def _within(events: AsyncIterator[dict[str, Any]], timeout: float | None) -> AsyncIterator[dict[str, Any]]:
    deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
    try:
        while True:
            async with asyncio.timeout_at(deadline):
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    return
            yield event
    except TimeoutError:
        raise Refused(408, "timeout", "the time for this stream is over") from None
    finally:
        await events.aclose()  # type: ignore[attr-defined]


def _kill_late(process: Attended) -> None:
    async def kill() -> None:
        with contextlib.suppress(Exception):
            await process.signal(9)

    asyncio.ensure_future(kill())  # noqa: RUF006  one frame


async def _when_over(process: Attended, killing: asyncio.TimerHandle) -> None:
    await process.over.wait()
    killing.cancel()
