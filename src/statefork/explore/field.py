"""The field of a search: the environments that act, the snapshots that are kept, and the way back to those that are not.

A worker environment is restored to a node, acts, is judged, and is snapshotted: that is a new node. When snapshots take more
than the budget allows, the least promising go, never one that a worker stands on. A node without snapshot is rebuilt by replay
from its nearest ancestor that has one, and only if every action prints exactly what the trace says; else it is given up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count

from statefork.environment import Environment
from statefork.errors import ExecTimeout, NotFound, WaypointError
from statefork.explore.model import Action, Meter, Node, Scorer, called
from statefork.explore.trace import Trace
from statefork.model import ExecResult

__all__ = ["Field", "ReplayDiffers"]

_OUTPUT_TAIL = 2000
SOLVED = 1.0


class ReplayDiffers(WaypointError):
    """The same action did not print the same: what it leads to is not the node that it was."""

    code = "replay-differs"


class Field:
    """Used by any number of threads, each with a worker of its own."""

    def __init__(
        self,
        environment: Environment,
        scorer: Scorer,
        meter: Meter,
        trace: Trace,
        *,
        known: dict[int, Node] | None = None,
        on_node: Callable[[Node], None] | None = None,
    ) -> None:
        """`known`: the nodes of an interrupted run. `environment` must then stand where that run began."""
        self.environment = environment
        self.meter = meter
        self._scorer = scorer
        self._trace = trace
        self._on_node = on_node or (lambda _: None)
        self._lock = threading.RLock()
        self._idle: list[Environment] = []
        self._made: list[Environment] = []
        self.nodes: dict[int, Node] = dict(known or {})
        self._numbers = count(max(self.nodes, default=-1) + 1)
        for node in self.nodes.values():
            node.snapshot = None  # of a process that is gone
        if not self.nodes:
            self.nodes[0] = Node(next(self._numbers))
        self.root = self.nodes[0]
        self.root.snapshot = environment.snapshot()
        if not known:
            self.root.score = called(scorer.score, environment)
            trace.node(self.root)

    # -- workers ------------------------------------------------------------------------------------------------------

    @contextmanager
    def worker(self) -> Iterator[Environment]:
        """An environment to act in; it is given back when the caller is done, and destroyed with the field."""
        with self._lock:
            found = self._idle.pop() if self._idle else None
        if found is None:
            assert self.root.snapshot is not None
            (found,) = self.environment.fork(1, from_snapshot=self.root.snapshot)
            self.meter.count_fork()
            with self._lock:
                self._made.append(found)
        try:
            yield found
        finally:
            with self._lock:
                if found in self._made:
                    self._idle.append(found)

    def adopt(self, worker: Environment) -> Environment:
        """The caller keeps this worker: it is not destroyed with the field."""
        with self._lock:
            self._made.remove(worker)
            if worker in self._idle:
                self._idle.remove(worker)
        return worker

    def close(self, *, keep: Node | None = None) -> None:
        """Destroy all workers and drop all snapshots but those on the way to `keep`."""
        with self._lock:
            made, self._made, self._idle = self._made, [], []
        for worker in made:
            with contextlib.suppress(WaypointError):
                worker.destroy()
        kept = set() if keep is None else {node.id for node in (self.root, *keep.path())}
        for node in sorted(self.nodes.values(), key=lambda node: -node.depth):
            if node.id not in kept:
                self._drop(node)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def stand(self, worker: Environment, node: Node) -> None:
        """Bring the worker to a node: by its snapshot, or by replay from above. ReplayDiffers: it cannot be had any more."""
        if node.snapshot is not None:
            with contextlib.suppress(NotFound):
                worker.restore(node.snapshot)
                return
        if node.parent is None or node.action is None:
            raise ReplayDiffers("the root's snapshot is gone")
        self.stand(worker, node.parent)
        result = _act(worker, node.action)
        if _digest(result) != node.digest:
            node.ended = True
            raise ReplayDiffers(f"{node.action.name!r} did not print again what it printed at node {node.id}")
        with self._lock:
            node.snapshot = worker.snapshot()

    def expand(self, worker: Environment, parent: Node, action: Action) -> Node | None:
        """The worker stands at `parent`: act, judge, snapshot. None when the budget is used up."""
        if not self.meter.claim_node():
            return None
        began = time.perf_counter()
        result = _act(worker, action)
        acted = time.perf_counter()
        score = called(self._scorer.score, worker)
        judged = time.perf_counter()
        snapshot = worker.snapshot()
        saved = time.perf_counter()
        with self._lock:
            node = Node(
                next(self._numbers),
                parent,
                action,
                score,
                result.output[-_OUTPUT_TAIL:],
                _digest(result),
                result.exit_code,
            )
            node.snapshot = snapshot
            node.ended = score >= SOLVED
            self.nodes[node.id] = node
            parent.children.append(node)
        self._trace.node(
            node, exec_ms=(acted - began) * 1000, score_ms=(judged - acted) * 1000, snapshot_ms=(saved - judged) * 1000
        )
        self._make_room(node)
        self._on_node(node)
        return node

    def best(self) -> Node:
        """The highest score; of equal ones the one that took fewer steps, then the one that was found first."""
        with self._lock:
            return max(self.nodes.values(), key=lambda node: (node.score, -node.depth, -node.id))

    # -- room ---------------------------------------------------------------------------------------------------------

    def stored_bytes(self) -> int:
        return sum(one.files_bytes + one.memory_bytes for one in self.environment.snapshots())

    def _make_room(self, newest: Node) -> None:
        """The worst first, from the leaves up: a snapshot that others build on cannot go before them."""
        limit = self.meter.budget.storage_bytes
        tried: set[int] = set()
        while limit is not None and self.stored_bytes() > limit:
            with self._lock:
                candidates = [
                    node
                    for node in self.nodes.values()
                    if node.snapshot is not None
                    and node not in (self.root, newest)
                    and not node.busy
                    and node.id not in tried
                    and not any(child.snapshot for child in node.children)
                ]
            if not candidates:
                return
            worst = min(candidates, key=lambda node: (node.score, node.mean, -node.depth))
            tried.add(worst.id)
            self._drop(worst)

    def _drop(self, node: Node) -> None:
        with self._lock:
            snapshot, node.snapshot = node.snapshot, None
        if snapshot is None:
            return
        try:
            self.environment.remove_snapshot(snapshot)
        except WaypointError:
            node.snapshot = snapshot  # others still build on it, or stand on it
            return
        self._trace.write("drop", node=node.id)


def _act(worker: Environment, action: Action) -> ExecResult:
    """A command that takes too long is an outcome like any other."""
    try:
        return worker.exec_command(action.command, timeout=action.timeout)
    except ExecTimeout as error:
        return error.result


def _digest(result: ExecResult) -> str:
    found = blake2b(digest_size=16)
    for part in (result.stdout_bytes, result.stderr_bytes):
        found.update(len(part).to_bytes(8, "little") + part)
    found.update(str(result.exit_code).encode())
    return found.hexdigest()
