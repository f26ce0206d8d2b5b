"""A winner as an OCI image: one archive with the layout that the specification names, which `docker load`, `podman load`,
skopeo and buildah read. (The `manifest.json` in it is for Docker before 25, which knows no layout.)

Where the backend has images of its own (Docker, Podman), the winner's is saved with its configuration. Elsewhere the image has two
layers: all files that the search began with, and what the winner changed, with whiteouts for what it removed.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from statefork.environment import Environment
from statefork.errors import KernelError
from statefork.explore.guest_tar import tar_of, tar_of_root

__all__ = ["write_image"]

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_GZIPPED = f"{_LAYER}+gzip"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_KERNELS = ("proc", "sys", "dev", ".waypoint")


@dataclass(frozen=True, slots=True)
class _Layer:
    file: Path
    kind: str = _LAYER


def write_image(environment: Environment, began: str, archive: Path, *, name: str, history: Sequence[str] = ()) -> None:
    """`began` is the snapshot that the search began with; `name` is what the image is called when it is loaded."""
    with tempfile.TemporaryDirectory(prefix=".statefork-oci-", dir=archive.absolute().parent) as scratch:
        space = Path(scratch)
        found = _own_image(environment, space) or _read_image(environment, began, space, history)
        fresh = space / "image.tar"
        _write_layout(fresh, found[0], found[1], name)
        fresh.replace(archive)


# -- what is in it ------------------------------------------------------------------------------------------------------


def _own_image(environment: Environment, space: Path) -> tuple[dict[str, Any], list[_Layer]] | None:
    """What the backend itself saves; the snapshot that is taken for it stays in the tree of the environment."""
    snapshot = environment.snapshot()
    family, saved = environment.family, space / "saved.tar"
    if not family.driver.save_image(family.tree.find(snapshot).captured, saved):
        return None
    unpacked = space / "saved"
    with tarfile.open(saved) as archive:
        archive.extractall(unpacked, filter="data")
    saved.unlink()
    (manifest,) = json.loads((unpacked / "manifest.json").read_text())
    config = json.loads((unpacked / manifest["Config"]).read_text())
    layers = [_layer_file((unpacked / layer).resolve()) for layer in manifest["Layers"]]
    if len(layers) != len(config["rootfs"]["diff_ids"]):
        raise KernelError(f"the image that {environment.backend} saved has layers that its configuration does not name")
    return config, layers


def _layer_file(path: Path) -> _Layer:
    with path.open("rb") as file:
        return _Layer(path, _GZIPPED if file.read(2) == b"\x1f\x8b" else _LAYER)


def _read_image(
    environment: Environment, began: str, space: Path, history: Sequence[str]
) -> tuple[dict[str, Any], list[_Layer]]:
    base, upper = space / "base.tar", space / "upper.tar"
    (earlier,) = environment.fork(1, from_snapshot=began)
    with earlier, tar_of_root(earlier) as files, base.open("wb") as target:
        shutil.copyfileobj(files, target)
    found = environment.diff(began)
    names = [name for name in (*found.added, *found.changed) if name != "/" and name.split("/")[1] not in _KERNELS]
    with tarfile.open(upper, "w", format=tarfile.PAX_FORMAT) as layer:
        for gone in _topmost(found.removed):
            layer.addfile(
                tarfile.TarInfo(posixpath.join(posixpath.dirname(gone), f".wh.{posixpath.basename(gone)}")[1:])
            )
        for piece in tar_of(environment, "/", [name[1:] for name in names]):
            _append(layer, piece)
    where = environment.run(["uname", "-m"]).stdout.strip()
    shell = "/bin/bash" if environment.run(["test", "-x", "/bin/bash"]).ok else "/bin/sh"
    created = datetime.now(UTC).isoformat(timespec="seconds")
    config = {
        "created": created,
        "architecture": _ARCHITECTURES.get(where, where),
        "os": "linux",
        "config": {"Env": [f"PATH={_PATH}"], "Cmd": [shell], "WorkingDir": _cwd(environment)},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_digest(file)}" for file in (base, upper)]},
        "history": [
            {"created": created, "created_by": "statefork: what the search began with"},
            {"created": created, "created_by": "statefork: " + "; ".join(history or ["what changed"])},
        ],
    }
    return config, [_Layer(base), _Layer(upper)]


def _cwd(environment: Environment) -> str:
    return environment.exec_command(":").cwd or "/"


def _topmost(names: Sequence[str]) -> list[str]:
    """A whiteout of a directory covers all that is in it."""
    gone = set(names)
    return [name for name in sorted(gone) if posixpath.dirname(name) not in gone]


def _append(layer: tarfile.TarFile, piece: IO[bytes]) -> None:
    with tarfile.open(fileobj=piece, mode="r|") as archive:
        for member in archive:
            member.name = member.name.removeprefix("./")
            layer.addfile(member, archive.extractfile(member) if member.isreg() else None)


# -- the layout -----------------------------------------------------------------------------------------------------------


def _write_layout(target: Path, config: Mapping[str, Any], layers: Sequence[_Layer], name: str) -> None:
    if ":" not in name.rpartition("/")[2]:
        name = f"{name}:latest"
    described = [_described(layer.kind, layer.file) for layer in layers]
    config_data = json.dumps(config).encode()
    config_about = _about(_CONFIG, config_data)
    manifest = {"schemaVersion": 2, "mediaType": _MANIFEST, "config": config_about, "layers": described}
    manifest_data = json.dumps(manifest).encode()
    notes = {"org.opencontainers.image.ref.name": name.rpartition(":")[2], "io.containerd.image.name": name}
    index = {"schemaVersion": 2, "manifests": [{**_about(_MANIFEST, manifest_data), "annotations": notes}]}
    blobs = [_blob(about) for about in described]
    old = [{"Config": _blob(config_about), "RepoTags": [name], "Layers": blobs}]
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        _add(archive, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add(archive, "index.json", json.dumps(index).encode())
        _add(archive, "manifest.json", json.dumps(old).encode())
        _add(archive, _blob(config_about), config_data)
        _add(archive, f"blobs/sha256/{hashlib.sha256(manifest_data).hexdigest()}", manifest_data)
        written: set[str] = set()
        for layer, blob in zip(layers, blobs, strict=True):
            if blob not in written:  # empty layers are alike
                written.add(blob)
                archive.add(layer.file, blob, filter=_plain)


def _described(kind: str, file: Path) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{_digest(file)}", "size": file.stat().st_size}


def _about(kind: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}


def _blob(about: Mapping[str, Any]) -> str:
    return "blobs/sha256/" + str(about["digest"]).removeprefix("sha256:")


def _digest(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o644
    archive.addfile(member, BytesIO(data))


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member
