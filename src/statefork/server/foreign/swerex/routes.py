"""The calls of SWE-ReX's `RemoteRuntime`, each under `/swerex/ENVIRONMENT`."""

from __future__ import annotations

import io
import posixpath
import stat
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Awaitable, Callable
from typing import IO, Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, Field
from starlette.datastructures import UploadFile

from statefork.environment import Environment
from statefork.errors import ExecTimeout, NotFound, UsageError, WaypointError
from statefork.files import absolute
from statefork.model import ExecResult
from statefork.server.foreign.book import Book
from statefork.server.foreign.swerex.errors import Raised, told
from statefork.server.foreign.swerex.runtime import Runtime, Runtimes
from statefork.server.guard.limits import large_body
from statefork.server.guard.principal import Principal
from statefork.server.routes.asking import Execs, Ids, Reads, Services, answer, guard_of
from statefork.server.service.archives import check_archive
from statefork.server.service.held import Held
from statefork.server.service.running import Program
from statefork.server.service.service import Service

__all__ = ["router"]

router = APIRouter(prefix="/swerex/{environment}", include_in_schema=False)

Seconds = Annotated[float, Field(gt=0, le=10 * 86400)]


class CreateSession(BaseModel):
    startup_source: list[str] = []
    session: str = "default"
    session_type: Literal["bash"] = "bash"
    startup_timeout: Seconds = 1.0


class Action(BaseModel):
    """Both kinds: a command, and an interrupt."""

    action_type: Literal["bash", "bash_interrupt"] = "bash"
    session: str = "default"
    command: str = ""
    timeout: Seconds | None = None
    is_interactive_command: bool = False
    is_interactive_quit: bool = False
    check: Literal["silent", "raise", "ignore"] = "raise"
    error_msg: str = ""
    expect: list[str] = []
    n_retry: int = Field(3, ge=0, le=100)


class CloseSession(BaseModel):
    session: str = "default"
    session_type: Literal["bash"] = "bash"


class Command(BaseModel):
    command: str | list[str]
    timeout: Seconds | None = None
    shell: bool = False
    check: bool = False
    error_msg: str = ""
    env: dict[str, str] | None = None
    cwd: str | None = None
    merge_output_streams: bool = False


class ReadFile(BaseModel):
    path: str
    encoding: str | None = None
    errors: str | None = None


class WriteFile(BaseModel):
    content: str
    path: str


def _runtime(request: Request, held: Held) -> Runtime:
    book: Book = request.app.state.book
    runtimes: Runtimes = request.app.state.swerex_runtimes
    return runtimes.of(book, held)


def _found(service: Service, environment: str, principal: Principal) -> Held:
    """That there is no environment is not to look like a missing file."""
    try:
        return service.find(environment, principal)
    except NotFound as error:
        raise Raised("SwerexException", error.message) from None


async def _once(request: Request, runtime: Runtime, do: Callable[[], Awaitable[dict[str, Any]]]) -> Response:
    """Exceptions are answers, too: a repetition gets the same one."""

    async def answered() -> Response:
        try:
            return answer(await do())
        except (Raised, WaypointError) as error:
            code = error.code if isinstance(error, WaypointError) else error.class_path.rpartition(".")[2]
            request.state.problem_code = code
            return told(error)

    return await runtime.once(request.headers.get("x-request-id"), answered)


@router.get("/is_alive")
async def is_alive(environment: Ids, service: Services, principal: Reads) -> Response:
    try:
        held = service.find(environment, principal)
    except NotFound as error:
        return answer({"is_alive": False, "message": error.message})
    if held.state == "live" or held.row.paused_by == "idle":
        return answer({"is_alive": True, "message": ""})
    return answer({"is_alive": False, "message": f"environment {held.id} is {held.state}"})


@router.post("/create_session")
async def create_session(
    request: Request, environment: Ids, body: CreateSession, service: Services, principal: Execs
) -> Response:
    held = _found(service, environment, principal)
    guard_of(request).note(request, action="create_session", environment=held.id)
    runtime = _runtime(request, held)

    async def do() -> dict[str, Any]:
        output = await runtime.create(body.session, body.startup_source, body.startup_timeout)
        return {"output": output, "session_type": "bash"}

    return await _once(request, runtime, do)


@router.post("/run_in_session")
async def run_in_session(
    request: Request, environment: Ids, body: Action, service: Services, principal: Execs
) -> Response:
    held = _found(service, environment, principal)
    guard, runtime = guard_of(request), _runtime(request, held)
    guard.note(request, action="exec", environment=held.id, command=guard.fingerprint(body.command))
    if "\0" in body.command:
        raise UsageError("a command cannot hold a NUL character")

    async def do() -> dict[str, Any]:
        shell = await runtime.find(body.session)
        if body.action_type == "bash_interrupt":
            return await shell.interrupt({**body.model_dump(), "timeout": body.timeout or 0.2})
        if not (body.is_interactive_command or body.is_interactive_quit):
            await _check_syntax(service, held, body.command)
        async with shell.turn:
            return await shell.run(body.model_dump())

    return await _once(request, runtime, do)


@router.post("/close_session")
async def close_session(
    request: Request, environment: Ids, body: CloseSession, service: Services, principal: Execs
) -> Response:
    held = _found(service, environment, principal)
    guard_of(request).note(request, action="close_session", environment=held.id)
    runtime = _runtime(request, held)

    async def do() -> dict[str, Any]:
        await runtime.close(body.session)
        return {"session_type": "bash"}

    return await _once(request, runtime, do)


@router.post("/close")
async def close(request: Request, environment: Ids, service: Services, principal: Execs) -> Response:
    """Ends the sessions; the environment stays, for whoever made it."""
    held = _found(service, environment, principal)
    guard_of(request).note(request, action="close_session", environment=held.id)
    runtime = _runtime(request, held)

    async def do() -> dict[str, Any]:
        await runtime.close_all()
        return {}

    return await _once(request, runtime, do)


@router.post("/execute")
async def execute(request: Request, environment: Ids, body: Command, service: Services, principal: Execs) -> Response:
    held = _found(service, environment, principal)
    guard, runtime = guard_of(request), _runtime(request, held)
    words = [body.command] if isinstance(body.command, str) else body.command
    guard.note(request, action="run", environment=held.id, command=guard.fingerprint("\0".join(words)))

    async def do() -> dict[str, Any]:
        return await _executed(service, held, body, words)

    return await _once(request, runtime, do)


@router.post("/read_file")
async def read_file(
    request: Request, environment: Ids, body: ReadFile, service: Services, principal: Reads
) -> Response:
    held = _found(service, environment, principal)
    guard_of(request).note(request, action="read_file", environment=held.id)
    path, limit = absolute(body.path), service.settings.file_bytes
    data = await _inside(service, held, "read_file", lambda live: live.read_file(path, limit_bytes=limit))
    try:
        text = data.decode(body.encoding or "utf-8", body.errors or "strict")
    except LookupError as error:
        raise Raised("builtins.LookupError", str(error)) from None
    except ValueError as error:
        raise Raised("builtins.ValueError", f"{path}: {error}") from None
    return answer({"content": text.replace("\r\n", "\n").replace("\r", "\n")})


@router.post("/write_file")
async def write_file(
    request: Request, environment: Ids, body: WriteFile, service: Services, principal: Execs
) -> Response:
    held = _found(service, environment, principal)
    path, data = absolute(body.path), body.content.encode(errors="surrogateescape")
    guard_of(request).note(request, action="write_file", environment=held.id, bytes=len(data))
    await _inside(service, held, "write_file", lambda live: live.write_file(path, data))
    return answer({})


@router.post("/upload", dependencies=[Depends(large_body)])
async def upload(request: Request, environment: Ids, service: Services, principal: Execs) -> Response:
    held = _found(service, environment, principal)
    async with request.form(max_files=1) as form:
        file, target = form.get("file"), form.get("target_path")
        if not isinstance(file, UploadFile) or not isinstance(target, str):
            raise UsageError("an upload has a file and a target_path")
        path, spool = absolute(target), file.file
        guard_of(request).note(request, action="upload", environment=held.id, bytes=file.size)
        unzip = str(form.get("unzip", "")).lower() in ("true", "1")
        most = service.guard.limits.large_body_bytes
        await _inside(service, held, "upload", lambda live: _upload(live, spool, path, unzip, most))
    return answer({})


# -- inside -----------------------------------------------------------------------------------------------------------


async def _inside(service: Service, held: Held, verb: str, call: Callable[[Environment], Any]) -> Any:
    async with service.use(held) as live:
        return await service.do(held, verb, lambda: call(live), gate=service.commands)


async def _check_syntax(service: Service, held: Held, command: str) -> None:
    program = Program(argv=("/bin/bash", "-n"), stdin=command.encode(errors="surrogateescape") + b"\n", timeout=30)
    ended = (await service.running.run(held, program)).result
    assert ended is not None
    if ended.exit_code != 0:
        message = f"Error (exit code {ended.exit_code}) while checking bash command \n{command!r}\n---- Stderr ----\n"
        message += f"{ended.stderr}\n---- Stdout ----\n{ended.stdout}"
        raise Raised("BashIncorrectSyntaxError", message, bash_stdout=ended.stdout, bash_stderr=ended.stderr)


async def _executed(service: Service, held: Held, body: Command, words: list[str]) -> dict[str, Any]:
    if not words or any("\0" in word for word in words):
        raise UsageError("a command has words, without NUL characters")
    argv = ["/bin/sh", "-c", *words] if body.shell else words
    if body.env is not None:  # as subprocess has it: these variables and no others
        argv = ["env", "-i", *(f"{name}={value}" for name, value in body.env.items()), *argv]
    program = Program(
        argv=tuple(argv), timeout=body.timeout, cwd=body.cwd, output_bytes=service.settings.most_output_bytes
    )
    try:
        command = await service.running.run(held, program)
    except ExecTimeout:
        raise Raised("CommandTimeoutError", f"Timeout ({body.timeout}s) exceeded while running command") from None
    result = command.result
    assert result is not None
    _refuse_missing(result, body, words[0])
    stdout = _text(result.output_bytes if body.merge_output_streams else result.stdout_bytes)
    stderr = "" if body.merge_output_streams else _text(result.stderr_bytes)
    if body.check and result.exit_code != 0:
        message = f"Command {body.command!r} failed with exit code {result.exit_code}. Stdout:\n{stdout!r}\nStderr:\n{stderr!r}"
        raise Raised("NonZeroExitCodeError", f"{body.error_msg}: {message}" if body.error_msg else message)
    return {"stdout": stdout, "stderr": stderr, "exit_code": result.exit_code}


def _refuse_missing(result: ExecResult, body: Command, word: str) -> None:
    """Where subprocess would raise: there is no such program."""
    if result.exit_code == 127 and not body.shell and "No such file or directory" in result.stderr:
        raise Raised("builtins.FileNotFoundError", f"[Errno 2] No such file or directory: {word!r}")


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _upload(live: Environment, spool: IO[bytes], path: str, unzip: bool, most: int) -> None:
    """On a thread. Everything goes in as an archive, checked as those of /v1 are."""
    with tempfile.TemporaryFile() as packed:
        if unzip:
            _repack(spool, packed, most)
            target = path
        else:
            size = spool.seek(0, io.SEEK_END)
            spool.seek(0)
            with tarfile.open(fileobj=packed, mode="w") as archive:
                entry = tarfile.TarInfo(posixpath.basename(path))
                entry.size, entry.mode, entry.mtime = size, 0o644, int(time.time())
                archive.addfile(entry, spool)
            target = posixpath.dirname(path)
        packed.seek(0)
        check_archive(packed)
        packed.seek(0)
        live.unpack_archive(packed, target)


def _repack(spool: IO[bytes], packed: IO[bytes], most: int) -> None:
    """A zip archive as a tar archive; what it says of its size is not believed."""
    spool.seek(0)
    left = most
    try:
        with zipfile.ZipFile(spool) as source, tarfile.open(fileobj=packed, mode="w") as archive:
            for item in source.infolist():
                entry = tarfile.TarInfo(item.filename.rstrip("/"))
                entry.mode = (item.external_attr >> 16) & 0o777 or (0o755 if item.is_dir() else 0o644)
                entry.mtime = int(time.time())
                if item.is_dir():
                    entry.type = tarfile.DIRTYPE
                    archive.addfile(entry)
                    continue
                if stat.S_ISLNK(item.external_attr >> 16):
                    raise UsageError(f"{item.filename}: links cannot be uploaded this way")
                left -= item.file_size
                if left < 0:
                    raise UsageError(f"the archive holds more than {most} bytes")
                entry.size = item.file_size
                with source.open(item) as content:  # stops at the size that was announced, or says that it is wrong
                    archive.addfile(entry, content)
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, NotImplementedError) as error:
        raise UsageError(f"the archive cannot be read: {error}") from None
