"""Merge a deep chain of layers into one.

Every generation of restore-and-snapshot adds a layer, and both overlayfs and CRIU have a limit (mountinfo lines of 4 KiB,
about 120 layers). The kernel's own merged view decides what is in the result, not our reading of its marks: whatever a layer of
the chain names is copied from that view, and what it hides becomes a whiteout. Directories that were renamed or made opaque are
copied whole.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from waypoint.guest.layer import OPAQUE
from waypoint.kernel import trees
from waypoint.kernel.overlays import open_overlay
from waypoint.model import BaseRecord
from waypoint.store.store import Store

__all__ = ["DEPTH", "squash"]

DEPTH = 48
"""Chains longer than this are merged when a snapshot has just been taken."""

_REDIRECT = "trusted.overlay.redirect"


@dataclass(slots=True)
class _Plan:
    """What the merged layer holds, as paths relative to the root."""

    copied: list[str] = field(default_factory=list)
    whiteouts: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)


def squash(store: Store, base: BaseRecord, layers: tuple[int, ...]) -> tuple[int, ...]:
    """The same content in two layers: a merged one over the guest layer, which is the last of `layers`."""
    chain, guest = layers[:-1], layers[-1]
    names = [f"{layer}/d" for layer in layers]
    view = open_overlay(store.paths.layers, names, [Path(layer) for layer in base.layers], around_layers=False)
    merged = store.new_layer("sealed")
    try:
        root = Path(f"/proc/self/fd/{view}")
        plan = _Plan()
        _merge(root, "", [str(store.paths.upper(layer)) for layer in chain], plan)
        target = store.paths.upper(merged)
        target.mkdir(mode=0o755)
        trees.copy_listed(view, plan.copied, target)
        for path in plan.opaque:
            os.setxattr(target / path, OPAQUE, b"y")
        for path in plan.whiteouts:
            os.mknod(target / path, stat.S_IFCHR, os.makedev(0, 0))
        return (merged, guest)
    except BaseException:
        store.discard_layers([merged])
        raise
    finally:
        os.close(view)


def _merge(root: Path, path: str, directories: list[str], plan: _Plan) -> None:
    """`directories` are the chain's own versions of the directory `path`, top-most first."""
    names = sorted({entry.name for directory in directories for entry in os.scandir(directory)})
    for name in names:
        inner = f"{path}/{name}" if path else name
        try:
            st = os.lstat(root / inner)
        except FileNotFoundError:
            plan.whiteouts.append(inner)
            continue
        plan.copied.append(inner)
        if not stat.S_ISDIR(st.st_mode):
            continue
        versions = [f"{directory}/{name}" for directory in directories if os.path.lexists(f"{directory}/{name}")]
        if all(_plain(version) for version in versions):
            _merge(root, inner, versions, plan)
        else:
            plan.opaque.append(inner)
            for directory, subdirectories, files in os.walk(root / inner):
                below = os.path.relpath(directory, root)
                plan.copied += [f"{below}/{entry}" for entry in (*subdirectories, *files)]


def _plain(version: str) -> bool:
    """A directory that merges with those below it under its own name."""
    if not stat.S_ISDIR(os.lstat(version).st_mode):
        return False
    return not any(mark in os.listxattr(version, follow_symlinks=False) for mark in (OPAQUE, _REDIRECT))
