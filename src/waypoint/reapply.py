"""Give restored processes back what CRIU forgets: part of every restore, before anybody gets the session."""

from __future__ import annotations

from pathlib import Path

from waypoint.errors import VerifyFailed
from waypoint.kernel.forgotten import read_forgotten, write_forgotten
from waypoint.kernel.relock import relock
from waypoint.kernel.typed import type_again
from waypoint.model import Process, SnapshotRecord

__all__ = ["LOST", "TYPED", "collect", "reapply"]

LOST = "lost"
TYPED = "typed"
"""The manifest's keys."""

collect = read_forgotten


def reapply(init: Process, snapshot: SnapshotRecord, images: Path) -> None:
    """VerifyFailed when something cannot be given back: a restore that quietly differs is worse than none."""
    problems = []
    try:
        relock(init.pid, images)
    except OSError as error:
        problems.append(f"a record lock on a mapped file: {error.strerror}")
    if TYPED in snapshot.manifest:
        type_again(init.pid, bytes.fromhex(snapshot.manifest[TYPED]))
    problems += write_forgotten(init.pid, snapshot.manifest.get(LOST) or [])
    if problems:
        raise VerifyFailed(
            f"snapshot {snapshot.id}: the restored processes cannot have what they had: {'; '.join(problems[:5])}. "
            "The host may have other CPUs or fewer privileges than when the snapshot was taken",
            problems=problems,
        )
