"""Give restored processes back what CRIU forgets: part of every restore, before anybody gets the session."""

from __future__ import annotations

from waypoint.errors import VerifyFailed
from waypoint.kernel.forgotten import read_forgotten, write_forgotten
from waypoint.model import Process, SnapshotRecord

__all__ = ["LOST", "collect", "reapply"]

LOST = "lost"
"""The manifest's key."""

collect = read_forgotten


def reapply(init: Process, snapshot: SnapshotRecord) -> None:
    """VerifyFailed when something cannot be given back: a restore that quietly differs is worse than none."""
    saved = snapshot.manifest.get(LOST)
    if not saved:
        return
    problems = write_forgotten(init.pid, saved)
    if problems:
        raise VerifyFailed(
            f"snapshot {snapshot.id}: the restored processes cannot have what they had: {'; '.join(problems[:5])}. "
            "The host has other CPUs or fewer privileges than when the snapshot was taken",
            problems=problems,
        )
