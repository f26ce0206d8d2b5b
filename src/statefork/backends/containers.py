"""What docker and podman have in common, which is nearly everything: containers kept alive, committed and run again.

A snapshot is an image made by `commit`: the container's files and its configuration (ENV, WORKDIR, USER). Processes,
memory and volumes are not in it. The command line tools are used, not an SDK: they are the one interface that both
have, they honour the user's contexts and environment, and the path that counts (exec in the shell) starts no
program at all (docs/decisions/container-tools.md).
"""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import shutil
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from statefork.backends.guest_run import run_in_guest
from statefork.backends.persistent_shell import WRAPPER, Channel, PersistentShell
from statefork.backends.probe_cache import remembered
from statefork.backends.programs import Child
from statefork.driver import Captured, Driver, Live, Place
from statefork.errors import (
    BuildError,
    DiskFull,
    HostUnsupported,
    KernelError,
    NotFound,
    SessionDead,
    UsageError,
    WaypointError,
)
from statefork.manifest import Manifest, manifest_of_tar
from statefork.model import Capabilities, Capability, ExecRequest, ExecResult, Mode, RunRequest
from waypoint.kernel.programs import Finished, run_program

__all__ = [
    "ContainerDriver",
    "ContainerLive",
    "ContainerTool",
    "Source",
    "export_manifest",
    "label_options",
    "remove_container",
]

HOME_LABEL, TREE_LABEL = "statefork.home", "statefork.tree"
SNAPSHOT_REPOSITORY = "statefork-snapshot"
BASE_REPOSITORY = "statefork-base"

KEEP_ALIVE = 'trap "exit 0" TERM; while :; do sleep 86400 & wait "$!"; done'
"""PID 1: does nothing, and reaps what others leave behind."""

_versions: dict[tuple[str, int], str] = {}

CALL_TIMEOUT = 300.0
CHANGING_SECONDS = 10.0
BUILD_TIMEOUT = 3600.0


@dataclass(frozen=True, slots=True)
class Source:
    """Where a container comes from: exactly one of a Dockerfile's directory, an image, or a container that runs."""

    dockerfile_dir: Path | None = None
    base_image: str | None = None
    container_name: str | None = None
    extra_args: tuple[str, ...] = ()
    """For every `run` of this tree, the first one and those that bring snapshots back."""


class ContainerTool:
    """`docker` or `podman` with the arguments that always go first."""

    def __init__(
        self, program: str, first: Sequence[str] = (), *, install: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.program = program
        self.install = install
        self.env = env
        # podman would first ask politely and wait ten seconds; docker does not know the option
        self.remove = ["rm", "-f", "-v", *(["-t", "0"] if program == "podman" else [])]
        self._first = (program, *first)

    def altered(self, *first: str, env: Mapping[str, str]) -> ContainerTool:
        """The same tool with more arguments up front, in another environment."""
        return ContainerTool(self.program, [*self._first[1:], *first], install=self.install, env=env)

    def argv(self, *arguments: str) -> list[str]:
        return [*self._first, *arguments]

    def call(self, *arguments: str, stdin: bytes = b"", timeout: float = CALL_TIMEOUT) -> Finished:
        """Run to the end; a non-zero exit is for the caller to judge."""
        deadline = time.monotonic() + CHANGING_SECONDS
        try:
            while True:
                done = run_program(self.argv(*arguments), timeout=timeout, stdin=stdin, env=self.env)
                if not _met_a_change(arguments, done) or time.monotonic() > deadline:
                    return done
                time.sleep(0.05)
        except HostUnsupported as error:
            raise HostUnsupported(f"{self.program} is not installed: {self.install}", fix=self.install) from error

    def ask(self, what: str, *arguments: str, stdin: bytes = b"") -> str:
        """What it printed, or its failure as one of our errors."""
        done = self.call(*arguments, stdin=stdin)
        if done.exit_code != 0:
            raise self.failure(what, done.stderr.decode(errors="replace") or done.text)
        return done.text

    def failure(self, what: str, said: str) -> WaypointError:
        said = said.strip()
        lowered = said.lower()
        if "no space left on device" in lowered:
            return DiskFull(f"{what}: {said}; free some space where {self.program} keeps its data")
        if "cannot connect to the docker daemon" in lowered or "error during connect" in lowered:
            return HostUnsupported(f"{what}: {said}", fix=self.install)
        if "no such image" in lowered or "image not known" in lowered or "unable to find image" in lowered:
            return NotFound(f"{what}: {said}")
        if "no such container" in lowered or "is not running" in lowered or "no container with" in lowered:
            return SessionDead(f"{what}: {said}")
        if "container state improper" in lowered:
            return SessionDead(f"{what}: {said}")
        return KernelError(f"{what}: {said}")


def _met_a_change(arguments: Sequence[str], done: Finished) -> bool:
    """podman looks at all images to find one, and stumbles over one that another process is making or removing."""
    return done.exit_code != 0 and "inspect" in arguments and b"locating item named" in done.stderr


class ContainerLive(Live):
    """A running container; `owned` is False for one that somebody else made."""

    _settle_seconds = 0.0

    def __init__(self, tool: ContainerTool, container: str, *, owned: bool) -> None:
        self.description = container
        self._tool = tool
        self._container = container
        self._owned = owned
        self._known_facts: list[str] = []
        self._shell = PersistentShell(self._open_channel, self._aside, self._stage, self._dead)

    def exec(self, request: ExecRequest) -> ExecResult:
        return self._shell.exec(request)

    def run(self, request: RunRequest) -> ExecResult:
        return run_in_guest(self._wrap, request, self._dead, settle_seconds=self._settle_seconds)

    def capture(self, place: Place, mode: Mode, parent: Captured | None) -> Captured:
        image = f"{SNAPSHOT_REPOSITORY}:{place.name}"
        labels = [f"--change=LABEL {key}={json.dumps(value)}" for key, value in _marks(place)]
        what = f"snapshot of container {self._container}"
        self._tool.ask(what, "commit", *self._commit_options(), *labels, self._container, image)
        _, base, *volumes = self._facts()
        size = self._size(image)
        before = parent.handle.size_bytes if parent is not None else self._size(base)
        lost = ("processes", "memory", *(f"volume {path}" for path in volumes))
        return Captured(
            handle=StoredImage(image, size),
            captured=(Capability.FILES,),
            not_captured=lost,
            files_bytes=max(size - before, 0),
        )

    def suspend(self) -> None:
        self._tool.ask("pause", "pause", self._container)

    def proceed(self) -> None:
        self._tool.ask("resume", "unpause", self._container)

    def stop(self) -> None:
        self._shell.close()
        if self._owned:
            remove_container(self._tool, self._container)

    def manifest(self) -> Manifest:
        return export_manifest(self._tool, self._container)

    def _commit_options(self) -> list[str]:
        return ["--pause=true"]

    def _facts(self) -> list[str]:
        """Its pid, its image, and where volumes are mounted: these stay as they are, and to ask costs a tenth of a second."""
        if not self._known_facts:
            wanted = "{{.State.Pid}}\n{{.Image}}{{range .Mounts}}\n{{.Destination}}{{end}}"
            said = self._tool.ask("inspect", "container", "inspect", "-f", wanted, self._container)
            self._known_facts = said.splitlines()
        return self._known_facts

    def _size(self, image: str) -> int:
        return int(self._tool.ask("inspect", "image", "inspect", "-f", "{{.Size}}", image))

    def _wrap(self, request: RunRequest, argv: Sequence[str]) -> list[str]:
        options = ["-w", request.cwd] if request.cwd else []
        for key, value in request.env.items():
            options += ["-e", f"{key}={value}"]
        return self._tool.argv("exec", "-i", *options, self._container, *argv)

    def _open_channel(self) -> Channel:
        return Child(self._tool.argv("exec", "-i", self._container, "sh", "-c", WRAPPER))

    def _aside(self, script: str, *arguments: str) -> None:
        self.run(RunRequest(("sh", "-c", script, "sh", *arguments), timeout=30))

    def _stage(self, data: bytes) -> str:
        path = f"/tmp/.statefork-{secrets.token_hex(8)}"
        self.write_file(path, data, 0o600)
        return path

    def _dead(self, said: str) -> WaypointError:
        """A shell that will not start in a container that runs is one thing, a container that is gone another."""
        running = self._tool.call("container", "inspect", "-f", "{{.State.Running}}", self._container)
        if running.exit_code == 0 and running.text == "true":
            return self._tool.failure(f"container {self._container} cannot run `sh`", said)
        return SessionDead(f"container {self._container} is not running any more: {said}")


@dataclass(frozen=True, slots=True)
class StoredImage:
    image: str
    size_bytes: int


class ContainerDriver(Driver):
    """Files only: what `commit` keeps. docker.py and podman.py say which tool and with which arguments."""

    name: ClassVar[str]
    version_format: ClassVar[str] = "{{.Server.Version}}"
    has_daemon: ClassVar[bool] = True
    """False: a program that answered once will do so again."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._tool = self.make_tool()
        self._built: str | None = None
        self._build_lock = threading.Lock()

    @classmethod
    def make_tool(cls) -> ContainerTool:
        raise NotImplementedError

    def run_options(self) -> list[str]:
        """Arguments of this host for every `run`."""
        return []

    # -- the contract -------------------------------------------------------------------------------------------------

    def probe(self) -> Capabilities:
        """That the tool answers is asked each time; that it can store is tried once a boot."""
        version = self._version()
        return remembered(f"{self.name}-{version}", self.probe_tools(), lambda: self._try(version))

    def probe_tools(self) -> list[str]:
        return [self._tool.program]

    def start(self, place: Place) -> Live:
        if self.source.container_name is not None and self.source.base_image is None:
            raise UsageError("a container name alone is for attach")
        return self._run(self._base(place), place)

    def attach(self, place: Place) -> Live:
        name = self.source.container_name or ""
        found = self._tool.call("container", "inspect", "-f", "{{.State.Running}}", name)
        if found.exit_code != 0:
            raise NotFound(f"{self.name} has no container {name!r}: {found.tail()}")
        if found.text != "true":
            raise NotFound(f"container {name!r} is not running; start it first: {self.name} start {name}")
        if self.source.base_image is not None:
            found = self._tool.call("image", "inspect", "-f", "{{.Id}}", self.source.base_image)
            if found.exit_code != 0:
                raise self._no_image(self.source.base_image)
        return self._live(name, owned=False)

    def revive(self, captured: Captured, place: Place) -> Live:
        return self._run(captured.handle.image, place)

    def discard(self, captured: Captured) -> None:
        remove_image(self._tool, captured.handle.image)

    def manifest(self, captured: Captured, place: Place) -> Manifest:
        container = f"statefork-{place.name}"
        self._tool.ask("diff", "create", "--name", container, *label_options(place), captured.handle.image)
        try:
            return export_manifest(self._tool, container)
        finally:
            remove_container(self._tool, container)

    def close(self) -> None:
        if self._built is not None:
            remove_image(self._tool, self._built)
            self._built = None

    @classmethod
    def sweep(cls, home: Path, in_use: Callable[[str], bool]) -> Iterable[str]:
        tool = cls.make_tool()
        try:
            listed = tool.call("ps", "-a", "-q", "--no-trunc", "--filter", f"label={HOME_LABEL}={home}")
        except HostUnsupported:
            return
        if listed.exit_code != 0:
            return
        for container in listed.text.split():
            if not in_use(_label_of(tool, "container", container)):
                remove_container(tool, container)
                yield f"{cls.name} container {container[:12]}"
        yield from _sweep_images(cls.name, tool, home, in_use)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _version(self) -> str:
        program = shutil.which(self._tool.program) if not self.has_daemon else None
        key = (program, Path(program).stat().st_mtime_ns) if program else None
        if key is None or key not in _versions:
            found = self._tool.ask(f"{self.name} does not answer", "version", "--format", self.version_format)
            if key is None:
                return found
            _versions[key] = found
        return _versions[key]

    def _try(self, version: str) -> Capabilities:
        """Make an image out of nothing, a container of it, commit that, and remove all three."""
        mark = secrets.token_hex(6)
        image, second, container = f"statefork-probe:{mark}", f"statefork-probe:{mark}-2", f"statefork-probe-{mark}"
        what = f"{self.name} cannot store containers on this host"
        try:
            self._tool.ask(what, "import", "-", image, stdin=_empty_archive())
            self._tool.ask(what, "create", "--name", container, *self.run_options(), image, "/none")
            self._tool.ask(what, "commit", container, second)
        except KernelError as error:
            raise HostUnsupported(error.message, fix=self._tool.install) from error
        finally:
            self._tool.call(*self._tool.remove, container)
            self._tool.call("rmi", "-f", second, image)
        return Capabilities(
            backend=self.name,
            restores=frozenset({Capability.FILES}),
            pause_releases_memory=False,
            snapshot_during_exec=True,
            versions={self.name: version},
        )

    def _live(self, container: str, *, owned: bool) -> ContainerLive:
        return ContainerLive(self._tool, container, owned=owned)

    def _run(self, image: str, place: Place) -> Live:
        container = f"statefork-{place.name}"
        what = f"starting a container of {image}"
        options = ["--pull=never", *self.run_options(), *label_options(place), *self.source.extra_args]
        done = self._tool.call(
            "run", "-d", "--name", container, *options, "--entrypoint", "/bin/sh", image, "-c", KEEP_ALIVE
        )
        if done.exit_code != 0:
            remove_container(self._tool, container)
            raise self._not_started(what, image, done.stderr.decode(errors="replace"))
        return self._live(container, owned=True)

    def _not_started(self, what: str, image: str, said: str) -> WaypointError:
        error = self._tool.failure(what, said)
        return self._no_image(image) if isinstance(error, NotFound) and image == self.source.base_image else error

    def _base(self, place: Place) -> str:
        if self.source.base_image is not None:
            return self.source.base_image
        directory = self.source.dockerfile_dir
        assert directory is not None
        with self._build_lock:
            if self._built is None:
                self._built = self._build(directory, place)
            return self._built

    def _build(self, directory: Path, place: Place) -> str:
        if not (directory / "Dockerfile").is_file() and not (directory / "Containerfile").is_file():
            raise NotFound(f"{directory} has no Dockerfile")
        image = f"{BASE_REPOSITORY}:{place.tree}"
        arguments = ["build", "-t", image, *label_options(place), str(directory)]
        if not (directory / "Dockerfile").is_file():
            arguments[1:1] = ["-f", str(directory / "Containerfile")]
        done = self._tool.call(*arguments, timeout=BUILD_TIMEOUT)
        if done.exit_code != 0:
            remove_image(self._tool, image)
            raise BuildError(f"building {directory} with {self.name} failed:\n{done.tail()}", output=done.text)
        return image

    def _no_image(self, image: str) -> NotFound:
        return NotFound(
            f"{self._tool.program} has no image {image!r} on this host; pull, build or import it first "
            f"(`{self._tool.program} images` lists what is there)"
        )


def remove_container(tool: ContainerTool, container: str) -> None:
    """It is no error if there is none."""
    done = tool.call(*tool.remove, container)
    said = done.tail().lower()
    if done.exit_code != 0 and "no such container" not in said and "no container with" not in said:
        raise tool.failure(f"removing container {container}", done.tail())


def remove_image(tool: ContainerTool, image: str) -> None:
    done = tool.call("rmi", "-f", image)
    said = done.tail().lower()
    if done.exit_code != 0 and "no such image" not in said and "image not known" not in said:
        raise tool.failure(f"removing image {image}", said)


def export_manifest(tool: ContainerTool, container: str) -> Manifest:
    """Read `export` on the fly: nothing is kept but the digests."""
    child = Child(tool.argv("export", container))
    try:
        child.feed(None, end=True)
        with open(child.stdout, "rb", closefd=False) as stream:
            try:
                entries = manifest_of_tar(stream)
            except tarfile.TarError as error:
                raise KernelError(f"{tool.program} export {container}: {error}") from error
            while stream.read(1 << 20):
                pass
        if child.wait(30) != 0:
            raise KernelError(f"{tool.program} export {container} failed; is the container still there?")
    finally:
        child.close()
    # The tool itself puts these into every container, empty, and fills them when it runs.
    for path in ("/.dockerenv", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab", "/run/.containerenv"):
        entries.pop(path, None)
    return entries


def _sweep_images(name: str, tool: ContainerTool, home: Path, in_use: Callable[[str], bool]) -> Iterable[str]:
    """Newest first, so that an image goes before the one that it was made from."""
    listed = tool.call("images", "-q", "--no-trunc", "--filter", f"label={HOME_LABEL}={home}")
    for image in dict.fromkeys(listed.text.split()):
        if not in_use(_label_of(tool, "image", image)):
            with contextlib.suppress(WaypointError):  # a user's own image may be built on it
                remove_image(tool, image)
                yield f"{name} image {image.removeprefix('sha256:')[:12]}"


def _label_of(tool: ContainerTool, kind: str, thing: str) -> str:
    return tool.call(kind, "inspect", "-f", f'{{{{index .Config.Labels "{TREE_LABEL}"}}}}', thing).text


def _marks(place: Place) -> list[tuple[str, str]]:
    return [(HOME_LABEL, str(place.home)), (TREE_LABEL, place.tree)]


def label_options(place: Place) -> list[str]:
    return [word for key, value in _marks(place) for word in ("--label", f"{key}={value}")]


def _empty_archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("none"))
    return buffer.getvalue()
