"""Environments as sandboxes of the OpenAI Agents SDK, for its SandboxAgent:

    client = StateforkSandboxClient()
    options = StateforkSandboxClientOptions(arguments={"dockerfile_dir": "./task"})
    await Runner.run(agent, "...", run_config=RunConfig(sandbox=SandboxRunConfig(client=client, options=options)))

The SDK's own snapshots are tar archives of the workspace, and work here as with its other sandboxes. Ours hold the whole
machine: `client.environment(session)` takes and restores them.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
import uuid
from functools import partial
from pathlib import Path
from typing import Any, Literal

from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceWriteTypeError,
)
from agents.sandbox.manifest import Manifest
from agents.sandbox.session import SandboxSession, SandboxSessionState
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.manager import Instrumentation
from agents.sandbox.session.runtime_helpers import RESOLVE_WORKSPACE_PATH_HELPER, RuntimeHelperScript
from agents.sandbox.session.sandbox_client import BaseSandboxClient, BaseSandboxClientOptions
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot
from agents.sandbox.types import ExecResult, User
from agents.sandbox.util.tar_utils import UnsafeTarMemberError, should_skip_tar_member, validate_tar_bytes

from statefork.environment import Environment
from statefork.errors import ExecTimeout, NotFound, WaypointError
from statefork.factory import create_env_manager
from statefork.integrations.programs import as_user, run_program

__all__ = ["StateforkSandboxClient", "StateforkSandboxClientOptions"]


class StateforkSandboxClientOptions(BaseSandboxClientOptions):
    """A method of docs/backends.md, and what it takes."""

    type: Literal["statefork"] = "statefork"
    method: str = "waypoint_build"
    arguments: dict[str, Any] = {}


class StateforkSandboxSessionState(SandboxSessionState):
    type: Literal["statefork"] = "statefork"
    method: str
    arguments: dict[str, Any]
    environment: str
    """Its id: known only to the process that made it. In another one a new environment takes its place."""


class StateforkSandboxSession(BaseSandboxSession):
    state: StateforkSandboxSessionState

    def __init__(self, state: StateforkSandboxSessionState, environment: Environment) -> None:
        self.state = state
        self.environment = environment

    @property
    def _root(self) -> str:
        return str(self.state.manifest.root)

    async def _prepare_backend_workspace(self) -> None:
        await asyncio.to_thread(self.environment.make_directory, self._root)

    async def running(self) -> bool:
        return self.environment.state == "live"

    def _runtime_helpers(self) -> tuple[RuntimeHelperScript, ...]:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        return await self._validate_remote_path_access(path, for_write=for_write)

    def _prepare_exec_command(
        self, *command: str | Path, shell: bool | list[str], user: str | User | None
    ) -> list[str]:
        argv = super()._prepare_exec_command(*command, shell=shell, user=None)
        return as_user(argv, user.name if isinstance(user, User) else user) if user else argv

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        argv = [str(part) for part in command]
        variables = await self.state.manifest.environment.resolve()
        there = self._root if self.state.workspace_root_ready else None
        try:
            result = await run_program(self.environment, argv, timeout=timeout, cwd=there, env=variables)
        except ExecTimeout as error:
            raise ExecTimeoutError(command=argv, timeout_s=timeout, cause=error) from error
        except WaypointError as error:
            raise ExecTransportError(command=argv, cause=error) from error
        return ExecResult(stdout=result.stdout_bytes, stderr=result.stderr_bytes, exit_code=result.exit_code)

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        if user is not None:
            await self._check_read_with_exec(path, user=user)
        there = await self._validate_path_access(path)
        try:
            return io.BytesIO(await asyncio.to_thread(self.environment.read_file, there.as_posix()))
        except NotFound as error:
            raise WorkspaceReadNotFoundError(path=path, cause=error) from error
        except WaypointError as error:
            raise WorkspaceArchiveReadError(path=path, cause=error) from error

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        if user is not None:
            await self._check_write_with_exec(path, user=user)
        there = await self._validate_path_access(path, for_write=True)
        content = _content(data, path)
        try:
            await asyncio.to_thread(self.environment.write_file, there.as_posix(), content)
        except WaypointError as error:
            raise WorkspaceArchiveWriteError(path=path, cause=error) from error

    async def persist_workspace(self) -> io.IOBase:
        """The workspace as a tar archive, without what the SDK makes anew by itself."""
        packed, kept = io.BytesIO(), io.BytesIO()
        skip = self._persist_workspace_skip_relpaths()

        def keep(piece: bytes) -> None:
            packed.write(piece)

        try:
            await asyncio.to_thread(self.environment.pack_archive, self._root, keep)
            packed.seek(0)
            with tarfile.open(fileobj=packed) as source, tarfile.open(fileobj=kept, mode="w") as target:
                for member in source:
                    if not should_skip_tar_member(member.name, skip_rel_paths=skip, root_name=None):
                        target.addfile(member, source.extractfile(member) if member.isreg() else None)
        except (WaypointError, tarfile.TarError) as error:
            raise WorkspaceArchiveReadError(path=Path(self._root), cause=error) from error
        kept.seek(0)
        return kept

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        root = Path(self._root)
        content = _content(data, root)
        try:
            validate_tar_bytes(content, allow_external_symlink_targets=False)
            await asyncio.to_thread(self.environment.unpack_archive, io.BytesIO(content), self._root)
        except (UnsafeTarMemberError, WaypointError) as error:
            raise WorkspaceArchiveWriteError(path=root, cause=error) from error


class StateforkSandboxClient(BaseSandboxClient[StateforkSandboxClientOptions]):
    """`delete`, which the runner calls for sessions that it made, ends the environment."""

    backend_id = "statefork"
    supports_default_options = True

    def __init__(self, *, instrumentation: Instrumentation | None = None) -> None:
        self._instrumentation = instrumentation or Instrumentation()
        self._environments: dict[str, Environment] = {}

    @staticmethod
    def environment(session: BaseSandboxSession) -> Environment:
        """For snapshots, forks and the rest."""
        inner = session._inner if isinstance(session, SandboxSession) else session
        if not isinstance(inner, StateforkSandboxSession):
            raise TypeError(f"{type(inner).__name__} is not a session of StateforkSandboxClient")
        return inner.environment

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: StateforkSandboxClientOptions | None = None,
    ) -> SandboxSession:
        chosen = options or StateforkSandboxClientOptions()
        manifest = self._validate_manifest_for_create(manifest or Manifest())
        identifier = uuid.uuid4()
        environment = await self._make(chosen.method, chosen.arguments)
        state = StateforkSandboxSessionState(
            session_id=identifier,
            manifest=manifest,
            snapshot=resolve_snapshot(snapshot, str(identifier)),
            method=chosen.method,
            arguments=chosen.arguments,
            environment=environment.id,
        )
        return self._wrap_session(StateforkSandboxSession(state, environment), instrumentation=self._instrumentation)

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """The same environment while it lives; else a new one, which the SDK fills from its snapshot."""
        if not isinstance(state, StateforkSandboxSessionState):
            raise TypeError(f"{type(state).__name__} is not a state of StateforkSandboxClient")
        state.assert_path_grants_rebound()
        environment = self._environments.get(state.environment)
        preserved = environment is not None and environment.state == "live"
        if environment is None or not preserved:
            environment = await self._make(state.method, state.arguments)
            state.environment, state.workspace_root_ready = environment.id, False
        session = StateforkSandboxSession(state, environment)
        session._set_start_state_preserved(preserved)
        return self._wrap_session(session, instrumentation=self._instrumentation)

    async def delete(self, session: SandboxSession) -> SandboxSession:
        environment = self.environment(session)
        self._environments.pop(environment.id, None)
        await asyncio.to_thread(environment.destroy)
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, StateforkSandboxSessionState)

    async def _make(self, method: str, arguments: dict[str, Any]) -> Environment:
        environment = await asyncio.to_thread(partial(create_env_manager, method, **arguments))
        self._environments[environment.id] = environment
        return environment


def _content(data: io.IOBase, path: Path) -> bytes:
    content = data.read()
    if isinstance(content, str):
        return content.encode()
    if not isinstance(content, bytes | bytearray):
        raise WorkspaceWriteTypeError(path=path, actual_type=type(content).__name__)
    return bytes(content)
