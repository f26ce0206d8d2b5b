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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from statefork.backends.gvisor_attach import Copied, attach_to, find_container, revive_copy, sweep_attached
from statefork.backends.gvisor_bases import make_base, note_base, sweep_bases
from statefork.backends.gvisor_install import SETUP, find_runsc, runsc_version
from statefork.backends.gvisor_live import BROUGHT_BACK, Checkpoint, GvisorLive
from statefork.backends.gvisor_sandbox import Sandbox, kill_sandboxes, launch, write_bundle
from statefork.backends.option_values import choice
from statefork.backends.persistent_shell import ShellState
from statefork.backends.probe_cache import remembered
from statefork.driver import Captured, Driver, Live, Place
from statefork.errors import HostUnsupported, WaypointError
from statefork.model import Capabilities, Capability, ExecRequest
from statefork.registry import Argument, Backend, Method, directory, path, text
from waypoint.build.base import Base, StartState
from waypoint.kernel.programs import run_program

__all__ = ["BACKEND", "AttachedDriver", "GvisorDriver", "GvisorOptions"]


@dataclass(frozen=True, slots=True)
class GvisorOptions:
    dockerfile_dir: Path | None = None
    rootfs: Path | None = None
    platform: str = "systrap"
    runsc: Path | None = None
    """None: the one that `find_runsc` finds."""


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
        yield from sweep_attached(home, in_use)
        yield from sweep_bases(home, in_use)

    def _up(self, place: Place, base: Base, verb: Sequence[str], shell: ShellState | None, what: str) -> Live:
        user, cwd = write_bundle(place.directory, base, "gvisor")
        sandbox = _sandbox(place, self.options.runsc or find_runsc(), self.options.platform, user, cwd)
        launch(sandbox, place.directory, verb, what)
        try:
            return GvisorLive(sandbox, place, base, shell)
        except BaseException:
            kill_sandboxes(sandbox.state)
            raise


class AttachedDriver(GvisorDriver):
    """For a container of somebody else's, found by its name; copies of it are sandboxes of our own."""

    def __init__(self, container_name: str, root: Path | None = None, platform: str | None = None) -> None:
        super().__init__(GvisorOptions(platform=platform or "systrap"))
        self._wanted = container_name, root, platform

    def probe(self) -> Capabilities:
        """By the runsc that runs the container. Pausing what is not ours cannot mean to end it."""
        _, origin = find_container(*self._wanted)
        platforms = [flag.partition("=")[2] for flag in origin.flags if flag.startswith("--platform=")]
        platform = platforms[0] if platforms else "systrap"
        key = f"gvisor-{platform}"
        found = remembered(key, [str(origin.runsc)], lambda: _try(origin.runsc, platform))
        reason = "runsc restore ends whatever came in through runsc exec"
        return replace(
            found, restores=frozenset(BROUGHT_BACK), pause_releases_memory=False, missing={Capability.SHELL: reason}
        )

    def attach(self, place: Place) -> Live:
        return attach_to(*find_container(*self._wanted), place)

    def revive(self, captured: Captured, place: Place) -> Live:
        stored: Copied = captured.handle
        return revive_copy(stored, place, _name(place))


def _name(place: Place) -> str:
    return f"statefork-{place.name}"


def _sandbox(place: Place, runsc: Path, platform: str, user: str, cwd: str) -> Sandbox:
    flags = (
        f"--platform={platform}",
        "--network=none",
        "--ignore-cgroups",
        "--directfs=false",
        "--host-fifo=open",
        f"--overlay2=root:dir={place.directory / 'files'}",
    )
    return Sandbox(runsc, place.directory / "state", _name(place), flags, user, cwd)


def _try(runsc: Path, platform: str) -> Capabilities:
    """Store a sandbox over some of this host's programs, change everything in it, and look what a copy still knows."""
    mark = secrets.token_hex(8)
    driver = GvisorDriver(GvisorOptions(platform=platform, runsc=runsc))
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
        restores=frozenset({*BROUGHT_BACK, Capability.SHELL}),
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
        Method(
            "gvisor_attach",
            AttachedDriver,
            (
                Argument("container_name", text, "a running container that runsc started"),
                Argument("root", path, "the --root of its runsc; only needed if several containers have that name"),
                Argument("platform", choice("systrap", "ptrace", "kvm"), "for the copies; the container's own"),
            ),
            required=(("container_name",),),
            attach=True,
        ),
    ),
)
