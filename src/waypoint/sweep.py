"""Garbage collection: whatever no row names goes, on disk and in the kernel. Safe at any time, needed after a crash.

It waits for operations in flight (they hold the store's gate): what they have made and not yet named is not garbage.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, fields
from pathlib import Path

from waypoint import bringup, faults
from waypoint.ending import resolve
from waypoint.errors import KernelError, NotFound
from waypoint.kernel import cgroups, nat, processes, trees
from waypoint.kernel.criu_restore import end_half_restored
from waypoint.model import Process
from waypoint.store.store import Store

__all__ = ["Swept", "sweep"]


@dataclass(slots=True)
class Swept:
    """How many of each were removed."""

    sessions: int = 0
    processes: int = 0
    cgroups: int = 0
    links: int = 0
    layers: int = 0
    images: int = 0
    bases: int = 0
    files: int = 0
    freed_bytes: int = 0

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def sweep(store: Store, boot: str, *, timeout: float = 60) -> Swept:
    swept = Swept()
    with store.alone(timeout):
        _thaw(store)
        _half_made_sessions(store, swept)
        faults.point("gc-sessions")
        _half_ended_sessions(store, boot)
        _forgotten_pauses(store, swept)
        live = _strays(store, boot, swept)
        faults.point("gc-processes")
        _groups(store, live, swept)
        _links(store, live, swept)
        _layers(store, swept)
        faults.point("gc-layers")
        _images(store, swept)
        _bases(store, swept)
        _directories(store, swept)
    return swept


def _half_made_sessions(store: Store, swept: Swept) -> None:
    """Nobody is making anything while the gate is ours: a session still `creating` was left by a crash."""
    for record in store.db.sessions():
        if record.state == "creating":
            store.db.remove_session(record.id)
            swept.sessions += 1


def _half_ended_sessions(store: Store, boot: str) -> None:
    for record in store.db.sessions():
        resolve(store, record, boot)


def _forgotten_pauses(store: Store, swept: Swept) -> None:
    """A snapshot that held a paused session, which has been resumed or removed since."""
    held = {record.pause for record in store.db.sessions()}
    for record in store.db.snapshots():
        if record.pinned and record.id not in held:
            store.db.reparent(record.id, record.parent)
            store.db.remove_snapshots([record.id])
            swept.images += 1


def _strays(store: Store, boot: str, swept: Swept) -> set[int]:
    """End every init that no row names, and what a killed CRIU left; the uppers of the inits that live on."""
    named = {
        Process(record.init_pid, record.init_start): record.upper
        for record in store.db.sessions()
        if record.state == "live" and record.boot == boot and record.upper is not None
    }
    live: set[int] = set()
    swept.processes += end_half_restored()
    for init in processes.inits(store.tag):
        if init in named:
            live.add(named[init] or 0)
            continue
        processes.kill(init)
        if not processes.wait_gone(init, 10):
            raise KernelError(f"process {init.pid} was left by a crash and does not die")
        swept.processes += 1
    return live


def _thaw(store: Store) -> None:
    """Nobody is taking a snapshot now: a group that stands still was left so."""
    for _, group in cgroups.list_groups(store.tag):
        cgroups.thaw(group)


def _groups(store: Store, live: set[int], swept: Swept) -> None:
    for name, group in cgroups.list_groups(store.tag):
        if not name.isdigit() or int(name) not in live:
            cgroups.remove_groups((group,))
            swept.cgroups += 1


def _links(store: Store, live: set[int], swept: Swept) -> None:
    swept.links += len(nat.sweep_nat({bringup.incarnation(store, upper) for upper in live}, scope=f"{store.tag}-"))


def _layers(store: Store, swept: Swept) -> None:
    used = store.db.layers_in_use()
    for layer in store.db.layers():
        if layer not in used:
            swept.freed_bytes += _remove(store.paths.layer(layer))
            store.db.forget_layers([layer])
            swept.layers += 1
    for entry in store.paths.layers.iterdir():
        if not entry.name.isdigit() or int(entry.name) not in used:
            swept.freed_bytes += _remove(entry)
            swept.layers += 1


def _images(store: Store, swept: Swept) -> None:
    named = {record.image for record in store.db.snapshots()}
    for entry in store.paths.images.iterdir():
        if entry.name not in named:
            swept.freed_bytes += _remove(entry)
            swept.images += 1


def _bases(store: Store, swept: Swept) -> None:
    """Unpacked and built bases are kept while a session, a snapshot or a name needs them."""
    from waypoint.build.dockerfile import images, prune_images, remove_image

    used = store.db.bases_in_use()
    for base in store.db.bases():
        if base.id not in used and base.kind != "host" and not store.db.base_has_name(base.id):
            store.db.remove_base(base.id)
            swept.bases += 1
    kept = store.db.bases()
    for entry in store.paths.bases.iterdir():
        if not any(entry.name == base.id for base in kept):
            swept.freed_bytes += _remove(entry)
    if store.paths.builder.exists():
        digests = {base.digest for base in kept}
        for image in images(store.paths.builder):
            if image.digest not in digests:
                remove_image(store.paths.builder, image.digest)
        prune_images(store.paths.builder)


def _directories(store: Store, swept: Swept) -> None:
    for entry in store.paths.sessions.iterdir():
        try:
            store.db.session(entry.name)
        except NotFound:
            shutil.rmtree(entry, ignore_errors=True)
            swept.files += 1


def _remove(path: Path) -> int:
    """Bytes freed."""
    size = trees.allocated_bytes(path)
    shutil.rmtree(path, ignore_errors=True)
    return size
