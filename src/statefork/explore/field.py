"""The field of a search: the environments that act, the snapshots that are kept, and the way back to those that are not.

A worker environment is brought to a node, acts, is judged, and is snapshotted: that is a new node. When snapshots take more
than the budget allows, those go first from which nothing is to be tried any more, then the least promising of the frontier;
never one that a worker stands on, the best, or one that kept snapshots build on. A node without snapshot is rebuilt by replay
from its nearest ancestor that has one, and only if every action prints exactly what the trace says, scores the same and
leaves the same processes; else it is given up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import NoReturn

from statefork.environment import Environment
from statefork.errors import CriuError, ExecTimeout, KernelError, NotCapturable, NotFound, SessionDead, WaypointError
from statefork.explore.model import Action, Meter, Node, Scorer, called
from statefork.explore.proof import output_digest, state_digest
from statefork.explore.trace import Trace
from statefork.model import ExecResult

__all__ = ["BudgetSpent", "Field", "ReplayDiffers", "StateLost", "act"]

_OUTPUT_TAIL = 2000
_FAILED = (SessionDead, KernelError)
"""What a backend says that could not bring a state up: KernelError is CRIU's and the container tools' failure, too."""
MOST_FAILURES = 3
"""So many states in a row that cannot be brought up are no bad luck: the search ends with the last one's error."""
SOLVED = 1.0


class ReplayDiffers(WaypointError):
    """The same action did not lead to the same: what it leads to is not the node that it was."""

    code = "replay-differs"


class StateLost(ReplayDiffers):
    """The backend failed to bring a state back. The search goes on elsewhere, and says so."""

    code = "state-lost"


class BudgetSpent(WaypointError):
    """No more states may be brought up; the searches end quietly by it."""

    code = "budget-spent"


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
        self.frontier: Callable[[Node], bool] = lambda node: not node.ended
        """Whether something may still be tried from a node; a search knows better and says so."""
        self._scorer = scorer
        self._trace = trace
        self._on_node = on_node or (lambda _: None)
        self._lock = threading.RLock()
        self._idle: list[Environment] = []
        self._made: list[Environment] = []
        self._spare: list[str] = []
        self._at: dict[str, Node] = {}
        self._stood_ms: dict[str, float] = {}
        self._failed_in_a_row: dict[str, int] = {}
        self.failures = 0
        """How often the backend failed, to bring a state up or to store one."""
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
            self.root.state = state_digest(environment, self.root.snapshot)
            trace.node(self.root)

    # -- workers ------------------------------------------------------------------------------------------------------

    @contextmanager
    def worker(self, *, last: bool = False) -> Iterator[Environment]:
        """An environment to act in; it is given back when the caller is done, and destroyed with the field.

        Raises BudgetSpent, unless it is the `last` one, in which the outcome is handed over.
        """
        with self._lock:
            found = self._idle.pop() if self._idle else None
        if found is None:
            if not self.meter.claim_fork() and not last:
                raise BudgetSpent("all forks of the budget are used")
            found = self._forked()
            with self._lock:
                self._made.append(found)
                self._at[found.id] = self.root
        try:
            yield found
        finally:
            with self._lock:
                if found in self._made:
                    self._idle.append(found)

    def _forked(self) -> Environment:
        assert self.root.snapshot is not None
        for left in reversed(range(MOST_FAILURES)):
            try:
                return self.environment.fork(1, from_snapshot=self.root.snapshot)[0]
            except _FAILED as error:
                if not left or self.meter.stopped:
                    raise
                self._note_failure(self.root, error)
        raise AssertionError("unreachable")

    def _note_failure(self, node: Node, error: WaypointError) -> None:
        with self._lock:
            self.failures += 1
        self._trace.write("failed", node=node.id, why=error.message)

    def adopt(self, worker: Environment) -> Environment:
        """The caller keeps this worker: it is not destroyed with the field."""
        with self._lock:
            self._made.remove(worker)
            if worker in self._idle:
                self._idle.remove(worker)
        return worker

    def abort(self) -> None:
        """Somebody wants it to end at once: what runs in the workers is ended with them, and leaves no node."""
        self.meter.stop()
        with self._lock:
            made = list(self._made)
        for worker in made:
            with contextlib.suppress(WaypointError):
                worker.destroy()

    def close(self, *, keep: Node | None = None) -> None:
        """Destroy all workers and drop all snapshots but those on the way to `keep`."""
        with self._lock:
            made, self._made, self._idle = self._made, [], []
        for worker in made:
            with contextlib.suppress(WaypointError):
                worker.destroy()
        for snapshot in self._spare:
            with contextlib.suppress(WaypointError):
                self.environment.remove_snapshot(snapshot)
        kept = set() if keep is None else {node.id for node in (self.root, *keep.path())}
        for node in sorted(self.nodes.values(), key=lambda node: -node.depth):
            if node.id not in kept:
                self._drop(node)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def stand(self, worker: Environment, node: Node, *, last: bool = False) -> None:
        """Bring the worker to a node: by its snapshot, or by replay from above.

        A worker that has just made the node is there already, if a snapshot of this backend holds all that is live; else
        what one can go on from is only what comes back. Raises ReplayDiffers: it cannot be had any more; StateLost, which is one of
        those: the backend failed; that failure itself after MOST_FAILURES in a row. BudgetSpent.
        """
        began = time.perf_counter()
        if self._at.get(worker.id) is not node or not worker.capabilities.full or worker.state != "live":
            self._at.pop(worker.id, None)
            try:
                self._bring(worker, node, last)
            except ReplayDiffers as error:
                self._lose(node, error)
                raise
            except _FAILED as error:
                if self.meter.stopped:
                    raise
                self._failed_to_stand(worker, node, error)
            self._failed_in_a_row.pop(worker.id, None)
            self._at[worker.id] = node
        self._stood_ms[worker.id] = (time.perf_counter() - began) * 1000

    def _failed_to_stand(self, worker: Environment, node: Node, error: WaypointError) -> NoReturn:
        """Raises StateLost; the error itself when there is no sense in going on."""
        self._note_failure(node, error)
        if node is not self.root:
            self._lose(node, error)
        in_a_row = self._failed_in_a_row[worker.id] = self._failed_in_a_row.get(worker.id, 0) + 1
        if in_a_row >= MOST_FAILURES:
            raise error
        raise StateLost(error.message) from error

    def _lose(self, node: Node, error: WaypointError) -> None:
        """Nothing can follow it any more; what was made from it before can still be had."""
        if not node.ended:
            node.ended = True
            self._trace.write("lost", node=node.id, why=error.message)

    def _bring(self, worker: Environment, node: Node, last: bool) -> None:
        if node.snapshot is not None:
            if not self.meter.claim_fork() and not last:
                raise BudgetSpent("all forks of the budget are used")
            with contextlib.suppress(NotFound):
                worker.restore(node.snapshot)
                return
        if node.parent is None or node.action is None:
            raise ReplayDiffers("the root's snapshot is gone")
        self._bring(worker, node.parent, last)
        try:
            self._replay(worker, node, node.action)
        except (ReplayDiffers, SessionDead) as error:
            if self.meter.stopped:
                raise
            self._lose(node, error)
            raise ReplayDiffers(error.message) from error

    def _replay(self, worker: Environment, node: Node, action: Action) -> None:
        """The worker stands at the parent."""
        what = f"{action.name!r} of node {node.id}"
        if output_digest(act(worker, action)) != node.digest:
            raise ReplayDiffers(f"{what} did not print again what it had printed")
        if (score := called(self._scorer.score, worker)) != node.score:
            raise ReplayDiffers(f"{what} was worth {node.score:g} and is worth {score:g} now")
        try:
            snapshot = worker.snapshot()
        except (NotCapturable, CriuError):
            return  # as it was the first time: it can be stood on, and nothing can follow it
        if node.state and state_digest(worker, snapshot) != node.state:
            self._spare.append(snapshot)
            raise ReplayDiffers(f"{what} left other processes than it had left")
        with self._lock:
            if node.snapshot is None:
                node.snapshot = snapshot
            else:
                self._spare.append(snapshot)  # another worker was quicker
        self._trace.write("rebuilt", node=node.id, snapshot=snapshot)
        self._make_room(node)

    def expand(self, worker: Environment, parent: Node, action: Action) -> Node | None:
        """The worker stands at `parent`: act, judge, snapshot. None when the budget is used up.

        What kills the environment, or leaves something in it that no snapshot can hold, is a node from which nothing follows.
        """
        if not self.meter.claim_node():
            return None
        self._at.pop(worker.id, None)
        times = {"stand_ms": self._stood_ms.pop(worker.id, 0.0)}
        result, score, snapshot, error = ExecResult(-1), 0.0, None, ""
        try:
            with _timed(times, "exec_ms"):
                result = act(worker, action)
            with _timed(times, "score_ms"):
                score = called(self._scorer.score, worker)
            with _timed(times, "snapshot_ms"):
                snapshot = worker.snapshot()
        except _FAILED as problem:
            if self.meter.stopped:
                return None
            error = problem.message
            if not isinstance(problem, (SessionDead, NotCapturable)):  # those two are the step's own doing
                with self._lock:
                    self.failures += 1
        with self._lock:
            number = next(self._numbers)
        node = Node(
            number, parent, action, score, result.output[-_OUTPUT_TAIL:], output_digest(result), result.exit_code
        )
        node.snapshot, node.error = snapshot, error
        node.ended = score >= SOLVED or bool(error)
        node.state = state_digest(worker, snapshot) if snapshot is not None else ""
        self._trace.node(node, **times)  # before another worker can find it and build on it
        with self._lock:
            if snapshot is not None:
                self._at[worker.id] = node
            self.nodes[node.id] = node
            parent.children.append(node)
        self._make_room(node)
        self._on_node(node)
        return node

    def in_order(self) -> list[Node]:
        """All nodes, each after its parent."""
        with self._lock:
            return sorted(self.nodes.values(), key=lambda node: node.id)

    def spend(self, node: Node) -> None:
        """The policy has nothing more to try there."""
        if not node.spent:
            node.spent = True
            self._trace.write("spent", node=node.id)

    def best(self) -> Node:
        """The highest score; of equal ones the one that took fewer steps, then the one that was found first."""
        return self.ranking()[0]

    def ranking(self) -> list[Node]:
        with self._lock:
            return sorted(self.nodes.values(), key=lambda node: (-node.score, node.depth, node.id))

    # -- room ---------------------------------------------------------------------------------------------------------

    def stored_bytes(self) -> tuple[int, int]:
        """(files and memory, memory alone) of the search's own snapshots."""
        with self._lock:
            ours = {node.snapshot for node in self.nodes.values() if node.snapshot} | set(self._spare)
        found = [one for one in self.environment.snapshots() if one.id in ours]
        memory = sum(one.memory_bytes for one in found)
        return sum(one.files_bytes for one in found) + memory, memory

    def _too_much(self) -> bool:
        budget = self.meter.budget
        if budget.storage_bytes is None and budget.memory_bytes is None:
            return False
        both, memory = self.stored_bytes()
        over = budget.storage_bytes is not None and both > budget.storage_bytes
        return over or (budget.memory_bytes is not None and memory > budget.memory_bytes)

    def _make_room(self, newest: Node) -> None:
        """From the leaves up: a snapshot that others build on cannot go before them."""
        tried: set[int] = set()
        while self._too_much():
            best = self.best()
            with self._lock:
                candidates = [
                    node
                    for node in self.nodes.values()
                    if node.snapshot is not None
                    and node not in (self.root, newest, best)
                    and not node.busy
                    and node.id not in tried
                    and not any(child.snapshot for child in node.children)
                ]
            if not candidates:
                return
            worst = min(candidates, key=lambda node: (self.frontier(node), node.score, node.mean, -node.depth))
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


def act(worker: Environment, action: Action) -> ExecResult:
    """A command that takes too long is an outcome like any other."""
    try:
        return worker.exec_command(action.command, timeout=action.timeout)
    except ExecTimeout as error:
        return error.result


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        times[name] = (time.perf_counter() - began) * 1000
