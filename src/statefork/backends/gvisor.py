"""gVisor: a sandbox with a kernel of its own in user space; `runsc checkpoint` stores files and processes together.

A copy is a restore of the same image, as often as wanted. The persistent shell is a part of the sandbox (fifos.py), so
it comes back too. Inside there is a loopback network and no other: connections within the sandbox come back, and there
is no connection to the outside that a checkpoint would have to refuse (docs/decisions/gvisor.md).
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from statefork.backends.fifos import FIFO_DIRECTORY, FifoChannel
from statefork.backends.gate import Gate
from statefork.backends.guest_run import run_in_guest
from statefork.backends.gvisor_bases import make_base, note_base, sweep_bases
from statefork.backends.gvisor_guest import Inside, look_inside
from statefork.backends.gvisor_install import SETUP, find_runsc, runsc_version
from statefork.backends.gvisor_sandbox import (
    Sandbox,
    failure,
    kill_sandboxes,
    launch,
    sandbox_processes,
    write_bundle,
)
from statefork.backends.option_values import choice
from statefork.backends.persistent_shell import PersistentShell, ShellState
from statefork.backends.probe_cache import remembered
from statefork.driver import Captured, Driver, Live, Place
from statefork.errors import HostUnsupported, KernelError, NotCapturable, SessionDead, WaypointError
from statefork.manifest import Manifest, read_guest_manifest
from statefork.model import Capabilities, Capability, ExecRequest, ExecResult, Mode, RunRequest
from statefork.registry import Argument, Backend, Method, directory, path
from waypoint.build.base import Base, StartState
from waypoint.kernel.programs import run_program

__all__ = ["BACKEND", "GvisorDriver", "GvisorOptions"]

RUN_TIMEOUT = 30.0
"""How long a snapshot waits for programs of `run` to end."""

_BROUGHT_BACK = (Capability.FILES, Capability.PROCESSES, Capability.MEMORY)


@dataclass(frozen=True, slots=True)
class GvisorOptions:
    dockerfile_dir: Path | None = None
    rootfs: Path | None = None
    platform: str = "systrap"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    image: Path
    base: Base
    shell: ShellState | None


class GvisorLive(Live):
    def __init__(self, sandbox: Sandbox, place: Place, base: Base, adopted: ShellState | None) -> None:
        self.description = sandbox.name
        self._sandbox = sandbox
        self._base = base
        self._io = place.directory / "io"
        self._gate = Gate()
        self._adopted = adopted
        self._shell = PersistentShell(lambda: FifoChannel(self._io), self._aside, self._stage, self._dead, adopted)

    def ready(self, timeout: float) -> None:
        """As usual, but the shell's last status stays what it was."""
        status = self._adopted.status if self._adopted else 0
        self.exec(ExecRequest(b"(exit %d)" % status, timeout=timeout))

    def exec(self, request: ExecRequest) -> ExecResult:
        return self._shell.exec(request)

    def run(self, request: RunRequest) -> ExecResult:
        with self._gate.passing():
            return run_in_guest(self._wrap, request, self._dead)

    def capture(self, place: Place, mode: Mode, parent: Captured | None) -> Captured:
        what = f"snapshot of sandbox {self._sandbox.name}"
        image = place.directory / "image"
        note_base(place, self._base)
        with self._gate.alone(RUN_TIMEOUT):
            inside = self._look(what)
            files_bytes = self._sandbox.files_bytes()
            began = time.perf_counter()
            options = ["--leave-running", "--compression=none", f"--image-path={image}"]
            done = self._sandbox.call("checkpoint", *options, self._sandbox.name)
            paused_ms = (time.perf_counter() - began) * 1000
        if done.exit_code != 0:
            error = failure(what, done.stderr.decode(errors="replace"))
            if isinstance(error, KernelError) and self._answers():
                raise NotCapturable(f"{error.message}; the sandbox goes on")
            raise error
        shell = self._shell.state
        size_bytes = sum(file.stat().st_blocks * 512 for file in image.iterdir())
        return Captured(
            handle=Checkpoint(image, self._base, shell),
            captured=(*_BROUGHT_BACK, Capability.SHELL) if shell is not None else _BROUGHT_BACK,
            files_bytes=min(files_bytes, size_bytes),
            memory_bytes=max(size_bytes - files_bytes, 0),
            paused_ms=paused_ms,
            processes=inside.processes,
        )

    def stop(self) -> None:
        self._shell.close()
        kill_sandboxes(self._sandbox.state)

    def manifest(self) -> Manifest:
        found = read_guest_manifest(self.run)
        return {path: facts for path, facts in found.items() if not f"{path}/".startswith(f"{FIFO_DIRECTORY}/")}

    # -- inside -------------------------------------------------------------------------------------------------------

    def _look(self, what: str) -> Inside:
        """Refuse before anything is stopped what could be stored but never brought back."""
        inside = look_inside(self._sandbox, what)
        if inside.outward:
            raise NotCapturable(
                f"{what}: {inside.outward[0]} still has the output of a program that was started with `run`, which cannot be "
                "stored; end it, or start it from the shell or with its streams redirected. The sandbox goes on"
            )
        if inside.connections:
            raise NotCapturable(
                f"{what}: it has {inside.connections[0]}, which runsc cannot store. The sandbox goes on"
            )
        return inside

    def _answers(self) -> bool:
        return self._sandbox.call("exec", self._sandbox.name, "/bin/sh", "-c", ":").exit_code == 0

    def _wrap(self, request: RunRequest, argv: Sequence[str]) -> list[str]:
        return self._sandbox.argv(*self._sandbox.exec_arguments(argv, request.env, request.cwd))

    def _aside(self, script: str, *arguments: str) -> None:
        done = self._sandbox.call(*self._sandbox.exec_arguments(["sh", "-c", script, "sh", *arguments], {}, "/"))
        if done.exit_code == 128:
            raise failure(f"sandbox {self._sandbox.name}", done.stderr.decode(errors="replace"))

    def _stage(self, data: bytes) -> str:
        name = f"staged-{secrets.token_hex(8)}"
        (self._io / name).write_bytes(data)
        (self._io / name).chmod(0o666)
        return f"{FIFO_DIRECTORY}/{name}"

    def _dead(self, said: str) -> WaypointError:
        if not sandbox_processes(self._sandbox.state):
            return SessionDead(f"sandbox {self._sandbox.name} is gone: {said}")
        return failure(f"sandbox {self._sandbox.name}", said)


class GvisorDriver(Driver):
    name = "gvisor"

    def __init__(self, options: GvisorOptions) -> None:
        self.options = options

    def probe(self) -> Capabilities:
        runsc = find_runsc()
        return remembered(f"gvisor-{self.options.platform}", [str(runsc)], lambda: _try(runsc, self.options.platform))

    def start(self, place: Place) -> Live:
        base = make_base(place, self.options.dockerfile_dir, self.options.rootfs)
        return self._up(place, base, ["run"], None, f"starting a sandbox over {base.source}")

    def revive(self, captured: Captured, place: Place) -> Live:
        stored: Checkpoint = captured.handle
        note_base(place, stored.base)
        verb = ["restore", f"--image-path={stored.image}"]
        return self._up(place, stored.base, verb, stored.shell, f"restoring {stored.image}")

    def discard(self, captured: Captured) -> None:
        """The image lies in the place's directory, which is removed now."""

    @classmethod
    def sweep(cls, home: Path, in_use: Callable[[str], bool]) -> Iterable[str]:
        trees = home / "trees"
        for tree in sorted(trees.iterdir()) if trees.is_dir() else ():
            if not in_use(tree.name) and (count := kill_sandboxes(tree)):
                yield f"gvisor processes of {tree.name}: {count}"
        yield from sweep_bases(home, in_use)

    def _up(self, place: Place, base: Base, verb: Sequence[str], shell: ShellState | None, what: str) -> Live:
        user, cwd = write_bundle(place.directory, base, "gvisor")
        sandbox = _sandbox(place, find_runsc(), self.options.platform, user, cwd)
        launch(sandbox, place.directory, verb, what)
        try:
            return GvisorLive(sandbox, place, base, shell)
        except BaseException:
            kill_sandboxes(sandbox.state)
            raise


def _sandbox(place: Place, runsc: Path, platform: str, user: str, cwd: str) -> Sandbox:
    flags = (
        f"--platform={platform}",
        "--network=none",
        "--ignore-cgroups",
        "--directfs=false",
        "--host-fifo=open",
        f"--overlay2=root:dir={place.directory / 'files'}",
    )
    return Sandbox(runsc, place.directory / "state", f"statefork-{place.name}", flags, user, cwd)


def _try(runsc: Path, platform: str) -> Capabilities:
    """Store a sandbox over some of this host's programs, change everything in it, and look what a copy still knows."""
    mark = secrets.token_hex(8)
    driver = GvisorDriver(GvisorOptions(platform=platform))
    what = f"gVisor ({runsc}, platform {platform}) cannot bring a sandbox back on this host"
    with tempfile.TemporaryDirectory(prefix="statefork-probe-") as scratch:
        root = Path(scratch) / "root"
        _copy_programs(root, ("sh", "cat", "ls", "rm", "sleep", "tail"))
        base = Base("probe", str(root), (root,), StartState(), "probe")
        places = []
        for name in ("a", "s", "b"):
            (Path(scratch) / name).mkdir()
            places.append(Place(f"probe-{mark}-{name}", Path(scratch) / name, "probe", Path(scratch)))
        lives: list[Live] = []
        try:
            lives.append(driver._up(places[0], base, ["run"], None, what))
            lives[0].exec(ExecRequest(f"cd /tmp; echo {mark} >probe; probe={mark}; sleep 1000 &".encode(), timeout=30))
            stored = lives[0].capture(places[1], "auto", None)
            lives[0].exec(ExecRequest(b"rm probe; probe=; kill $!; cd /", timeout=30))
            lives.append(driver.revive(stored, places[2]))
            asked = ExecRequest(b"cat /tmp/probe; echo $probe; kill -0 $! && echo runs; pwd", timeout=30)
            said = lives[1].exec(asked).stdout.split()
        except WaypointError as error:
            raise HostUnsupported(f"{what}: {error.message.removeprefix(what + ': ')}", fix=SETUP) from error
        finally:
            for live in lives:
                live.stop()
    if said != [mark, mark, "runs", "/tmp"]:
        raise HostUnsupported(f"{what}: a restored one answers {said}", fix=SETUP)
    return Capabilities(
        backend=GvisorDriver.name,
        restores=frozenset({*_BROUGHT_BACK, Capability.SHELL}),
        pause_releases_memory=True,
        snapshot_during_exec=False,
        versions={"runsc": runsc_version(runsc), "platform": platform},
    )


def _copy_programs(root: Path, names: Sequence[str]) -> None:
    """With the libraries that they need."""
    programs = [found for name in names if (found := shutil.which(name))]
    said = run_program(["ldd", *programs], timeout=30).text
    libraries = re.findall(r"(?:=> |^\t)(/\S+) \(0x", said, re.MULTILINE)
    for source in {*libraries, *(f"/bin/{Path(program).name}" for program in programs)}:
        target = root / source.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")


def _build(dockerfile_dir: Path | None = None, rootfs: Path | None = None, platform: str = "systrap") -> GvisorDriver:
    return GvisorDriver(GvisorOptions(dockerfile_dir, rootfs, platform))


BACKEND = Backend(
    name=GvisorDriver.name,
    summary="files, processes, memory, shell",
    driver=GvisorDriver,
    probe=lambda: GvisorDriver(GvisorOptions()).probe(),
    methods=(
        Method(
            "gvisor_build",
            _build,
            (
                Argument("dockerfile_dir", directory, "a directory with a Dockerfile, built first"),
                Argument("rootfs", path, "a directory or an archive with a root file system"),
                Argument("platform", choice("systrap", "ptrace", "kvm"), "how runsc meets system calls; systrap"),
            ),
            required=(("dockerfile_dir", "rootfs"),),
        ),
    ),
)
