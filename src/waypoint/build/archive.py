"""Read an image archive (`docker save`, an OCI layout in a tar) that has been unpacked into a directory.

Nothing in it is trusted: the names in its JSON are resolved inside the directory only, and an OCI blob must have the
digest that names it.
"""

from __future__ import annotations

import json
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waypoint.build.lookup import find
from waypoint.errors import BuildError

__all__ = ["ArchivedImage", "Blob", "is_image_archive", "read_image_archive"]

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_ROOT_DIRECTORIES = ("bin", "etc", "usr")
_LARGEST_JSON = 16 << 20


@dataclass(frozen=True, slots=True)
class Blob:
    """One packed layer; `digest` is the sha256 in hex that the file must have, where the archive names one."""

    path: Path
    digest: str | None


@dataclass(frozen=True, slots=True)
class ArchivedImage:
    config: dict[str, Any]
    """The image's `config` object: Env, WorkingDir, User, Entrypoint, Cmd."""
    layers: tuple[Blob, ...]
    """Lowest first, as image formats have it."""


def is_image_archive(directory: Path) -> bool:
    """A root filesystem may hold a manifest.json too, so it must not look like a root."""
    if any((directory / name).exists() for name in _ROOT_DIRECTORIES):
        return False
    docker = (directory / "manifest.json").is_file()
    oci = (directory / "oci-layout").is_file() and (directory / "index.json").is_file()
    return docker or oci


def read_image_archive(directory: Path) -> ArchivedImage:
    """The one image in the archive; BuildError if it holds none or several for this machine, or is not whole."""
    try:
        if (directory / "manifest.json").is_file():
            return _read_docker(directory)
        return _read_oci(directory)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise BuildError(f"the image archive is damaged or of an unknown kind: {error!r}; save it again") from error


def _read_docker(directory: Path) -> ArchivedImage:
    images = _json(directory, "manifest.json")
    if len(images) != 1:
        names = [tag for image in images for tag in image.get("RepoTags") or ["(no name)"]]
        raise BuildError(
            f"the archive holds {len(images)} images ({', '.join(names)}); save the one that you want alone"
        )
    config = _json(directory, images[0]["Config"])
    return ArchivedImage(
        config.get("config") or {}, tuple(_blob(directory, str(name)) for name in images[0]["Layers"] or ())
    )


def _read_oci(directory: Path) -> ArchivedImage:
    manifest = _json(directory, "index.json")
    for _ in range(4):  # an index may point at another index, one per platform
        if "layers" in manifest:
            break
        manifest = _json(directory, _blob_name(_choose(manifest["manifests"])))
    config = _json(directory, _blob_name(manifest["config"]))
    layers = tuple(_blob(directory, _blob_name(layer)) for layer in manifest["layers"])
    return ArchivedImage(config.get("config") or {}, layers)


def _choose(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    machine = _ARCHITECTURES.get(platform.machine(), platform.machine())
    fitting = [
        manifest
        for manifest in manifests
        if (manifest.get("platform") or {"os": "linux", "architecture": machine}).get("os") == "linux"
        and (manifest.get("platform") or {"architecture": machine}).get("architecture") == machine
    ]
    if len(fitting) != 1:
        raise BuildError(
            f"the archive holds {len(fitting)} images for linux/{machine}; save the one that you want alone"
        )
    return fitting[0]


def _blob_name(descriptor: dict[str, Any]) -> str:
    algorithm, _, digest = str(descriptor["digest"]).partition(":")
    return f"blobs/{algorithm}/{digest}"


def _blob(directory: Path, name: str) -> Blob:
    named = re.fullmatch(r"blobs/sha256/([0-9a-f]{64})", name)
    return Blob(_inside(directory, name), named.group(1) if named else None)


def _inside(directory: Path, name: str) -> Path:
    found = find([directory], name)
    if found is None or not found.is_file():
        raise BuildError(f"the image archive is not whole: it names {name!r}, and that is not in it; save it again")
    return found


def _json(directory: Path, name: str) -> Any:
    path = _inside(directory, name)
    if path.stat().st_size > _LARGEST_JSON:
        raise BuildError(f"the image archive is damaged: {name!r} is too large to be what it should be")
    return json.loads(path.read_bytes())
