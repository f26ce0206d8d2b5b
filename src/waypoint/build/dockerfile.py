"""A directory with a Dockerfile, built by buildah; the image's layers are used in place.

The storage is private to Waypoint (`store_dir`). An image that a base uses is *held*: it bears a name of ours, and only
`remove_image` takes that away. The store must call it when, and only when, no base names the image any more; the same
Dockerfile built twice is one image. `prune_images` frees the build cache and never touches a held image's layers.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from waypoint.build.base import Base, require_shell, start_of
from waypoint.build.layers import drop_devices
from waypoint.errors import BuildError, DiskFull, KernelError, NotFound, StoreError, UsageError, WaypointError
from waypoint.kernel.buildah import Storage, StoredImage
from waypoint.kernel.buildah_probe import isolation_of
from waypoint.kernel.programs import Finished, run_program

__all__ = ["BuiltImage", "build_dockerfile", "images", "prune_images", "remove_image"]

_log = logging.getLogger(__name__)
_HOLD = "localhost/waypoint-held:"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_TAG = re.compile(rf"{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?")
_TAIL_LINES = 30
_LOCK_TIMEOUT = 3600.0


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """A held image. `digest` is what `Base.digest` says; `size_bytes` counts layers that other images may share."""

    digest: str
    names: tuple[str, ...]
    created: str
    layers: tuple[Path, ...]
    size_bytes: int


def build_dockerfile(
    directory: Path,
    *,
    store_dir: Path,
    tag: str | None = None,
    on_output: Callable[[bytes], None] | None = None,
    build_args: Sequence[tuple[str, str]] = (),
    target: str | None = None,
    timeout: float = 3600,
) -> Base:
    """Build and hold the image; its layers are on disk when this returns.

    `on_output` gets everything that the builder prints, while it runs. `tag` is a name that later Dockerfiles can use
    in FROM. A failure leaves the storage as it was, cache and names included. Raises BuildError (with the end of the
    builder's output), DiskFull, HostUnsupported, UsageError, Busy.
    """
    dockerfile = _dockerfile_in(directory)
    if tag is not None and not _TAG.fullmatch(tag):
        raise UsageError(f"{tag!r} cannot name an image: lower-case letters, digits, and . _ - / between them")
    extra = [f"--build-arg={name}={value}" for name, value in build_args]
    if target is not None:
        extra.append(f"--target={target}")
    storage = Storage(store_dir.absolute())
    with _changing(storage):
        image = _build(storage, dockerfile, extra, timeout, on_output or (lambda data: None))
        notes = [note for layer in image.layers for note in drop_devices(layer)]
        require_shell(image.layers, f"the image built from {dockerfile}")
        start = start_of(storage.config(image.id))
        wanted = [_HOLD + image.id] + ([_full_name(tag)] if tag is not None else [])
        if missing := [name for name in wanted if name not in image.names]:
            storage.tag(image.id, missing)
        run_program(["sync", "--file-system", str(storage.home)], timeout=timeout).check("writing the image to disk")
    return Base("dockerfile", str(dockerfile.parent), image.layers, start, f"sha256:{image.id}", tuple(notes))


def images(store_dir: Path) -> tuple[BuiltImage, ...]:
    """The held images, oldest first, for the store to compare with the bases that it knows."""
    return tuple(
        BuiltImage(
            digest=f"sha256:{image.id}",
            names=tuple(name for name in image.names if not name.startswith(_HOLD)),
            created=image.created,
            layers=image.layers,
            size_bytes=image.size_bytes,
        )
        for image in Storage(store_dir.absolute()).images()
        if _is_held(image)
    )


def remove_image(store_dir: Path, digest: str) -> None:
    """Let go of a held image and remove it; layers that other images share stay. NotFound if it is not held."""
    storage = Storage(store_dir.absolute())
    image_id = digest.removeprefix("sha256:")
    if not any(image.id == image_id and _is_held(image) for image in storage.images()):
        raise NotFound(f"no image {digest} is held in {store_dir}")
    with _changing(storage):
        storage.remove_images([image_id])


def prune_images(store_dir: Path) -> int:
    """Remove the build cache and pulled images that no held image is built on; returns how many images went."""
    storage = Storage(store_dir.absolute())
    if not storage.home.is_dir():
        return 0
    with _changing(storage):
        present = storage.images()
        needed = {layer for image in present if _is_held(image) for layer in image.layers}
        unused = [image.id for image in present if not _is_held(image) and not needed.intersection(image.layers[:1])]
        storage.remove_images(unused)
    return len(unused)


def _dockerfile_in(directory: Path) -> Path:
    if not directory.is_dir():
        raise BuildError(f"{directory} is not a directory; name one that holds a Dockerfile")
    for name in ("Dockerfile", "Containerfile"):
        if (directory / name).is_file():
            return (directory / name).resolve()
    raise BuildError(f"{directory} holds no Dockerfile")


def _build(
    storage: Storage, dockerfile: Path, extra: Sequence[str], timeout: float, on_output: Callable[[bytes], None]
) -> StoredImage:
    try:
        finished, image_id = storage.build(
            dockerfile.parent,
            dockerfile,
            isolation=isolation_of(storage),
            extra=extra,
            timeout=timeout,
            on_output=on_output,
        )
    except KernelError as error:
        if not error.details.get("timed_out"):
            raise
        raise BuildError(f"{dockerfile} was not built within {timeout:g} s", timed_out=True) from error
    if not image_id:
        raise _failure(dockerfile, finished)
    image = next(image for image in storage.images() if image.id == image_id)
    if not image.whole:
        raise StoreError(f"{storage.home} is damaged: it lacks layers of image {image_id[:12]}; remove it, build again")
    return image


def _failure(dockerfile: Path, finished: Finished) -> WaypointError:
    tail = finished.tail(_TAIL_LINES)
    if "no space left on device" in tail.lower():
        return DiskFull(f"no space to build {dockerfile}; the builder's output ends:\n{tail}", output=tail)
    return BuildError(
        f"{dockerfile} does not build; nothing of it is kept; the builder's output ends:\n{tail}",
        output=tail,
        exit_code=finished.exit_code,
    )


def _is_held(image: StoredImage) -> bool:
    return any(name.startswith(_HOLD) for name in image.names)


def _full_name(tag: str) -> str:
    """As buildah stores it: names without a registry are local, names without a version are the latest."""
    repository, colon, version = tag.partition(":")
    return f"localhost/{repository.removeprefix('localhost/')}:{version if colon else 'latest'}"


@contextmanager
def _changing(storage: Storage) -> Iterator[None]:
    """Hold the lock, and leave no image behind that was not there before, unless the body comes to its end.

    The list of images before is on disk while the body runs: if this process is killed, the next one rolls back.
    """
    journal = storage.home / "open.json"
    with storage.locked(_LOCK_TIMEOUT):
        if journal.exists():
            _roll_back(storage, journal)
        fresh = journal.with_suffix(".new")
        fresh.write_text(json.dumps([image.id for image in storage.images()]))
        fresh.replace(journal)
        try:
            yield
        except BaseException:
            try:
                _roll_back(storage, journal)
            except WaypointError:  # the caller's error is the one to tell; the journal stays for the next attempt
                _log.exception("%s: clean-up after a failed build did not succeed", storage.home)
            raise
        journal.unlink()


def _roll_back(storage: Storage, journal: Path) -> None:
    before = frozenset(json.loads(journal.read_bytes()))
    storage.sweep()
    storage.remove_images([image.id for image in storage.images() if image.id not in before])
    journal.unlink()
