"""A packed root filesystem, or an image archive (`docker save`, OCI layout), unpacked into layers.

Unpacked once, by a tar that is confined to the target (kernel/untar.py); sessions then share the layers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from waypoint.build.archive import is_image_archive, read_image_archive
from waypoint.build.base import Base, StartState, require_shell, start_of
from waypoint.build.layers import convert_whiteouts, drop_devices
from waypoint.errors import BuildError, DiskFull, KernelError, UsageError
from waypoint.kernel.programs import run_program
from waypoint.kernel.untar import untar

__all__ = ["unpack_tarball"]

Progress = Callable[[int, int], None]

_SIGNS_OF_A_FULL_DISK = ("No space left on device", "Wrote only ", "Disk quota exceeded")


def unpack_tarball(archive: Path, into: Path, *, on_progress: Progress | None = None, timeout: float = 3600) -> Base:
    """Unpack into the empty directory `into`, on disk when this returns; on any failure `into` is empty again.

    The layers are `into/0` (the lowest), `into/1` and so on; the caller may rename `into` and say `base.moved(...)`.
    `on_progress(done, total)` counts bytes of the archive; when it turns out to be an image archive, `total` grows once
    by the size of the layers in it. Raises BuildError, DiskFull, HostUnsupported.
    """
    if not archive.is_file():
        raise BuildError(f"{archive} is not a file; name a tar archive of a root filesystem, or a saved image")
    if not into.is_dir() or any(into.iterdir()):
        raise UsageError(f"{into} must be an empty directory to unpack into")
    try:
        base = _Unpacking(archive, into, on_progress, timeout).base()
        run_program(["sync", "--file-system", str(into)], timeout=timeout).check(f"writing {into} to disk")
    except BaseException:
        for entry in list(into.iterdir()):
            shutil.rmtree(entry)
        raise
    return base


class _Unpacking:
    """One archive on its way into layers; keeps the sums of the progress."""

    def __init__(self, archive: Path, into: Path, on_progress: Progress | None, timeout: float) -> None:
        self._archive = archive
        self._into = into
        self._timeout = timeout
        self._on_progress = on_progress
        self._done = 0
        self._total = archive.stat().st_size
        self._jail = into / "jail"
        self._notes: list[str] = []

    def base(self) -> Base:
        self._jail.mkdir()
        bottom, digest = self._unpack(self._archive, "0")
        kind, layers, start = "tarball", [bottom], StartState()
        if is_image_archive(bottom):
            kind = "image-archive"
            layers, start = self._image(bottom)
        self._jail.rmdir()
        for layer in layers:
            self._notes.extend(drop_devices(layer))
        layers.reverse()
        require_shell(layers, str(self._archive))
        return Base(kind, str(self._archive), tuple(layers), start, f"sha256:{digest}", tuple(self._notes))

    def _image(self, unpacked: Path) -> tuple[list[Path], StartState]:
        packed = unpacked.rename(self._into / "archive")
        image = read_image_archive(packed)
        self._total += sum(blob.path.stat().st_size for blob in image.layers)
        layers = []
        for number, blob in enumerate(image.layers):
            layer, digest = self._unpack(blob.path, str(number))
            if blob.digest not in (None, digest):
                raise BuildError(
                    f"{self._archive} is damaged: its layer {blob.path.name} has another digest; save it again"
                )
            convert_whiteouts(layer)
            layers.append(layer)
        if not layers:
            raise BuildError(f"{self._archive} holds an image without layers; there is nothing to start a session on")
        shutil.rmtree(packed)
        return layers, start_of(image.config)

    def _unpack(self, archive: Path, name: str) -> tuple[Path, str]:
        layer = self._into / name
        layer.mkdir()
        layer.chmod(0o755)  # whatever our umask is: this is the session's `/` unless the archive says otherwise
        before = self._done

        def count(done: int) -> None:
            self._done = before + done
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)

        try:
            digest, warnings = untar(archive, layer, jail=self._jail, timeout=self._timeout, on_bytes=count)
        except KernelError as error:
            if any(sign in error.message for sign in _SIGNS_OF_A_FULL_DISK):
                raise DiskFull(
                    f"no space to unpack {self._archive} into {self._into}; free some, or use another store"
                ) from error
            raise BuildError(
                f"{self._archive} could not be unpacked, and nothing of it is kept; {error.message}", **error.details
            ) from error
        self._notes.extend(warnings)
        return layer, digest
