"""Inspect AI's sandbox `waypoint`: each sample gets a session of its own. Inspect finds it by its entry point.

    Task(..., sandbox="waypoint")                       # a Dockerfile beside the task if there is one, else this machine's root
    Task(..., sandbox=("waypoint", "path/to/Dockerfile"))
    Task(..., sandbox=SandboxEnvironmentSpec("waypoint", WaypointConfig(rootfs="root.tar", user="agent")))

Solvers and tools reach snapshots through `sandbox().as_type(WaypointSandbox)`. That the sandbox itself fails is always
SandboxUnavailableError, never something that looks like a command's output.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    sandboxenv,
)
from inspect_ai.util._sandbox.environment import SandboxUnavailableError, SandboxUserUnsupportedError
from pydantic import BaseModel, field_validator

from statefork.backends.waypoint import WaypointDriver
from statefork.environment import Environment
from statefork.errors import ExecTimeout, SessionDead, WaypointError, WrongState
from statefork.factory import create_env_manager
from statefork.home import collect, default_home
from statefork.integrations.programs import NO_SUCH_USER, dockerfile_user, in_thread, run_program
from statefork.model import ExecResult as Outcome
from statefork.model import RestoreResult

__all__ = ["WaypointConfig", "WaypointSandbox"]

# Exit codes that say why a file could not be used; the commands run as the sandbox's user, whose permissions count.
_CODES = {91: errno.ENOENT, 92: errno.EISDIR, 93: errno.EACCES, 94: errno.ENOTDIR, 95: errno.EFBIG}
_READ = (
    'if [ -d "$1" ]; then exit 92; fi; if ! [ -e "$1" ]; then exit 91; fi; if ! [ -r "$1" ]; then exit 93; fi;'
    ' if [ "$(stat -L -c %s -- "$1")" -gt "$2" ]; then exit 95; fi; exec cat -- "$1"'
)
_WRITE = (
    'if [ -d "$1" ]; then exit 92; fi; if [ -e "$1" ] && ! [ -w "$1" ]; then exit 93; fi;'
    ' mkdir -p -- "$2" 2>/dev/null || { [ -d "$2" ] || exit 94; }; [ -e "$1" ] || [ -w "$2" ] || exit 93; exec cat > "$1"'
)


class WaypointConfig(BaseModel, frozen=True):
    """What a sample's session is made of; see docs/backends.md for the words."""

    dockerfile_dir: str | None = None
    rootfs: str | None = None
    """A directory or an archive; with neither of the two, this machine's own root, copy-on-write."""
    network: Literal["none", "nat", "host"] = "none"
    memory: str | None = None
    cpus: float | None = None
    env: tuple[tuple[str, str], ...] = ()
    """Variables; a mapping will do. Inspect keeps configurations as keys, so it is stored as pairs."""
    user: str | None = None
    """Whom commands run as unless they say; by default the Dockerfile's USER, else root."""
    workdir: str | None = None
    """The sample's directory, which relative paths start from; by default a new one in /tmp, or the image's WORKDIR."""
    home: str | None = None

    @field_validator("env", mode="before")
    @classmethod
    def _pairs(cls, given: Any) -> Any:
        return tuple(sorted(given.items())) if isinstance(given, dict) else given


@sandboxenv(name="waypoint")
class WaypointSandbox(SandboxEnvironment):
    def __init__(self, environment: Environment, directory: str, user: str | None = None) -> None:
        super().__init__()
        self.environment = environment
        """For everything that Inspect has no word for."""
        self._directory = directory
        self._user = user

    # -- life ---------------------------------------------------------------------------------------------------------

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """Make one and let it go: what is wrong with the Dockerfile or the host should be known before the samples."""
        environment = await _make(_config(config))
        await in_thread(environment.destroy)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        chosen = _config(config)
        if chosen.user is None and chosen.dockerfile_dir is not None:
            user = dockerfile_user(Path(chosen.dockerfile_dir, "Dockerfile"))
            chosen = chosen.model_copy(update={"user": user})
        environment = await _make(chosen)
        try:
            directory = await _directory(environment, chosen)
        except BaseException:
            environment.destroy()
            raise
        return {"default": cls(environment, directory, chosen.user)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for one in environments.values():
            await in_thread(one.as_type(cls).environment.destroy)

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """What evaluations that were killed have left: in the default state directory, so not that of a `home`."""
        if id is None:
            await in_thread(lambda: list(collect(default_home(), [WaypointDriver])))

    @classmethod
    def config_files(cls) -> list[str]:
        return ["Dockerfile"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return WaypointConfig(**config)

    def default_polling_interval(self) -> float:
        return 0.2

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        if self.environment.state != "live":
            raise ConnectionError(f"the sandbox is {self.environment.state}")
        return SandboxConnection(type="waypoint", command=f"waypoint shell {self.environment.description}")

    # -- states: what Inspect has no word for -------------------------------------------------------------------------

    async def snapshot(self, name: str | None = None) -> str:
        return await in_thread(lambda: self.environment.snapshot(name))

    async def restore(self, snapshot: str) -> RestoreResult:
        return await in_thread(lambda: self.environment.restore(snapshot))

    async def fork(self, n: int = 1, *, from_snapshot: str | None = None) -> list[WaypointSandbox]:
        """The caller ends them: `fork.environment.destroy()`."""
        made = await in_thread(lambda: self.environment.fork(n, from_snapshot=from_snapshot))
        return [WaypointSandbox(environment, self._directory, self._user) for environment in made]

    # -- commands and files -------------------------------------------------------------------------------------------

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """A command that outlives its timeout is ended, with its children, and not tried again: it may have done half."""
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        result = await self._run(
            cmd,
            stdin=input,
            cwd=self._path(cwd or "."),
            env=env,
            user=user,
            timeout=timeout,
            limit_bytes=limit,
        )
        if result.truncated:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, result.output)
        if result.exit_code == NO_SUCH_USER and user is not None:
            raise SandboxUserUnsupportedError(result.stderr.strip())
        if result.exit_code == 126 and "ermission denied" in result.stderr:
            raise PermissionError(errno.EACCES, result.stderr.strip())
        return ExecResult(result.ok, result.exit_code, result.stdout, result.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        path = self._path(file)
        argv = ["/bin/sh", "-c", _WRITE, "sh", path, posixpath.dirname(path)]
        result = await self._run(argv, stdin=contents.encode() if isinstance(contents, str) else contents)
        _check(result, path)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...
    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        path, limit = self._path(file), SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        argv = ["/bin/sh", "-c", _READ, "sh", path, str(limit)]
        result = await self._run(argv, limit_bytes=2 * limit + 1024)  # each half of what is kept must hold it all
        _check(result, path)
        return result.stdout_bytes.decode() if text else result.stdout_bytes

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._directory, path))

    async def _run(
        self,
        argv: list[str],
        *,
        stdin: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        limit_bytes: int | None = None,
    ) -> Outcome:
        try:
            return await run_program(
                self.environment,
                argv,
                user=user if user is not None else self._user,
                stdin=stdin,
                cwd=cwd,
                env=env,
                timeout=timeout,
                output_limit_bytes=limit_bytes or SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
            )
        except ExecTimeout as error:
            raise TimeoutError(f"{argv[0]} was ended after {timeout} seconds") from error
        except (SessionDead, WrongState) as error:
            raise SandboxUnavailableError(str(error)) from error


def _check(result: Outcome, path: str) -> None:
    if result.ok:
        return
    code = _CODES.get(result.exit_code)
    if code == errno.EFBIG:
        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
    if code is None:
        raise OSError(errno.EIO, result.stderr.strip() or f"ended in {result.exit_code}", path)
    words: dict[int, Callable[..., OSError]] = {
        errno.ENOENT: FileNotFoundError,
        errno.EISDIR: IsADirectoryError,
        errno.EACCES: PermissionError,
        errno.ENOTDIR: NotADirectoryError,
    }
    said = {errno.EISDIR: "it is a directory", errno.ENOENT: "no such file", errno.EACCES: "permission denied"}
    raise words[code](code, said.get(code, "a file is in the way"), path)


def _config(config: SandboxEnvironmentConfigType | None) -> WaypointConfig:
    if config is None or isinstance(config, WaypointConfig):
        return config or WaypointConfig()
    if isinstance(config, str):  # a file that Inspect found beside the task, or was told
        path = Path(config)
        return WaypointConfig(dockerfile_dir=str(path.parent if path.name == "Dockerfile" else path))
    raise ValueError(f"the sandbox waypoint takes a Dockerfile or a WaypointConfig, not {type(config).__name__}")


async def _make(config: WaypointConfig) -> Environment:
    arguments = config.model_dump(exclude={"home", "user", "env"}, exclude_none=True, exclude_defaults=True)
    arguments |= {"user": "root", "env": dict(config.env)}
    try:
        return await in_thread(lambda: create_env_manager("waypoint_build", home=config.home, **arguments))
    except WaypointError as error:
        raise RuntimeError(f"the sandbox waypoint could not be made: {error}") from error


async def _directory(environment: Environment, config: WaypointConfig) -> str:
    """Where the sample's files go. One that is made for it is the user's own; one that the image has stays as it is."""
    script = (
        'if [ -d "$1" ]; then cd -- "$1" && pwd; exit; fi;'
        ' if [ -n "$1" ]; then mkdir -p -- "$1" && cd -- "$1"; else cd "$(mktemp -d /tmp/sample.XXXXXX)"; fi || exit;'
        ' [ -z "$2" ] || chown "$2" . || exit; pwd'
    )
    where = config.workdir or ("" if config.dockerfile_dir is None else ".")
    result = await run_program(environment, ["/bin/sh", "-c", script, "sh", where, config.user or ""])
    if not result.ok:
        raise RuntimeError(f"the sample's directory could not be made: {result.stderr.strip()}")
    return result.stdout.strip()
