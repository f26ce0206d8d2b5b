"""The searches. Each leaves the winner's environment live for its caller, and everything else dropped."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from statefork.environment import Environment
from statefork.explore.field import Field, ReplayDiffers
from statefork.explore.model import Action, Budget, Meter, Node, Policy, Scorer, called
from statefork.explore.trace import Trace, read_trace
from statefork.explore.uct import Uct

__all__ = ["Outcome", "beam", "best_of_n", "mcts", "retry"]

OnNode = Callable[[Node], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`environment` stands at the best node and is the caller's; destroy it when it is not needed."""

    best: Node
    environment: Environment
    nodes: int
    seconds: float

    @property
    def solved(self) -> bool:
        return self.best.score >= 1

    @property
    def actions(self) -> list[Action]:
        return self.best.history()


class _Run:
    """What all searches begin and end with."""

    def __init__(
        self,
        algorithm: str,
        environment: Environment,
        scorer: Scorer,
        budget: Budget,
        trace: Path | None,
        *,
        resume: bool = False,
        on_node: OnNode | None = None,
        **facts: Any,
    ) -> None:
        known = read_trace(trace)[0] if resume and trace is not None and trace.exists() else None
        self.trace = Trace(trace, known)
        self.trace.write(
            "run",
            algorithm=algorithm,
            budget=asdict(budget),
            backend=environment.backend,
            resumed=known is not None,
            **facts,
        )
        self.field = Field(environment, scorer, Meter(budget), self.trace, known=known, on_node=on_node)

    def finish(self) -> Outcome:
        """Bring one worker to the best node and hand it over."""
        field = self.field
        best = field.best()
        with field.worker() as worker:
            field.stand(worker, best)
        field.adopt(worker)
        field.close(keep=best)
        seconds = field.meter.seconds
        self.trace.write("end", best=best.id, score=best.score, nodes=len(field.nodes), seconds=round(seconds, 3))
        return Outcome(best, worker, len(field.nodes), seconds)

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.field.close()
        self.trace.__exit__(kind, None, None)


def _try(field: Field, parent: Node, action: Action) -> Node | None:
    with field.worker() as worker:
        try:
            field.stand(worker, parent)
        except ReplayDiffers:
            return None
        return field.expand(worker, parent, action)


def best_of_n(
    environment: Environment,
    attempts: Sequence[Action | str],
    scorer: Scorer,
    *,
    workers: int = 4,
    trace: Path | None = None,
    on_node: OnNode | None = None,
) -> Outcome:
    """Try each attempt from the environment's present state, and keep the one that scores best."""
    budget = Budget(nodes=len(attempts))
    with _Run("best_of_n", environment, scorer, budget, trace, on_node=on_node) as run:
        actions = [one if isinstance(one, Action) else Action(one) for one in attempts]
        with ThreadPoolExecutor(min(workers, len(actions) or 1), thread_name_prefix="explore") as pool:
            list(pool.map(lambda action: _try(run.field, run.field.root, action), actions))
        return run.finish()


def beam(
    environment: Environment,
    policy: Policy,
    scorer: Scorer,
    budget: Budget,
    *,
    width: int = 3,
    branching: int = 3,
    depth: int = 10,
    workers: int = 4,
    trace: Path | None = None,
    on_node: OnNode | None = None,
) -> Outcome:
    """Level by level: `branching` actions from each of the `width` best nodes of the level before."""
    with _Run("beam", environment, scorer, budget, trace, on_node=on_node, width=width, branching=branching) as run:
        field, level = run.field, [run.field.root]
        with ThreadPoolExecutor(workers, thread_name_prefix="explore") as pool:
            for _ in range(depth):
                proposed = [
                    pair
                    for pairs in pool.map(lambda node: _proposals(field, policy, node, branching), level)
                    for pair in pairs
                ]
                made = [node for node in pool.map(lambda pair: _try(field, *pair), proposed) if node is not None]
                level = sorted((node for node in made if not node.ended), key=lambda node: -node.score)[:width]
                if not level or field.meter.over or any(node.score >= 1 for node in made):
                    break
        return run.finish()


def _proposals(field: Field, policy: Policy, node: Node, count: int) -> list[tuple[Node, Action]]:
    with field.worker() as worker:
        try:
            field.stand(worker, node)
        except ReplayDiffers:
            return []
        return [(node, action) for action in called(policy.propose, node, worker, count)]


def mcts(
    environment: Environment,
    policy: Policy,
    scorer: Scorer,
    budget: Budget,
    *,
    exploration: float = 1.4,
    widening: float = 1.5,
    depth: int = 30,
    workers: int = 2,
    seed: int = 0,
    trace: Path | None = None,
    resume: bool = False,
    on_node: OnNode | None = None,
) -> Outcome:
    """Upper confidence trees with progressive widening; workers side by side are kept apart by virtual loss.

    `resume`: go on with an interrupted run's trace; `environment` must stand where that run began.
    """
    facts = {"exploration": exploration, "widening": widening, "depth": depth, "seed": seed}
    with _Run("mcts", environment, scorer, budget, trace, resume=resume, on_node=on_node, **facts) as run:
        uct = Uct(run.field, policy, exploration, widening, depth, random.Random(seed))
        with ThreadPoolExecutor(workers, thread_name_prefix="explore") as pool:
            for future in [pool.submit(uct.work) for _ in range(workers)]:
                future.result()
        return run.finish()


def retry(
    environment: Environment,
    steps: Sequence[Action | str],
    *,
    accept: Callable[[Environment], bool] | None = None,
    attempts: int = 3,
) -> bool:
    """Take the steps one after another in the environment itself; one that fails goes back to the clean state before it.

    A step has failed when its command ends non-zero or `accept` says no. False when a step fails `attempts` times: the
    environment then stands in the clean state before that step.
    """
    for one in steps:
        action = one if isinstance(one, Action) else Action(one)
        clean = environment.snapshot()
        for _ in range(attempts):
            done = environment.exec_command(action.command, timeout=action.timeout)
            if done.ok and (accept is None or accept(environment)):
                break
            environment.restore(clean)
        else:
            return False
    return True
