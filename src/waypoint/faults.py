"""Named points where a test makes the engine die, to prove that nothing is lost there. Inert unless armed."""

from __future__ import annotations

import os

__all__ = ["POINTS", "arm", "point"]

POINTS = (
    "new-row",
    "start-launched",
    "new-started",
    "snapshot-staged",
    "snapshot-quiesced",
    "snapshot-frozen",
    "snapshot-renamed",
    "snapshot-intended",
    "snapshot-dumped",
    "snapshot-moving",
    "snapshot-moved",
    "snapshot-committed",
    "rehome-begun",
    "rehome-up",
    "rehome-committed",
    "files-frozen",
    "files-intended",
    "files-ended",
    "files-committed",
    "restore-begun",
    "up-layer",
    "up-begun",
    "up-network",
    "up-restored",
    "restore-up",
    "restore-committed",
    "restore-retired",
    "fork-row",
    "fork-up",
    "fork-live",
    "pause-committed",
    "resume-up",
    "remove-row",
    "remove-ended",
    "drop-rows",
    "drop-images",
    "gc-sessions",
    "gc-processes",
    "gc-layers",
)
_armed: str | None = None


def arm(name: str) -> None:
    """From now on reaching `name` is kill -9 of this very process."""
    global _armed
    if name not in POINTS:
        raise ValueError(f"no fault point {name}; there are {', '.join(POINTS)}")
    _armed = name


def point(name: str) -> None:
    if _armed == name:
        os.kill(os.getpid(), 9)
