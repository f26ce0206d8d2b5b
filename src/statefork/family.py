"""What an environment shares with its forks: the driver, the tree, the directory, and the steps that use all three."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from statefork.aside import Aside
from statefork.counted import as_given
from statefork.driver import Captured, Driver, Live, Place
from statefork.errors import DiskFull, KernelError, NotFound, SessionDead, WaypointError
from statefork.home import Grounds
from statefork.ledger import Ledger, SnapshotNote
from statefork.manifest import Comparison, Manifest, compare
from statefork.model import Mode, Snapshot
from statefork.tree import Node, SnapshotTree, mint

__all__ = ["Family", "Standing", "mapped"]

HANDSHAKE_TIMEOUT = 60.0
"""A new environment that has not answered by then has failed; far above what a loaded host needs."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A live thing and its place; replaced as a whole by a restore."""

    live: Live
    place: Place


class Family:
    """Made by the first environment, closed by the last; its methods may be called from several threads."""

    def __init__(
        self,
        driver: Driver,
        home: Path,
        *,
        ledger: Ledger | None = None,
        tree: str | None = None,
        most_history: int | None = None,
    ) -> None:
        """With a ledger the tree outlives this process, if the driver is durable; `tree` goes on with one that did."""
        self.driver = driver
        self.capabilities = driver.probe()
        self.tree = SnapshotTree()
        self.ledger = ledger
        self.most_history = most_history
        self.closed = False
        self._grounds = Grounds(home, tree, kept=ledger is not None and driver.durable)
        self._aside = Aside(self._grounds, driver) if driver.hasty else None
        self._manifests: dict[str, Manifest] = {}
        self._manifest_lock = threading.Lock()

    def bring_up(self, make: Callable[[Place], Live]) -> Standing:
        """A live thing that has answered, or nothing at all."""
        place = self._place("l")
        try:
            live = make(place)
            try:
                live.ready(HANDSHAKE_TIMEOUT)
            except BaseException:
                with contextlib.suppress(WaypointError):
                    live.stop()
                raise
        except OSError as error:
            self._grounds.clear(place)
            raise mapped(error, f"bringing up {place.name}") from error
        except BaseException:
            self._grounds.clear(place)
            raise
        if self._aside is not None:
            self._aside.stock()
        return Standing(live, place)

    def revive(self, node: Node) -> Standing:
        return self.bring_up(lambda place: self.driver.revive(node.captured, place))

    def _place(self, kind: str) -> Place:
        return self._grounds.place(mint(kind)) if self._aside is None else self._aside.place(kind)

    def replace(self, old: Standing) -> None:
        """Something else has taken its place, and has answered: it is taken down, now or a moment later."""
        if self._aside is None:
            self.take_down(old)
        else:
            self._aside.retire(old.live, old.place)

    def take_down(self, standing: Standing) -> None:
        """If it cannot be stopped its directory stays too, for `statefork gc`."""
        standing.live.stop()
        self._grounds.clear(standing.place)

    def capture(self, environment: str, live: Live, name: str | None, mode: Mode) -> Node:
        """Store the state of a live environment and hang it into the tree."""
        self.tree.reserve(name)
        try:
            parent = self.tree.parent_of(environment)
            place = self._place("s")
            created_at, began = datetime.now(UTC), time.perf_counter()
            try:
                captured = live.capture(place, mode, parent.captured if parent else None)
            except BaseException:
                self._grounds.clear(place)
                raise
            duration_ms = (time.perf_counter() - began) * 1000
            snapshot = Snapshot(
                id=place.name,
                name=name,
                parent=parent.snapshot.id if parent else None,
                environment=environment,
                created_at=created_at,
                duration_ms=duration_ms,
                paused_ms=duration_ms if captured.paused_ms is None else captured.paused_ms,
                files_bytes=as_given(captured, "files_bytes"),
                memory_bytes=captured.memory_bytes,
                captured=captured.captured,
                not_captured=captured.not_captured,
                processes=captured.processes,
            )
            node = Node(snapshot, captured, place)
            self.tell(node)
            self.tree.add(node)
            self.tree.advanced(environment, snapshot.id)
            if self._aside is not None:
                self._aside.stock()
            return node
        finally:
            self.tree.release(name)

    def tell(self, node: Node) -> None:
        if self.ledger is not None:
            handle = self.driver.note_of(node.captured) if self.driver.durable else None
            self.ledger.snapshot(SnapshotNote(node.snapshot, handle))

    def recall(self, note: SnapshotNote) -> Node:
        """Hang a snapshot into the tree that another process took."""
        snapshot = note.snapshot
        captured = Captured(
            handle=self.driver.handle_of(note.handle),
            captured=snapshot.captured,
            not_captured=snapshot.not_captured,
            files_bytes=as_given(snapshot, "files_bytes"),
            memory_bytes=snapshot.memory_bytes,
            paused_ms=snapshot.paused_ms,
            processes=snapshot.processes,
        )
        node = Node(snapshot, captured, self._grounds.known(snapshot.id))
        self.tree.add(node)
        return node

    def adopt(self, note: Mapping[str, Any], name: str) -> Standing:
        """Raises: SessionDead; what was left of it is removed then."""
        place = self._grounds.known(name)
        try:
            return Standing(self.driver.adopt(note, place), place)
        except SessionDead:
            self.driver.abandon(place)
            self._grounds.clear(place)
            raise

    def clear_strays(self, known: Iterable[str]) -> list[str]:
        """Remove what nobody told of: a process was killed between making it and telling. Returns the names."""
        kept, gone = set(known), []
        for place in self._grounds.places():
            if place.name not in kept:
                self.driver.abandon(place)
                self._grounds.clear(place)
                gone.append(place.name)
        return gone

    def leave(self) -> None:
        """This process ends, the tree does not."""
        self._settle()
        self.driver.leave()
        self._grounds.leave()

    def _settle(self) -> None:
        """Nothing that was made from a snapshot is still about to be taken down."""
        if self._aside is not None:
            self._aside.settle()

    def discard(self, node: Node) -> None:
        self._settle()
        if self.ledger is not None:  # first: what is told must be there
            self.ledger.snapshot_gone(node.snapshot.id)
        try:
            self.driver.discard(node.captured)
        except BaseException:
            self.tell(node)
            raise
        self._grounds.clear(node.place)
        self.tree.drop(node)
        self._manifests.pop(node.snapshot.id, None)

    def compare(self, a: Node, b: Node | Live) -> Comparison:
        """Which files differ from `a` to `b`."""
        found = self.driver.compare(a.captured, b.captured if isinstance(b, Node) else b)
        if found is not None:
            return found
        return compare(self.manifest(a), self.manifest(b) if isinstance(b, Node) else b.manifest())

    def manifest(self, node: Node) -> Manifest:
        """Read once: a snapshot does not change."""
        with self._manifest_lock:
            known = self._manifests.get(node.snapshot.id)
            if known is None:
                place = self._grounds.place(mint("d"))
                try:
                    known = self.driver.manifest(node.captured, place)
                finally:
                    self._grounds.clear(place)
                self._manifests[node.snapshot.id] = known
            return known

    def close(self) -> list[WaypointError]:
        """Free every snapshot, the driver and the directory. Goes on past failures, and gives them back."""
        self.closed = True
        if self._aside is not None:
            self._aside.close()
        problems: list[WaypointError] = []
        for node in self.tree.children_first():
            try:
                self.discard(node)
            except (WaypointError, OSError) as error:
                problems.append(mapped(error, f"removing snapshot {node.snapshot.id}"))
        try:
            self.driver.close()
        except (WaypointError, OSError) as error:
            problems.append(mapped(error, "removing what the backend made"))
        self._grounds.close()
        return problems


def mapped(error: Exception, what: str) -> WaypointError:
    """The one place where the operating system's errors become ours."""
    if isinstance(error, WaypointError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{what}: {error}; free some space, nothing was lost")
    if isinstance(error, FileNotFoundError):
        return NotFound(f"{what}: {error}")
    return KernelError(f"{what}: {error}")
