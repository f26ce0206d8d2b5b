"""What the files of a snapshot take and look like, found out when somebody asks, or a moment after the snapshot was taken.

Thousands of files take longer to be looked at than all the rest of a snapshot; they are in a layer that never changes, so it can be
done afterwards. Until then the row says NOT_YET; whoever reads a row that says so, in whichever process, finds it out himself: a
process that was killed before it had leaves nothing unknown.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace

from waypoint.errors import NotFound, StoreError
from waypoint.guest.layer import PRIVATE
from waypoint.kernel.survey import Survey, Surveyed
from waypoint.model import SnapshotRecord
from waypoint.store.store import Store
from waypoint.verify import FILES

__all__ = ["NOT_YET", "Count", "counted", "write_down"]

NOT_YET = -1
_one_at_a_time = threading.Lock()


def counted(store: Store, record: SnapshotRecord) -> SnapshotRecord:
    """With its `files_bytes`, and the digest in its manifest. NotFound if it was removed before anybody knew."""
    if record.files_bytes != NOT_YET:
        return record
    with store.operation(), _one_at_a_time:
        now = store.db.snapshot(record.id)
        if now.files_bytes == NOT_YET:
            with store.holding(now) as held:
                now = write_down(store, held, Survey(store.paths.upper(held.layers[0]), PRIVATE))
    return replace(record, files_bytes=now.files_bytes, manifest=now.manifest)


def write_down(store: Store, record: SnapshotRecord, survey: Survey) -> SnapshotRecord:
    """The row as it would have been, had there been time."""
    try:
        found = survey.result()
    except OSError:  # a path that is too long for anybody
        found = Surveyed("", 0)
    manifest = record.manifest | ({FILES: found.digest} if found.digest else {})
    with contextlib.suppress(StoreError):  # on a full disk it is found out again: who looks must be able to, to make room
        store.db.update_snapshot(record.id, files_bytes=found.size_bytes, manifest=manifest)
    return replace(record, files_bytes=found.size_bytes, manifest=manifest)


class Count:
    """The `files_bytes` of a snapshot; whoever asks too early finds it out. 0 if it was removed before anybody had."""

    def __init__(self, find_out: Callable[[], SnapshotRecord]) -> None:
        self._find_out = find_out
        self._lock = threading.Lock()
        self._known: int | None = None

    def __call__(self) -> int:
        with self._lock:
            if self._known is None:
                try:
                    self._known = self._find_out().files_bytes
                except NotFound:
                    self._known = 0
            return self._known

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """A copy is the number."""
        return int, (self(),)
