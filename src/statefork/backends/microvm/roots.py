"""Root disks: an ext4 image out of a Dockerfile, a directory or an archive. No journal: a machine that dies is gone
anyhow, and a snapshot holds the memory that belongs to its disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from statefork.backends.microvm.kernel import cache_directory
from statefork.errors import BuildError, DiskFull, HostUnsupported, UsageError
from waypoint.build.base import StartState, require_shell
from waypoint.build.dockerfile import build_dockerfile
from waypoint.build.tarball import unpack_tarball
from waypoint.kernel.programs import run_program

__all__ = ["BUILDS", "Root", "make_disk", "root_of"]

BUILDS = "builds"
"""Where images are built, in the cache: what two Dockerfiles have in common is built once."""

_TIMEOUT = 3600.0
_OPTIONS = (
    "-q",
    "-F",
    "-t",
    "ext4",
    "-O",
    "^has_journal",
    "-m",
    "0",
    "-E",
    "lazy_itable_init=1,nodiscard,root_owner=0:0",
)
_OVERLAY = 'mount -t overlay -o "lowerdir=$1" overlay "$2" && shift 2 && exec mke2fs "$@"'


@dataclass(frozen=True, slots=True)
class Root:
    """What a root disk is made of. `key` changes when any of it does."""

    key: str
    directories: tuple[Path, ...] = ()
    """Top-most first."""
    archive: Path | None = None
    """Instead of directories: unpacked when they are asked for."""
    start: StartState = field(default_factory=StartState)
    image: str | None = None
    """The digest of an image that was built for it."""

    @contextlib.contextmanager
    def layers(self) -> Iterator[tuple[Sequence[Path], StartState]]:
        """Directories, top-most first, as long as the context lasts."""
        if self.archive is None:
            yield self.directories, self.start
            return
        cache_directory().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unpacked-", dir=cache_directory()) as scratch:
            base = unpack_tarball(self.archive, Path(scratch))
            yield base.layers, base.start


def root_of(dockerfile_dir: Path | None, rootfs: Path | None) -> Root:
    """Raises: BuildError with the builder's own words, UsageError, HostUnsupported, DiskFull."""
    if dockerfile_dir is not None:
        base = build_dockerfile(dockerfile_dir, store_dir=cache_directory() / BUILDS)
        return Root(f"{base.digest} {base.start}", base.layers, start=base.start, image=base.digest)
    assert rootfs is not None
    if rootfs.is_dir():
        require_shell([rootfs], str(rootfs))
        return Root(_identity(rootfs), (rootfs.resolve(),))
    if not rootfs.is_file():
        raise UsageError(f"rootfs {rootfs}: give a directory, or an archive of one")
    return Root(_facts("", rootfs.stat()), archive=rootfs.resolve())


def make_disk(layers: Sequence[Path], target: Path, size_mib: int) -> None:
    """Owners, modes, links and extended attributes are kept. Layers are looked at through an overlay that nobody sees."""
    if len(layers) == 1:
        argv = ["mke2fs", *_OPTIONS, "-d", str(layers[0]), str(target), f"{size_mib}M"]
        cwd = None
    else:
        common = Path(os.path.commonpath(layers))
        lower = ":".join(str(layer.relative_to(common)) for layer in layers)
        merged = str(target.with_suffix(".merged"))
        Path(merged).mkdir()
        script = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _OVERLAY, "sh", lower, merged]
        argv, cwd = [*script, *_OPTIONS, "-d", merged, str(target), f"{size_mib}M"], common
    try:
        done = run_program(argv, timeout=_TIMEOUT, cwd=cwd)
    finally:
        with contextlib.suppress(OSError):
            target.with_suffix(".merged").rmdir()
    if done.exit_code == 0:
        return
    target.unlink(missing_ok=True)
    said = done.tail()
    if "No space left on device" in said:
        raise DiskFull(f"no space to make a root disk in {target.parent}; free some")
    if "Could not allocate" in said:
        raise BuildError(f"the files do not fit on a disk of {size_mib} MiB; give a larger disk_mib")
    if done.exit_code == 127:
        raise HostUnsupported("mke2fs is not installed", fix="apt-get install e2fsprogs")
    raise BuildError(f"making a root disk: {said}")


def _identity(root: Path) -> str:
    """Of every file: whatever is written, renamed or replaced gets another change time, which nobody can set."""
    digest = hashlib.sha256()
    todo = [root]
    while todo:
        directory = todo.pop()
        with os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                found = entry.stat(follow_symlinks=False)
                digest.update(_facts(f"{directory}/{entry.name}", found).encode(errors="surrogateescape"))
                if entry.is_dir(follow_symlinks=False):
                    todo.append(Path(entry.path))
    return digest.hexdigest()


def _facts(name: str, found: os.stat_result) -> str:
    return f"{name}\0{found.st_ino} {found.st_size} {found.st_mode:o} {found.st_ctime_ns}\n"
