"""Harbor trials on Waypoint: `harbor run -e statefork.integrations.harbor:WaypointEnvironment`.

Each command is a program of its own, as Harbor's other environments run them; what it leaves running (servers, tmux)
stays, and is part of every snapshot. Agents call `snapshot`, `restore` and `fork` on the environment that Harbor gives
them. Nothing of the host is mounted: Harbor copies tests in and logs out.
"""

from __future__ import annotations

import asyncio
import codecs
import copy
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from harbor.environments.base import BaseEnvironment, ExecResult, OutputCallback
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.models.trial.config import ResourceMode

from statefork.environment import Environment
from statefork.errors import ExecTimeout, WaypointError, WrongState
from statefork.experiment.base import IMAGE, give_to_waypoint
from statefork.factory import create_env_manager
from statefork.home import default_home
from statefork.integrations.programs import dockerfile_user, in_thread, run_program
from statefork.model import OnOutput, RestoreResult, Stream
from waypoint.engine import Engine

__all__ = ["WaypointEnvironment"]

T = TypeVar("T")


class WaypointEnvironment(BaseEnvironment):
    """Takes from `--ek`: `home` (StateFork's state directory), `store` (Waypoint's), `rootfs` (a directory or archive to
    start from instead of the task's Dockerfile), `network` (none, nat or host; by default what the task asks for)."""

    def __init__(
        self,
        *args: Any,
        home: str | None = None,
        store: str | None = None,
        rootfs: str | None = None,
        network: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._home, self._store, self._rootfs, self._network = home, store, rootfs, network
        self._live: Environment | None = None
        self._forks: list[WaypointEnvironment] = []
        self._stopped = False
        self._changing = threading.Lock()
        self._shell = "sh"
        super().__init__(*args, **kwargs)
        if self._network_disabled and network not in (None, "none"):
            raise ValueError(f"the task asks for no network, which network={network} would give it")
        self._image_user = dockerfile_user(self._dockerfile)

    # -- what Harbor asks before it starts anything ------------------------------------------------------------------

    @staticmethod
    def type() -> str:
        return "waypoint"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    @classmethod
    def preflight(cls) -> None:
        from statefork.backends.waypoint import BACKEND

        try:
            found = BACKEND.probe()
        except WaypointError as error:
            raise SystemExit(f"Waypoint does not work here: {error}; `waypoint doctor` tells more") from error
        if not found.full:
            raise SystemExit(f"Waypoint cannot store processes here: {dict(found.missing)}; see `waypoint doctor`")

    @property
    def _dockerfile(self) -> Path:
        return Path(self.environment_dir) / "Dockerfile"

    def _validate_definition(self) -> None:
        if (Path(self.environment_dir) / "docker-compose.yaml").exists():
            raise ValueError(f"{self.environment_dir} is a compose project; Waypoint runs tasks with one Dockerfile")
        if self._rootfs is None and not self._dockerfile.exists():
            raise FileNotFoundError(
                f"{self._dockerfile} does not exist, and images are not pulled; name a root file system: --ek rootfs=FILE"
            )

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self, force_build: bool) -> None:
        """Built steps are cached by content, so `force_build` makes no difference: what changed is built."""
        self._stopped = False
        arguments: dict[str, Any] = {"user": "root", "workdir": self.task_env_config.workdir, "store": self._store}
        if self._rootfs:
            arguments["rootfs"] = self._rootfs
        else:
            arguments["dockerfile_dir"] = str(self.environment_dir)
        arguments["network"] = self._network or ("none" if self._network_disabled else "nat")
        arguments["cpus"] = self._resource_limit_value("cpu", auto_mode=ResourceMode.LIMIT)
        memory_mb = self._resource_limit_value("memory", auto_mode=ResourceMode.LIMIT)
        arguments["memory"] = f"{memory_mb}M" if memory_mb else None
        await in_thread(self._give_base)
        given = {name: value for name, value in arguments.items() if value is not None}
        await in_thread(lambda: self._make(given))
        if (await run_program(self.environment, ["sh", "-c", "command -v bash"])).ok:
            self._shell = "bash"
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """The environment ends with its owner's process in any case, so `delete=False` keeps nothing either."""
        for fork in self._forks:
            await fork.stop(delete)
        await in_thread(self._end)

    def _make(self, arguments: dict[str, Any]) -> None:
        """Harbor cancels a start that takes too long, and then stops; what is being made meanwhile must not be lost."""
        with self._changing:
            if not self._stopped:
                self._live = create_env_manager("waypoint_build", home=self._home, **arguments)

    def _end(self) -> None:
        with self._changing:
            self._stopped = True
            live, self._live = self._live, None
            if live is not None:
                live.destroy()

    def _give_base(self) -> None:
        """The image that the tasks of this repository are built from is in no registry."""
        if self._rootfs is None and f"FROM {IMAGE}" in self._dockerfile.read_text():
            home = Path(self._home) if self._home else default_home()
            with Engine(Path(self._store or os.environ.get("WAYPOINT_HOME") or home / "waypoint")) as engine:
                give_to_waypoint(engine)

    # -- states: what Harbor has no word for --------------------------------------------------------------------------

    @property
    def environment(self) -> Environment:
        """The environment itself, for everything else that it can do."""
        if self._live is None:
            raise WrongState(f"{self.session_id} has not been started, or was stopped")
        return self._live

    async def snapshot(self, name: str | None = None) -> str:
        """Files, processes, memory, tmux sessions and all; returns the snapshot's id."""
        return await in_thread(lambda: self.environment.snapshot(name))

    async def restore(self, snapshot: str) -> RestoreResult:
        return await in_thread(lambda: self.environment.restore(snapshot))

    async def fork(self, n: int = 1, *, from_snapshot: str | None = None) -> list[WaypointEnvironment]:
        """N more environments for Harbor's agents. They end with this one, unless stopped before."""
        return await in_thread(lambda: self._fork(n, from_snapshot))

    def _fork(self, n: int, from_snapshot: str | None) -> list[WaypointEnvironment]:
        forks = []
        for live in self.environment.fork(n, from_snapshot=from_snapshot):
            fork = copy.copy(self)
            fork._live, fork._forks, fork._changing = live, [], threading.Lock()
            self._forks.append(fork)
            fork.session_id = f"{self.session_id}__fork{len(self._forks)}"
            forks.append(fork)
        return forks

    # -- commands and files -------------------------------------------------------------------------------------------

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        user = self._resolve_user(user)
        try:
            async with _told(self._output_callback()) as on_output:
                result = await run_program(
                    self.environment,
                    [self._shell, "-c", command],
                    user=user if user is not None else self._image_user,
                    timeout=timeout_sec,
                    cwd=cwd,  # else where the session begins: the task's workdir, or the image's
                    env=self._merge_env(env),
                    on_output=on_output,
                )
        except ExecTimeout as error:  # what Harbor's own docker environment raises, in its words
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from error
        return ExecResult(stdout=result.stdout, stderr=result.stderr, return_code=result.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await in_thread(lambda: self.environment.upload(source_path, target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await in_thread(lambda: self.environment.upload(source_dir, target_dir))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await in_thread(lambda: self.environment.download(source_path, target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await in_thread(lambda: self.environment.download(source_dir, target_dir))


@asynccontextmanager
async def _told(callback: OutputCallback | None) -> AsyncIterator[OnOutput | None]:
    """Output arrives on a thread, in pieces that may end inside a character; it is told in its order, all of it, before
    the command's result is."""
    if callback is None:
        yield None
        return
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[Stream, bytes] | None]()
    decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in ("stdout", "stderr")}

    async def tell() -> None:
        while (piece := await pieces.get()) is not None:
            text = decoders[piece[0]].decode(piece[1])
            if text:
                await callback(text, piece[0])

    telling = asyncio.create_task(tell())
    try:
        yield lambda stream, data: _put(loop, pieces, (stream, data))
    finally:
        pieces.put_nowait(None)
        await telling


def _put(loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[T], piece: T) -> None:
    loop.call_soon_threadsafe(pieces.put_nowait, piece)
