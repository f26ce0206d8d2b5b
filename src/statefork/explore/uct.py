"""Monte Carlo tree search over live states: which node to go on from, and what its children teach their ancestors."""

from __future__ import annotations

import math
import random
import threading

from statefork.environment import Environment
from statefork.explore.belief import Belief
from statefork.explore.field import BudgetSpent, Field, ReplayDiffers
from statefork.explore.model import Action, Node, Policy, called

__all__ = ["Uct"]

ASKED_IN_VAIN = 3
"""A policy that names only what was named before, so often, has nothing else to try at a node."""


class Uct:
    def __init__(
        self,
        field: Field,
        policy: Policy,
        exploration: float,
        widening: float,
        depth: int,
        chance: random.Random,
        *,
        to_the_end: bool = False,
    ) -> None:
        self._field = field
        self._policy = policy
        self._exploration = exploration
        self._widening = widening
        self._depth = depth
        self._seed = chance.random()
        self._chance = chance
        self._to_the_end = to_the_end
        self._lock = threading.Condition()
        self._waiting: dict[int, list[Action]] = {}
        self._given: dict[int, set[Action]] = {}
        """What was proposed at a node, tried or not: another worker must not be given it again."""
        self.solved = threading.Event()
        field.frontier = self._alive
        for node in sorted(field.nodes.values(), key=lambda node: node.id):
            self._learn(node)

    def work(self) -> None:
        """One worker's share: until it is solved, the budget is used up, or nothing is left to try."""
        try:
            with self._field.worker() as worker:
                while (node := self._take()) is not None:
                    if not self._go_on(worker, node):
                        return
        except BudgetSpent:
            return
        except BaseException:
            self._field.meter.stop()  # the others end, too
            raise

    def _take(self) -> Node | None:
        """The node to go on from; waits where only what others are just finding out can tell."""
        with self._lock:
            while not self.solved.is_set() and not self._field.meter.over:
                node = self._select()
                if node is not None:
                    self._mark(node, +1)
                    return node
                if not self._field.root.busy:
                    return None
                self._lock.wait(1.0)
            return None

    def _go_on(self, worker: Environment, node: Node | None) -> bool:
        """From a node that was taken: one step, or all the way down. False when the budget is used up."""
        while node is not None:
            child: Node | None = None
            try:
                child, more = self._step(worker, node)
                if not more:
                    return False
            finally:
                with self._lock:
                    if child is not None and self._to_the_end and self._open(child) and not self.solved.is_set():
                        self._mark(child, +1)
                    else:
                        child = None
                    self._mark(node, -1)
                    self._lock.notify_all()
            node = child
        return True

    def _step(self, worker: Environment, node: Node) -> tuple[Node | None, bool]:
        """The new node, if there is one; and whether the budget allows more."""
        try:
            self._field.stand(worker, node)
        except ReplayDiffers:
            return None, True
        action = self._next_action(worker, node)
        if action is None:
            return None, True
        child = self._field.expand(worker, node, action)
        if child is None:
            return None, False
        with self._lock:
            self._learn(child)
        return child, True

    def _next_action(self, worker: Environment, node: Node) -> Action | None:
        for _ in range(ASKED_IN_VAIN):
            with self._lock:
                if self._waiting.get(node.id):
                    return self._waiting[node.id].pop(0)
                given = self._given.setdefault(node.id, {one.action for one in node.children if one.action})
                wanted = self._allowed(node) + 1 + len(given) - len(node.children)
            found = called(self._policy.propose, node, worker, wanted)
            if not found:
                break
            with self._lock:
                fresh = [action for action in dict.fromkeys(found) if action not in given]
                given.update(fresh)
                if fresh:
                    self._waiting.setdefault(node.id, []).extend(fresh[1:])
                    return fresh[0]
        self._field.spend(node)
        return None

    def _allowed(self, node: Node) -> int:
        """Progressive widening: how many children a node may have grows with the root of its visits."""
        return max(1, math.ceil(self._widening * math.sqrt(node.visits + 1)))

    def _open(self, node: Node) -> bool:
        """Something can still be tried at the node itself."""
        busy = node.busy - sum(child.busy for child in node.children)
        return self._more(node) and len(node.children) + busy < self._allowed(node)

    def _more(self, node: Node) -> bool:
        """The same, if not now then when it was visited more."""
        return not (node.ended or node.spent) and node.depth < self._depth

    def _alive(self, node: Node) -> bool:
        """Something can still be tried at it or below it."""
        return self._more(node) or any(self._alive(child) for child in node.children)

    def _select(self) -> Node | None:
        """Down from the root, by what each child's best state promises and by how seldom it was visited. None: nothing is left."""
        nodes = self._field.in_order()
        left = [node for node in nodes if self._more(node)]
        if not left:
            return None
        now = any(map(self._open, left))  # else there is nothing but what widening holds back
        belief = Belief(nodes, self._open if now else self._more, self._depth)
        self._chance = random.Random(f"{self._seed}:{len(nodes)}")  # after a crash it decides as it would have
        following: Node | None = self._field.root
        while following is not None:
            node, promises = following, [(0.0, following)]
            for child in node.children:
                promises.append((self._hopeful(belief.below(child), node, child.visits, child.busy), child))
            busy = node.busy - sum(child.busy for child in node.children)
            here = self._hopeful(belief.here(node), node, len(node.children), busy)
            best, child = max(promises, key=lambda pair: pair[0])
            following = child if best > here else None
        return node if self._more(node) else max(left, key=lambda one: one.score)

    def _hopeful(self, promise: float, parent: Node, visits: int, busy: int) -> float:
        """UCT, in proportion to the promise; a worker that is there counts as a try that failed, so that another one looks elsewhere."""
        seldom = math.sqrt(math.log(parent.visits + parent.busy + 1) / (visits + busy + 1))
        return promise / (busy + 1) * (1 + self._exploration * seldom) * (1 + self._chance.random() * 1e-9)

    def _mark(self, node: Node, by: int) -> None:
        for one in (self._field.root, *node.path()):
            one.busy += by

    def _learn(self, node: Node) -> None:
        for one in (self._field.root, *node.path()):
            one.visits += 1
            one.total += node.score
        if node.score >= 1:
            self.solved.set()
