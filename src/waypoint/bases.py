"""Bases for sessions: find or make the one that a caller names, and keep it as a row."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from waypoint.build.base import Base
from waypoint.build.dockerfile import build_dockerfile
from waypoint.build.rootfs import use_rootfs
from waypoint.build.tarball import unpack_tarball
from waypoint.errors import NotFound, UsageError
from waypoint.model import BaseRecord
from waypoint.store.store import Store

__all__ = ["base_from_dockerfile", "base_from_rootfs"]


def base_from_rootfs(
    store: Store, source: Path, *, name: str | None = None, on_progress: Callable[[int, int], None] | None = None
) -> BaseRecord:
    """A directory, used in place, or a tarball or saved image, unpacked once: the same file again costs nothing."""
    if source.is_dir():
        return _keep(store, use_rootfs(source, store=store.paths.home), name)
    if not source.exists():
        raise UsageError(f"{source} does not exist; give a directory or a tarball with a root file system")
    st = source.stat()
    key = f"{source.resolve()} {st.st_size} {st.st_mtime_ns}"
    for known in store.db.bases():
        if known.kind in ("tarball", "image-archive") and known.source == key:
            return known
    with store.operation():
        staging = Path(mkdtemp(prefix=f".{_id(key)}.", dir=store.paths.bases))
        staging.chmod(0o755)
        try:
            made = unpack_tarball(source, staging, on_progress=on_progress)
            final = store.paths.base(_id(key))
            if final.exists():  # somebody unpacked the same file meanwhile, or a crash came between this and the row
                shutil.rmtree(staging)
            else:
                staging.rename(final)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return _keep(store, made.moved(staging, final), name, source=key, identity=_id(key))


def base_from_dockerfile(
    store: Store, directory: Path, *, name: str | None = None, on_output: Callable[[bytes], None] | None = None
) -> BaseRecord:
    """Build through buildah; the image's layers are used where they lie."""
    with store.operation():
        made = build_dockerfile(directory, store_dir=store.paths.builder, tag=name, on_output=on_output)
        return _keep(store, made, name)


def _keep(
    store: Store, made: Base, name: str | None, source: str | None = None, identity: str | None = None
) -> BaseRecord:
    record = BaseRecord(
        id=identity or _id(made.digest),
        kind=made.kind,
        source=source or made.source,
        layers=tuple(str(layer) for layer in made.layers),
        start=made.start,
        digest=made.digest,
        flat=False,
        notes=made.notes,
    )
    try:
        known = store.db.base(record.id)
    except NotFound:
        store.db.add_base(record, name)
        return record
    if name is not None:
        store.db.name_base(known.id, name)
    return known


def _id(key: str) -> str:
    from hashlib import sha256

    return "b" + sha256(key.encode(errors="surrogateescape")).hexdigest()[:12]
