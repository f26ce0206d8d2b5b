"""Roots for sandboxes: a Dockerfile built by Waypoint's builder, a directory, or an archive. Kept in the state directory.

What is built or unpacked stays for the next environment. Each place of a tree notes which one it uses, so that the
collector knows what is needed; a lock keeps it away from one that is being made.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from statefork.driver import Place
from statefork.errors import NotFound
from waypoint.build.base import Base, StartState
from waypoint.build.dockerfile import build_dockerfile, images, prune_images, remove_image
from waypoint.build.rootfs import use_rootfs
from waypoint.build.tarball import unpack_tarball

__all__ = ["NOTE", "make_base", "note_base", "sweep_bases"]

NOTE = "gvisor.json"


def make_base(place: Place, dockerfile_dir: Path | None, rootfs: Path | None) -> Base:
    """Raises: BuildError, DiskFull, HostUnsupported."""
    directory = place.home / "gvisor"
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory, fcntl.LOCK_SH):
        if dockerfile_dir is not None:
            base = build_dockerfile(dockerfile_dir, store_dir=directory / "builder")
        else:
            assert rootfs is not None
            base = use_rootfs(rootfs, store=place.home) if rootfs.is_dir() else _unpacked(directory, rootfs)
        note_base(place, base)
    return base


def note_base(place: Place, base: Base) -> None:
    (place.directory / NOTE).write_text(json.dumps({"layers": [str(layer) for layer in base.layers]}))


def _unpacked(directory: Path, archive: Path) -> Base:
    """Once for each archive as it is now; two at a time take turns."""
    if not archive.exists():
        raise NotFound(f"{archive} does not exist; give a directory or an archive with a root file system")
    facts = archive.stat()
    key = hashlib.sha256(f"{archive.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]
    where = directory / "unpacked"
    where.mkdir(exist_ok=True)
    with _locked(where, fcntl.LOCK_EX, f".{key}.lock"):
        target, described = where / key, where / f"{key}.json"
        if not described.exists():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            made = unpack_tarball(archive, target)
            row = {"layers": [str(layer) for layer in made.layers], "start": asdict(made.start)}
            described.write_text(json.dumps(row))
        row = json.loads(described.read_text())
        start = row["start"]
        start["env"] = tuple((name, value) for name, value in start["env"])
        layers = tuple(Path(layer) for layer in row["layers"])
        return Base("tarball", str(archive), layers, StartState(**{**start, "argv": tuple(start["argv"])}), key)


def sweep_bases(home: Path, in_use: Callable[[str], bool]) -> Iterator[str]:
    """Remove what no living tree uses."""
    directory = home / "gvisor"
    if not directory.is_dir():
        return
    with _locked(directory, fcntl.LOCK_EX):
        used: set[str] = set()
        for note in home.glob(f"trees/*/*/{NOTE}"):
            if in_use(note.parent.parent.name):
                used.update(json.loads(note.read_text())["layers"])
        if (directory / "builder").is_dir():
            for image in images(directory / "builder"):
                if not used.intersection(map(str, image.layers)):
                    remove_image(directory / "builder", image.digest)
                    yield f"gvisor base {image.digest[:19]}"
            prune_images(directory / "builder")
        for described in sorted((directory / "unpacked").glob("*.json")):
            if not used.intersection(json.loads(described.read_text())["layers"]):
                described.unlink()
                shutil.rmtree(described.with_suffix(""), ignore_errors=True)
                yield f"gvisor base {described.with_suffix('')}"


@contextlib.contextmanager
def _locked(directory: Path, how: int, name: str = ".lock") -> Iterator[None]:
    descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
