"""The files of a session on their way into a snapshot: which layers it names, and what its own layer holds.

Two ways to seal the files that a session has changed. Copying its upper layer under the freeze leaves the session where it
is and costs by the byte; re-homing ends it, makes the upper itself the sealed layer and restores the session over it, and
costs a restore whatever the number of files. Small uppers are copied.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waypoint.counting import NOT_YET, write_down
from waypoint.errors import KernelError, NotFound, StoreError, WaypointError
from waypoint.guest.layer import PRIVATE, forget_socket
from waypoint.kernel import aliases, inspect, netlock, trees, usage
from waypoint.kernel.survey import Survey
from waypoint.model import SessionRecord, SnapshotRecord
from waypoint.squash import DEPTH, squash
from waypoint.store.store import Store

__all__ = ["Sealing", "is_big", "parent_of"]

COPY_ENTRIES = 3000
COPY_BYTES = 24 << 20
"""What is copied ahead of the asking, when nobody waits for it."""
_COPIED_PER_MS = 5
_COPIED_BYTES_PER_MS = 512 << 10
_RESTORE_MS = 45.0
_RESTORED_BYTES_PER_MS = 1 << 20
_MOST_LAYERS = 100
"""The kernel tells of a mount in one line, with all of its layers, of which CRIU reads 4096 characters."""


@dataclass(slots=True)
class Sealing:
    """What is decided and learnt on the way to a row."""

    store: Store
    session: SessionRecord
    snapshot: str
    full: bool = True
    layers: tuple[int, ...] = ()
    new_layer: int | None = None
    files_bytes: int = 0
    rehome: bool = False
    print: str = ""
    digest: str = ""
    """Of the files of the layer, if that has been sealed by copying it."""
    hidden: aliases.Hidden | None = None
    """Names of changed files that hang on the overlay's index alone would show the old content over the new layer."""
    survey: Survey | None = None
    """Of a layer that is not copied: what it holds is found out beside all the rest, and written into the row at the end; or later."""
    manifest: dict[str, Any] = field(default_factory=dict)
    record: SnapshotRecord | None = None
    renamed: dict[str, str] = field(default_factory=dict)
    typed: bytes = b""
    parent: SnapshotRecord | None = None
    shared: bool = True
    """A process can change a file without a trace in its times."""
    sockets: bool = True
    """A process has one of any kind; init has but unix ones, and does not count."""
    still: bool = False
    """CRIU changes no files while it dumps: they can be copied beside it."""
    sealed: bool = False
    below: tuple[int, ...] = ()
    """The layers under the session's own."""
    merged: int | None = None
    """One of them, made for this."""
    unused: int | None = None
    """A layer that was made before it was known that no file has changed."""
    held: dict[int, dict[str, int]] = field(default_factory=dict)
    io: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def upper(self) -> Path:
        return self.store.paths.upper(self.session.upper or 0)

    @property
    def work(self) -> Path:
        return self.store.paths.work(self.session.upper or 0)

    def __post_init__(self) -> None:
        self.below = self.session.layers

    def merge_below(self) -> None:
        """Of a session that is to come back over its own layer, and would have too many then. Its processes run meanwhile."""
        base, layers = self.store.db.base(self.session.base), self.session.layers
        if base.flat or len(layers) < DEPTH - 1:
            return
        try:
            self.below = squash(self.store, base, layers)
            self.merged = self.below[0]
        except (StoreError, KernelError, OSError):
            if len(layers) >= _MOST_LAYERS:
                raise

    def drop_merged(self) -> None:
        """It is not brought back after all."""
        if self.merged is not None:
            self.store.discard_layers([self.merged])
            self.below, self.merged = self.session.layers, None

    def prepare(self) -> None:
        """What can be done while the session still runs, for one that does not end here. Once is enough."""
        if self.new_layer is not None:
            return
        self.parent = parent_of(self.store, self.session)
        self.new_layer = self.store.new_layer("sealed")

    def inspect(self) -> None:
        """Of a session that stands still, before anybody works on it: what its processes hold."""
        nameless: list[int] = []
        self.held = inspect.descriptors(self.session.init_pid, nameless)
        self.shared, unnamed = inspect.held_files(self.held)
        # for a mount inside CRIU may make a directory, for a file without a name (one on its way through a socket, too) another
        # name; and both change times
        self.sockets = any("socket" in kinds for pid, kinds in self.held.items() if pid != self.session.init_pid)
        self.still = not (nameless or unnamed or self.sockets or "CAP_SYS_ADMIN" in self.session.spec.capabilities)

    def seal(self, *, end_session: bool, busy: bool, stack: contextlib.ExitStack) -> None:
        """Runs while the session is frozen; `stack` is closed when the snapshot's row names its layers."""
        session, store = self.session, self.store
        assert session.upper is not None
        self.sealed = True
        if self.rehome or end_session:
            self.hidden = aliases.Hidden(self.work / "index")
            self.layers = (session.upper, *self.below)
            self.files_bytes = NOT_YET
            return
        layer = self.new_layer
        assert layer is not None
        if not busy and not self.shared:
            self.print = f"{session.upper}:{trees.fingerprint(self.upper, skip=PRIVATE)}"
            if self.parent is not None and self.parent.manifest.get("upper_print") == self.print:
                with contextlib.suppress(NotFound):
                    self.layers = stack.enter_context(store.holding(self.parent)).layers
                    self.unused, self.new_layer = layer, None
                    return
        sealed = store.paths.upper(layer)
        trees.copy_tree(self.upper, sealed)
        forget_socket(sealed)
        self.hidden = aliases.Hidden(self.work / "index")
        self.files_bytes = trees.allocated_bytes(sealed)
        self.layers = (layer, *session.layers)

    def look(self) -> None:
        """Begin, or begin again, to find out what the upper holds."""
        self._drop_survey()
        self.survey = Survey(self.upper, PRIVATE)

    def link_names(self) -> None:
        """While the session is still there, before anybody looks at the layer as it will be."""
        if self.hidden is None:
            return
        root, sealed = f"/proc/{self.session.init_pid}/root", self.store.paths.upper(self.layers[0])
        linked = aliases.link_hidden_names(root, self.upper, self.hidden.inodes(), sealed, self.session.spec.idmap)
        if linked:
            self.digest = ""
        if linked and self.survey is not None:
            self.look()

    def forget_index(self) -> None:
        """When the session's overlay is gone."""
        if self.hidden is not None:
            self.hidden.forget_files()

    def surveyed(self, record: SnapshotRecord) -> SnapshotRecord:
        """With what the layer holds, if somebody has looked."""
        if self.survey is None:
            return record
        survey, self.survey = self.survey, None
        return write_down(self.store, record, survey)

    def stop_looking(self) -> None:
        """It comes to nothing."""
        self._drop_survey()
        if self.hidden is not None:
            self.hidden.cancel()

    def _drop_survey(self) -> None:
        if self.survey is not None:
            survey, self.survey = self.survey, None
            survey.cancel()

    def clear(self) -> None:
        """What the session has left behind with its overlay."""
        trees.discard_tree(self.work)
        if self.merged is not None:
            self.store.discard_layers(self.session.layers)

    def discard_layer(self) -> None:
        layers = [layer for layer in (self.new_layer, self.merged, self.unused) if layer is not None]
        self.new_layer = self.merged = self.unused = None
        if layers:
            self.store.discard_layers(layers)

    def discard_unused(self) -> None:
        if self.unused is not None:
            with contextlib.suppress(OSError, WaypointError):  # the snapshot is there: what is left is for gc
                self.store.forget_layer(self.unused)
            self.unused = None


def is_big(session: SessionRecord, upper: Path, *, draft: bool) -> bool:
    """Copying what the session has changed would take longer than to end it and bring it back over that.

    A session that is brought back loses its connections to the outside: one that has any is copied, whatever it takes.
    """
    if draft:
        return trees.measure(upper, most_entries=COPY_ENTRIES, most_bytes=COPY_BYTES).over
    if not _takes_longer(upper, _RESTORE_MS):  # nor if it had memory to be restored
        return False
    big = _takes_longer(upper, _RESTORE_MS + usage.tree_usage(session.init_pid)[1] / _RESTORED_BYTES_PER_MS)
    return big and (session.spec.network == "none" or not netlock.has_connections(session.init_pid))


def _takes_longer(upper: Path, than_ms: float) -> bool:
    most_entries, most_bytes = int(than_ms * _COPIED_PER_MS), int(than_ms * _COPIED_BYTES_PER_MS)
    return trees.measure(upper, most_entries=most_entries, most_bytes=most_bytes).over


def parent_of(store: Store, session: SessionRecord) -> SnapshotRecord | None:
    with contextlib.suppress(WaypointError):
        return None if session.snapshot is None else store.db.snapshot(session.snapshot)
    return None
