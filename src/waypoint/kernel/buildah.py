"""buildah with a storage of its own, in namespaces of its own.

Every call runs in a fresh mount and pid namespace: the mounts that buildah makes cannot be seen or left behind, and
when the caller or buildah is killed, the kernel ends every process of the build with it. The host's own container
storage and its state in /run are covered by an empty tmpfs, so they are neither read nor touched.

The storage is containers/storage's `overlay` layout: a layer is `r/overlay/<id>/diff`, with deletions marked as the
kernel's overlay marks them. Which image has which layers is read from its JSON files, since no command tells.
See docs/decisions/buildah.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waypoint.errors import Busy, HostUnsupported, KernelError, StoreError
from waypoint.kernel.programs import Finished, run_program

__all__ = ["FIX", "Isolation", "Storage", "StoredImage"]

FIX = "apt-get install -y buildah runc"
_QUICK = 300.0
"""Seconds for a call that builds nothing."""
_SCRIPT = """
set -e
home=$1
shift
for directory in /run/containers /var/lib/containers; do
    mkdir -p "$directory"
    mount -n -t tmpfs -o mode=700 tmpfs "$directory"
done
unset STORAGE_DRIVER STORAGE_OPTS BUILDAH_ISOLATION BUILDAH_LAYERS BUILDAH_FORMAT BUILDAH_RUNTIME
export TMPDIR="$home/t" CONTAINERS_STORAGE_CONF="$home/storage.conf"
exec buildah --root "$home/r" --runroot /run/containers/storage --storage-driver overlay "$@"
"""


@dataclass(frozen=True, slots=True)
class Isolation:
    """How RUN steps are kept apart from the host: by an OCI runtime, or by buildah's own chroot where none works."""

    kind: str
    runtime: str = ""

    def arguments(self) -> tuple[str, ...]:
        runtime = ("--runtime", self.runtime, "--runtime-flag", "root=/run/containers/runtime") if self.runtime else ()
        return ("--isolation", self.kind, *runtime)


@dataclass(frozen=True, slots=True)
class StoredImage:
    id: str
    names: tuple[str, ...]
    created: str
    layers: tuple[Path, ...]
    """Top-most first."""
    size_bytes: int
    whole: bool
    """False when a layer is missing."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One private image storage in the directory `home`. Whoever changes it holds its lock."""

    home: Path

    @property
    def scratch(self) -> Path:
        """Where buildah keeps temporary files; emptied by `sweep`."""
        return self.home / "t"

    def create(self) -> None:
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.scratch.mkdir(mode=0o700, exist_ok=True)
        # In place of the host's, which may name another driver, a FUSE program to mount with, or more image stores.
        (self.home / "storage.conf").write_text('[storage]\ndriver = "overlay"\n')

    @contextlib.contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """One writer at a time: else what a failed build leaves could not be told from what another build makes."""
        self.create()
        deadline = time.monotonic() + timeout
        with (self.home / "lock").open("w") as held:
            while True:
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() >= deadline:
                        raise Busy(f"another build holds {self.home}; try again when it has ended") from error
                    time.sleep(0.05)
            yield

    def run(
        self,
        arguments: Sequence[str],
        *,
        timeout: float = _QUICK,
        cwd: Path | None = None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> Finished:
        """One buildah command. With `on_output` both its streams are one, in the order in which it wrote them."""
        if shutil.which("buildah") is None:
            raise HostUnsupported(f"buildah is not installed; `{FIX}`", fix=FIX, feature="buildah")
        script = _SCRIPT.rstrip() + (" 2>&1\n" if on_output else "\n")
        return run_program(
            [
                *("setpriv", "--pdeathsig", "KILL", "--"),
                *("unshare", "--mount", "--propagation", "private", "--ipc", "--uts"),
                *("--pid", "--fork", "--kill-child", "--mount-proc", "--"),
                *("sh", "-c", script, "sh", str(self.home), *arguments),
            ],
            timeout=timeout,
            cwd=cwd,
            on_output=on_output,
            keep_bytes=1 << 20,
        )

    def build(
        self,
        directory: Path,
        dockerfile: Path,
        *,
        isolation: Isolation,
        extra: Sequence[str] = (),
        timeout: float,
        on_output: Callable[[bytes], None],
    ) -> tuple[Finished, str]:
        """`buildah bud` with its layer cache; the id of the image, or "" if the build ended in an error."""
        id_file = self.scratch / "iid"
        id_file.unlink(missing_ok=True)
        arguments = (
            *("bud", *isolation.arguments(), "--layers", "--force-rm", "--pull=missing", "--format", "docker"),
            # The host's network: a bridge would have to be set up on the host and could stay behind.
            *("--network", "host", "--cgroup-parent", f"/{self._cgroup}"),
            *("--iidfile", str(id_file), "--file", str(dockerfile), *extra, str(directory)),
        )
        try:
            finished = self.run(arguments, timeout=timeout, cwd=directory, on_output=on_output)
        finally:
            self._sweep_cgroups()
        if finished.exit_code != 0:
            return finished, ""
        image_id = id_file.read_text().strip().removeprefix("sha256:")
        id_file.unlink()
        return finished, image_id

    def config(self, image_id: str) -> dict[str, Any]:
        """The image's `config` object."""
        said = self.run(["inspect", "--type", "image", image_id]).check(f"reading image {image_id[:12]}")
        config: dict[str, Any] = json.loads(said.stdout)["OCIv1"].get("config") or {}
        return config

    def tag(self, image_id: str, names: Sequence[str]) -> None:
        self.run(["tag", image_id, *names]).check(f"naming image {image_id[:12]}")

    def images(self) -> tuple[StoredImage, ...]:
        """Every image, also the nameless ones of the build cache, oldest first."""
        layers = {layer["id"]: layer for layer in self._read("overlay-layers/layers.json")}
        found = []
        for image in self._read("overlay-images/images.json"):
            chain = []
            top = image.get("layer")
            while top in layers:
                chain.append(layers[top])
                top = layers[top].get("parent")
            found.append(
                StoredImage(
                    id=image["id"],
                    names=tuple(image.get("names") or ()),
                    created=image.get("created", ""),
                    layers=tuple(self.home / "r/overlay" / layer["id"] / "diff" for layer in chain),
                    size_bytes=sum(layer.get("diff-size", 0) for layer in chain),
                    whole=not top,
                )
            )
        return tuple(found)

    def remove_images(self, ids: Sequence[str]) -> None:
        """Newest first, with all their names. Layers that another image uses stay."""
        wanted = set(ids)
        for _ in range(3):
            # Removing an image also removes its nameless parents, so an id of the list may be gone before its turn.
            there = [image.id for image in reversed(self.images()) if image.id in wanted]
            if not there:
                return
            said = self.run(["rmi", "--force", *there])
        if left := [image.id for image in self.images() if image.id in wanted]:
            raise KernelError(f"{self.home}: cannot remove image {left[0][:12]}: {said.tail()}")

    def sweep(self) -> None:
        """Remove what a build that was cut short leaves besides images."""
        if any(self._read(f"overlay-containers/{name}.json") for name in ("containers", "volatile-containers")):
            self.run(["rm", "--all"]).check("removing working containers")
        for entry in list(self.scratch.iterdir()):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        for entry in (self.home / "r/overlay").glob("compat*"):  # a check of the filesystem that was interrupted
            shutil.rmtree(entry)
        self._sweep_cgroups()

    def _read(self, name: str) -> list[dict[str, Any]]:
        try:
            read: list[dict[str, Any]] = json.loads((self.home / "r" / name).read_bytes() or b"[]")
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise StoreError(
                f"{self.home / 'r' / name} is damaged: {error}; remove {self.home} and build again"
            ) from error
        return read

    @property
    def _cgroup(self) -> str:
        """One name per storage: builds in it take turns, so whatever bears the name is of a build that has ended."""
        return f"waypoint-build-{hashlib.sha256(os.fsencode(self.home)).hexdigest()[:12]}"

    def _sweep_cgroups(self) -> None:
        """The OCI runtime removes its cgroup unless it is killed."""
        deadline = time.monotonic() + 5
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if after.split()[0] not in ("cgroup", "cgroup2"):
                continue
            top = Path(before.split()[4]) / self._cgroup
            while top.is_dir():
                for path, _, _ in os.walk(top, topdown=False):
                    with contextlib.suppress(OSError):  # still busy: a killed process takes a moment to leave
                        Path(path).rmdir()
                if top.is_dir() and time.monotonic() > deadline:
                    raise KernelError(f"{top} cannot be removed; a process of a build still runs in it")
