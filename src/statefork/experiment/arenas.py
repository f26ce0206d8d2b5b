"""Where tasks are played: for each backend a way to a fresh environment of a task. Images are built once, by content."""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from statefork.backends.containers import ContainerTool
from statefork.backends.docker import DockerDriver
from statefork.backends.podman import podman_tool
from statefork.environment import Environment
from statefork.errors import NotFound, WaypointError
from statefork.experiment import base
from statefork.experiment.tasks import Task
from statefork.factory import create_env_manager
from statefork.home import collect
from statefork.registry import backends
from statefork.testing.images import cache_directory
from waypoint.bases import base_from_dockerfile
from waypoint.engine import Engine
from waypoint.store.database import FORMAT_VERSION

__all__ = ["BACKENDS", "Arena", "default_arena_home", "find_arenas"]

BACKENDS = ("waypoint", "docker", "hybrid", "podman")


def default_arena_home() -> Path:
    """Images of tasks can be built again at any time: it is a cache."""
    return cache_directory() / "experiment"


class Arena:
    """One backend that works here."""

    def __init__(self, backend: str, home: Path) -> None:
        self.backend = backend
        self.home = home
        self._lock = threading.Lock()
        self._ready: set[str] = set()
        self.restores = frozenset(str(one) for one in backends()[backend].probe().restores)
        """What a restore brings back with it, found by trying."""

    def prepare(self, task: Task) -> None:
        """Build the task's image, unless it was built from the same files before."""
        raise NotImplementedError

    def fresh(self, task: Task) -> Environment:
        """A new environment as the task begins; nothing of it was used before."""
        raise NotImplementedError

    def _once(self, task: Task, build: Callable[[], None]) -> None:
        with self._lock:
            key = _key(task)
            if key not in self._ready:
                build()
                self._ready.add(key)


class _WaypointArena(Arena):
    """The Dockerfile's directory is copied to a place named after its content: a build is known by its directory."""

    @property
    def _store(self) -> Path:
        return self.home / f"waypoint-{FORMAT_VERSION}"  # the home is a cache that outlives a version of the engine

    def _context(self, task: Task) -> Path:
        return self._store.with_suffix(".contexts") / _key(task)

    def prepare(self, task: Task) -> None:
        self._once(task, lambda: self._build(task))

    def _build(self, task: Task) -> None:
        context = self._context(task)
        name = f"statefork-task-{_key(task)}"
        with Engine(self._store) as engine:
            with suppress(NotFound):
                if engine.store.db.base(name).source == str(context.resolve()):
                    return
            base.give_to_waypoint(engine)
            shutil.rmtree(context, ignore_errors=True)
            shutil.copytree(task.environment_dir, context)
            base_from_dockerfile(engine.store, context, name=name)

    def fresh(self, task: Task) -> Environment:
        self.prepare(task)
        return create_env_manager(
            "waypoint_build",
            home=self.home,
            store=self._store,
            dockerfile_dir=self._context(task),
            build=False,
        )


class _ContainerArena(Arena):
    def __init__(self, backend: str, home: Path) -> None:
        super().__init__(backend, home)
        self._tool: ContainerTool = DockerDriver.make_tool() if backend == "docker" else podman_tool()

    def _image(self, task: Task) -> str:
        return f"localhost/statefork-task:{_key(task)}"

    def prepare(self, task: Task) -> None:
        self._once(task, lambda: self._build(task))

    def _build(self, task: Task) -> None:
        if self._tool.call("image", "inspect", self._image(task)).exit_code == 0:
            return
        base.give_to_container_tool(self._tool)
        what = f"building {task.environment_dir} with {self._tool.program}"
        self._tool.ask(what, "build", "-t", self._image(task), str(task.environment_dir))

    def fresh(self, task: Task) -> Environment:
        self.prepare(task)
        own = {"container_name": f"statefork-task-{secrets.token_hex(6)}"} if self.backend == "hybrid" else {}
        return create_env_manager(
            f"{self.backend}_build",
            home=self.home,
            base_image=self._image(task),
            extra_args="--network none",
            **own,
        )


def _key(task: Task) -> str:
    return f"{task.name}-{task.digest()}"


def find_arenas(home: Path, names: Sequence[str]) -> tuple[list[Arena], dict[str, str]]:
    """Those that work on this host, and why each of the others does not. What killed runs left behind there is removed."""
    found: list[Arena] = []
    missing: dict[str, str] = {}
    for name in names:
        try:
            list(collect(home, [backends()[name].driver]))
            found.append(_WaypointArena(name, home) if name == "waypoint" else _ContainerArena(name, home))
        except WaypointError as error:
            missing[name] = error.message
    return found, missing
