"""Podman + CRIU: files and processes together, by `podman container checkpoint` and `restore --import`.

A snapshot is an archive of the container's changed files and of CRIU's images; the container goes on. It is brought
back as a container with a name of its own, any number of times. The persistent shell is part of the container
(fifos.py), so its variables, directory and jobs come back too. What `run` starts is not a child of the container's
PID 1 and cannot be stored while it lives: a snapshot waits for it.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from statefork.backends.container_methods import ARGUMENTS
from statefork.backends.containers import (
    ContainerDriver,
    ContainerLive,
    ContainerTool,
    Source,
    export_manifest,
    label_options,
    remove_container,
)
from statefork.backends.criu_container import (
    Setting,
    archive_sizes,
    have_tools,
    shut_connections,
    sleeper_archive,
)
from statefork.backends.fifos import FIFO_DIRECTORY, FifoChannel, loop_argv, make_fifos
from statefork.backends.gate import Gate
from statefork.backends.persistent_shell import Channel, PersistentShell, ShellState
from statefork.backends.podman import podman_tool, ulimit_options
from statefork.backends.process_tree import command_lines, connections_of, tree_pids
from statefork.driver import Captured, Driver, Live, Place
from statefork.errors import CriuError, Exists, HostUnsupported, KernelError, NotCapturable, NotFound, WaypointError
from statefork.manifest import Manifest
from statefork.model import Capabilities, Capability, ExecRequest, ExecResult, Mode, RunRequest
from statefork.registry import Backend, Method
from waypoint.kernel.tools import criu_argv, criu_version

__all__ = ["BACKEND", "HybridDriver"]

INSTALL = "apt-get install podman runc iproute2, and `waypoint setup` for CRIU"
RUN_TIMEOUT = 30.0
"""How long a snapshot waits for programs of `run` to end."""
CRIU_TIMEOUT = 120.0
"""CRIU waits for ever for some processes, such as one that was stopped: then the snapshot fails, and so does a restore."""

_BROUGHT_BACK = (Capability.FILES, Capability.PROCESSES, Capability.MEMORY)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    archive: Path
    shell: ShellState | None


class HybridLive(ContainerLive):
    _settle_seconds = 1.0  # CRIU refuses a container with a foreign process in it, even one that is just ending

    def __init__(
        self, tool: ContainerTool, container: str, *, owned: bool, export_dir: Path | None, adopted: ShellState | None
    ) -> None:
        super().__init__(tool, container, owned=owned)
        self._export_dir = export_dir
        self._gate = Gate()
        self._pid = int(self._facts()[0])
        self._fifos = Path(f"/proc/{self._pid}/root{FIFO_DIRECTORY}")
        if not owned:
            self._inject()
        self._shell = PersistentShell(self._open_channel, self._aside, self._stage, self._dead, adopted)

    def run(self, request: RunRequest) -> ExecResult:
        with self._gate.passing():
            return super().run(request)

    def exec(self, request: ExecRequest) -> ExecResult:
        return self._shell.exec(request)

    def capture(self, place: Place, mode: Mode, parent: Captured | None) -> Captured:
        directory = self._export_dir / place.name if self._export_dir else place.directory
        directory.mkdir(parents=True, exist_ok=True)
        archive = directory / "checkpoint.tar"
        what = f"snapshot of container {self._container}"
        with self._gate.alone(RUN_TIMEOUT):
            tree = tree_pids(self._pid)
            processes, connections = command_lines(tree), connections_of(tree)
            if not self._owned and (connections.outside or connections.inside):
                lost = connections.outside[0] if connections.outside else "a tcp connection inside it"
                raise NotCapturable(f"{what}: it has {lost}, which only a container made by `hybrid_build` can keep")
            options = ["--leave-running", "--compress=none", f"--export={archive}"]
            done = self._tool.call("container", "checkpoint", *options, self._container, timeout=CRIU_TIMEOUT)
        if done.exit_code != 0:
            archive.unlink(missing_ok=True)
            raise self._refused(what, done.stderr.decode(errors="replace"))
        if connections.outside:
            shut_connections(archive)
        files_bytes, memory_bytes = archive_sizes(archive)
        shell = self._shell.state
        _, _, *volumes = self._facts()
        return Captured(
            handle=Checkpoint(archive, shell),
            captured=(*_BROUGHT_BACK, Capability.SHELL) if shell is not None else _BROUGHT_BACK,
            not_captured=(*connections.outside, *(f"volume {path}" for path in volumes)),
            files_bytes=files_bytes,
            memory_bytes=memory_bytes,
            processes=processes,
        )

    def stop(self) -> None:
        if not self._owned:
            with contextlib.suppress(WaypointError):
                self._aside(_EVICT, FIFO_DIRECTORY)
        super().stop()

    def manifest(self) -> Manifest:
        entries = dict(export_manifest(self._tool, self._container))
        return {path: facts for path, facts in entries.items() if not f"{path}/".startswith(f"{FIFO_DIRECTORY}/")}

    def _inject(self) -> None:
        """Into a container that somebody else started: a child that is left behind becomes a child of its PID 1."""
        make_fifos(self._fifos)
        script = '"$@" </dev/null >/dev/null 2>&1 & echo $! > "$0/loop"'
        self._tool.ask(
            "a shell for the container", "exec", self._container, "sh", "-c", script, FIFO_DIRECTORY, *loop_argv()
        )

    def _open_channel(self) -> Channel:
        return FifoChannel(self._fifos)

    def _refused(self, what: str, said: str) -> WaypointError:
        quoted = quoted_log(said)
        if not quoted:
            return self._tool.failure(what, said)
        return NotCapturable(f"{what}: CRIU refused, the container goes on:\n{quoted}")


def quoted_log(said: str) -> str:
    """CRIU's own words: podman only names the file that they are in. Empty if it does not."""
    found = re.search(r'(/[^\s"\\]+\.log)', said)
    if found is None or not Path(found[1]).exists():
        return ""
    lines = Path(found[1]).read_text(errors="replace").splitlines()
    return "\n".join([line for line in lines if "Error" in line and "RLIMIT_NOFILE" not in line][-6:])


_EVICT = r"""
read -r loop <"$1/loop" || exit
for d in /proc/[0-9]*; do
  read -r s 2>/dev/null <"$d/stat" || continue
  s=${s##*) }; set -- "$1" $s
  [ "$3" = "$loop" ] && kill -KILL "${d#/proc/}"
done
kill -KILL "$loop"; rm -rf -- "$1"
"""


class HybridDriver(ContainerDriver):
    name = "hybrid"
    version_format = "{{.Client.Version}}"
    has_daemon = False

    def __init__(self, source: Source, export_dir: Path | None = None) -> None:
        super().__init__(source)
        self._export_dir = export_dir.absolute() if export_dir else None
        self._first_name = source.container_name

    @classmethod
    def make_tool(cls) -> ContainerTool:
        return podman_tool("runc")

    def run_options(self) -> list[str]:
        return ulimit_options()

    def start(self, place: Place) -> Live:
        tool = self._setting(place)
        container = self._first_name or f"statefork-{place.name}"
        image = self._base(place)
        setting = Setting(place.home / "podman-criu")
        options = ["--pull=never", *self.run_options(), *setting.run_options, *label_options(place)]
        options += self.source.extra_args
        what = f"starting a container of {image}"
        arguments = ["--name", container, *options, "--entrypoint", "/bin/sh", image, *loop_argv()[1:]]
        created = tool.call("create", *arguments)
        if created.exit_code != 0:
            said = created.stderr.decode(errors="replace")
            if "already in use" in said:
                raise Exists(
                    f"podman has a container {container!r} already; choose another container_name, or attach to it"
                )
            raise self._not_started(what, image, said)
        _note(place, container)
        try:
            mounted = Path(tool.ask(what, "mount", container))
            make_fifos(mounted / FIFO_DIRECTORY.lstrip("/"))
            tool.ask(what, "umount", container)
            tool.ask(what, "start", container)
        except BaseException:
            remove_container(tool, container)
            raise
        return self._hybrid(tool, container, owned=True, adopted=None)

    def attach(self, place: Place) -> Live:
        tool = self._setting(place)
        name = self.source.container_name or ""
        found = tool.call("container", "inspect", "-f", "{{.State.Running}}", name)
        if found.exit_code != 0:
            raise NotFound(f"podman has no container {name!r}: {found.tail()}")
        if found.text != "true":
            raise NotFound(f"container {name!r} is not running; start it first: podman start {name}")
        return self._hybrid(tool, name, owned=False, adopted=None)

    def revive(self, captured: Captured, place: Place) -> Live:
        tool = self._setting(place)
        container = f"statefork-{place.name}"
        checkpoint: Checkpoint = captured.handle
        _note(place, container)
        what = f"restoring {checkpoint.archive}"
        options = ["--ignore-static-ip", "--ignore-static-mac", f"--import={checkpoint.archive}", "--name", container]
        done = tool.call("container", "restore", *options, timeout=CRIU_TIMEOUT)
        if done.exit_code != 0:
            said = done.stderr.decode(errors="replace")
            quoted = quoted_log(said)
            remove_container(tool, container)
            raise CriuError(f"{what} as {container}: CRIU failed:\n{quoted}") if quoted else tool.failure(what, said)
        return self._hybrid(tool, container, owned=True, adopted=checkpoint.shell)

    def discard(self, captured: Captured) -> None:
        archive: Path = captured.handle.archive
        archive.unlink(missing_ok=True)
        if self._export_dir is not None:
            with contextlib.suppress(OSError):
                archive.parent.rmdir()

    def manifest(self, captured: Captured, place: Place) -> Manifest:
        return Driver.manifest(self, captured, place)

    @classmethod
    def sweep(cls, home: Path, in_use: Callable[[str], bool]) -> Iterable[str]:
        """Containers brought back from somebody else's carry no labels of ours: their names are noted in the places."""
        yield from super().sweep(home, in_use)
        tool = cls.make_tool()
        for note in home.glob("trees/*/*/container"):
            container = note.read_text().strip()
            if not in_use(note.parent.parent.name) and tool.call("container", "exists", container).exit_code == 0:
                remove_container(tool, container)
                yield f"hybrid container {container}"

    # -- inside -------------------------------------------------------------------------------------------------------

    def _setting(self, place: Place) -> ContainerTool:
        setting = Setting.prepare(place.home)
        return self._tool.altered(*setting.global_options, env=setting.env)

    def _hybrid(self, tool: ContainerTool, container: str, *, owned: bool, adopted: ShellState | None) -> Live:
        try:
            return HybridLive(tool, container, owned=owned, export_dir=self._export_dir, adopted=adopted)
        except BaseException:
            if owned:
                remove_container(tool, container)
            raise

    def probe_tools(self) -> list[str]:
        return ["podman", "runc", criu_argv()[-1]]

    def probe(self) -> Capabilities:
        missing = have_tools()
        if missing:
            raise HostUnsupported(f"{', '.join(missing)} not installed: {INSTALL}", fix=INSTALL)
        found = super().probe()
        if not self._attaches:
            return found
        # What was attached to is left as it is, so pausing it cannot mean to end it.
        return replace(found, pause_releases_memory=False)

    @property
    def _attaches(self) -> bool:
        return self.source.base_image is None and self.source.dockerfile_dir is None

    def _try(self, version: str) -> Capabilities:
        """Store a container with one process and bring it back."""
        mark = secrets.token_hex(6)
        image, first, second = f"statefork-probe:{mark}", f"statefork-probe-{mark}", f"statefork-probe-{mark}-2"
        what = "podman and CRIU cannot bring a container back on this host"
        with tempfile.TemporaryDirectory(prefix="statefork-probe-") as scratch:
            setting = Setting.prepare(Path(scratch))
            tool = self._tool.altered(*setting.global_options, env=setting.env)
            archive = f"{scratch}/checkpoint.tar"
            options = [*self.run_options(), *setting.run_options, "--network", "none"]
            try:
                tool.ask(what, "import", "-", image, stdin=sleeper_archive())
                tool.ask(what, "run", "-d", "--name", first, *options, image, "/bin/sleep", "1000")
                tool.ask(what, "container", "checkpoint", "--compress=none", "-e", archive, "--leave-running", first)
                tool.ask(what, "container", "restore", "-i", archive, "-n", second)
            except KernelError as error:
                raise HostUnsupported(error.message, fix=INSTALL) from error
            finally:
                tool.call(*tool.remove, first, second)
                tool.call("rmi", "-f", image)
        return Capabilities(
            backend=self.name,
            restores=frozenset({*_BROUGHT_BACK, Capability.SHELL}),
            pause_releases_memory=True,
            snapshot_during_exec=False,
            versions={"podman": version, "criu": criu_version()},
        )


def _note(place: Place, container: str) -> None:
    (place.directory / "container").write_text(container + "\n")


def _build(
    container_name: str,
    dockerfile_dir: Path | None = None,
    base_image: str | None = None,
    export_dir: Path | None = None,
    extra_args: tuple[str, ...] = (),
) -> HybridDriver:
    return HybridDriver(Source(dockerfile_dir, base_image, container_name, extra_args), export_dir)


def _attach(container_name: str, export_dir: Path | None = None) -> HybridDriver:
    return HybridDriver(Source(container_name=container_name), export_dir)


BACKEND = Backend(
    name="hybrid",
    summary="files, processes, memory, shell",
    driver=HybridDriver,
    probe=lambda: HybridDriver(Source(base_image="none")).probe(),
    methods=(
        Method(
            "hybrid_build",
            _build,
            tuple(ARGUMENTS[n] for n in ("dockerfile_dir", "base_image", "container_name", "export_dir", "extra_args")),
            required=(("dockerfile_dir", "base_image"), ("container_name",)),
        ),
        Method(
            "hybrid_attach",
            _attach,
            tuple(ARGUMENTS[n] for n in ("container_name", "export_dir")),
            required=(("container_name",),),
            attach=True,
        ),
    ),
)
