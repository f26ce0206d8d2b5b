"""A sandbox backend for deepagents (LangGraph): `create_deep_agent(model=..., backend=StateforkBackend(environment))`.

The agent's `execute` tool is evaluated in the environment's persistent shell: `cd`, `export` and jobs last. What
deepagents runs for itself (listing, search, reading, editing; they need python3 inside) goes beside that shell, so it
neither waits for a command nor disturbs one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from deepagents.backends.protocol import (
    ExecuteOffloadResult,
    ExecuteResponse,
    FileDownloadResponse,
    FileUploadResponse,
)
from deepagents.backends.sandbox import BaseSandbox

from statefork.environment import Environment
from statefork.errors import ExecTimeout, NotFound, UsageError, WaypointError
from statefork.model import ExecResult, RestoreResult

__all__ = ["StateforkBackend"]

TIMED_OUT = 124


class StateforkBackend(BaseSandbox):
    def __init__(self, environment: Environment, *, timeout: float | None = 1800, persistent: bool = True) -> None:
        """`persistent=False`: every command in a shell of its own."""
        self.environment = environment
        """For snapshots, forks and the rest; the caller ends it."""
        self._timeout = timeout
        self._persistent = persistent

    @property
    def id(self) -> str:
        return self.environment.id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """In a shell of its own: what deepagents itself calls."""
        return self._answered(timeout, lambda seconds: self.environment.run(["sh", "-c", command], timeout=seconds))

    def execute_with_offload(
        self,
        command: str,
        capture_path: str,
        *,
        max_inline_bytes: int,
        max_capture_bytes: int | None = None,
        timeout: int | None = None,
    ) -> ExecuteOffloadResult:
        """What the agent asks for. All output is given back; deepagents moves large ones to a file by itself."""
        if not self._persistent:
            return ExecuteOffloadResult(offloaded=False, response=self.execute(command, timeout=timeout))
        response = self._answered(timeout, lambda seconds: self.environment.exec_command(command, timeout=seconds))
        return ExecuteOffloadResult(offloaded=False, response=response)

    async def aexecute_with_offload(
        self,
        command: str,
        capture_path: str,
        *,
        max_inline_bytes: int,
        max_capture_bytes: int | None = None,
        timeout: int | None = None,
    ) -> ExecuteOffloadResult:
        call = partial(self.execute_with_offload, command, capture_path, max_inline_bytes=max_inline_bytes)
        return await asyncio.to_thread(call, max_capture_bytes=max_capture_bytes, timeout=timeout)

    def _answered(self, timeout: int | None, call: Callable[[float | None], ExecResult]) -> ExecuteResponse:
        seconds = (timeout or None) if timeout is not None else self._timeout  # 0 is no timeout
        try:
            result = call(seconds)
        except ExecTimeout as error:
            said = f"{error.result.output}\n[ended after {seconds:g} seconds]"
            return ExecuteResponse(output=said.lstrip(), exit_code=TIMED_OUT, truncated=error.result.truncated)
        return ExecuteResponse(output=result.output, exit_code=result.exit_code, truncated=result.truncated)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        tried = [(path, _tried(partial(self.environment.write_file, path, content))) for path, content in files]
        return [FileUploadResponse(path=path, error=error) for path, (error, _) in tried]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        tried = [(path, _tried(partial(self.environment.read_file, path))) for path in paths]
        return [FileDownloadResponse(path=path, content=content, error=error) for path, (error, content) in tried]

    # -- states -------------------------------------------------------------------------------------------------------

    def snapshot(self, name: str | None = None) -> str:
        return self.environment.snapshot(name)

    def restore(self, snapshot: str) -> RestoreResult:
        return self.environment.restore(snapshot)

    def fork(self, n: int = 1, *, from_snapshot: str | None = None) -> list[StateforkBackend]:
        """Backends for N agents that go on from here; the caller ends their environments."""
        made = self.environment.fork(n, from_snapshot=from_snapshot)
        return [StateforkBackend(one, timeout=self._timeout, persistent=self._persistent) for one in made]


def _tried(call: Callable[[], bytes | None]) -> tuple[str | None, bytes | None]:
    """deepagents' word for what went wrong, which its tools explain to the model, or the content."""
    try:
        return None, call()
    except NotFound:
        return "file_not_found", None
    except UsageError as error:
        return ("is_directory" if "director" in error.message else "invalid_path"), None
    except WaypointError as error:
        return ("permission_denied" if "ermission" in error.message else error.message), None
