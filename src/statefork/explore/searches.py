"""The searches. Each leaves the winner's environment live for its caller, and everything else dropped."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from statefork.environment import Environment
from statefork.errors import StoreError
from statefork.explore.field import BudgetSpent, Field, ReplayDiffers
from statefork.explore.model import Action, Budget, Meter, Node, Policy, Scorer, Watch, called
from statefork.explore.trace import Trace, read_trace, used_so_far
from statefork.explore.uct import Uct

__all__ = ["Outcome", "beam", "best_of_n", "mcts", "results"]

OnNode = Callable[[Node], None]
_T = TypeVar("_T")
_LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Outcome:
    """`environment` stands at the best node and is the caller's; destroy it when it is not needed."""

    best: Node
    environment: Environment
    nodes: int
    seconds: float
    failures: int = 0
    """How often the backend failed to bring up a state that the search wanted to go on from. Those are lost to it."""

    @property
    def solved(self) -> bool:
        return self.best.score >= 1

    @property
    def actions(self) -> list[Action]:
        return self.best.history()

    @property
    def began(self) -> str:
        """The snapshot of the state that the search began with."""
        node = self.best
        while node.parent is not None:
            node = node.parent
        assert node.snapshot is not None
        return node.snapshot


@dataclass(frozen=True, slots=True)
class _Known:
    """What an interrupted run left behind."""

    nodes: dict[int, Node] | None = None
    seconds: float = 0.0

    @classmethod
    def of(cls, path: Path | None, resume: bool, algorithm: str) -> _Known:
        if not resume or path is None or not path.exists():
            return cls()
        nodes, events = read_trace(path)
        first = next((event for event in events if event["event"] == "run"), None)
        if first is not None and first["algorithm"] != algorithm:
            raise StoreError(f"{path} is the trace of a {first['algorithm']}; it cannot go on as a {algorithm}")
        return cls(nodes, used_so_far(events))


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
        watch: Watch | None = None,
        note: Mapping[str, Any] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        known = _Known.of(trace, resume, algorithm)
        self._watch = watch
        self.trace = Trace(trace, known.nodes, seconds=known.seconds)
        told = {**(facts or {}), **({"note": dict(note)} if note else {})}
        resumed = known.nodes is not None
        self.trace.run(algorithm=algorithm, budget=asdict(budget), backend=environment.backend, resumed=resumed, **told)
        meter = Meter(budget, nodes=max(len(known.nodes or ()) - 1, 0), seconds=known.seconds)
        try:
            self.field = Field(environment, scorer, meter, self.trace, known=known.nodes, on_node=self._told(on_node))
        except BaseException:
            self.trace.__exit__(None, None, None)
            raise
        if watch is not None:
            watch.began(meter, self.field.nodes)

    def _told(self, on_node: OnNode | None) -> OnNode:
        def tell(node: Node) -> None:
            if self._watch is not None:
                self._watch.made(node)
            if on_node is not None:
                on_node(node)

        return tell

    @contextmanager
    def pool(self, workers: int) -> Iterator[ThreadPoolExecutor]:
        """When one fails the others end what they are at and begin nothing more; when somebody interrupts they end at once."""
        with ThreadPoolExecutor(workers, thread_name_prefix="explore") as pool:
            try:
                yield pool
            except BaseException as error:
                self.field.meter.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                if not isinstance(error, Exception):
                    self.field.abort()
                raise

    def finish(self) -> Outcome:
        """Bring one worker to the best node that can be had, and hand it over."""
        field = self.field
        with field.worker(last=True) as worker:
            for best in field.ranking():
                with contextlib.suppress(ReplayDiffers):
                    field.stand(worker, best, last=True)
                    break
        field.adopt(worker)
        field.close(keep=best)
        meter = field.meter
        facts = {"nodes": len(field.nodes), "forks": meter.forks, "seconds": round(meter.seconds, 3)}
        if field.failures:
            facts["failures"] = field.failures
        self.trace.write("end", best=best.id, score=best.score, **facts)
        return Outcome(best, worker, len(field.nodes), meter.seconds, field.failures)

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._watch is not None:
            self._watch.ended()
        if kind is not None:
            self.field.close()
        self.trace.__exit__(kind, None, None)


def results(futures: Sequence[Future[_T]]) -> list[_T]:
    """Of all, or the first failure.

    Looked at now and then, because an interrupt that comes in the instant before a thread begins to wait does not wake it: Python
    would tell of it when all is done.
    """
    left = set(futures)
    while left and not any(future.done() and future.exception() for future in set(futures) - left):
        _, left = wait(left, timeout=_LOOK_SECONDS, return_when=FIRST_EXCEPTION)
    for future in futures:
        if future.done():
            future.result()
    return [future.result() for future in futures]


def _try(field: Field, parent: Node, action: Action) -> Node | None:
    """None when it cannot be had any more, or the budget is used up."""
    try:
        with field.worker() as worker:
            field.stand(worker, parent)
            return field.expand(worker, parent, action)
    except (ReplayDiffers, BudgetSpent):
        return None


def best_of_n(
    environment: Environment,
    attempts: Sequence[Action | str],
    scorer: Scorer,
    *,
    budget: Budget | None = None,
    workers: int = 4,
    trace: Path | None = None,
    resume: bool = False,
    on_node: OnNode | None = None,
    watch: Watch | None = None,
    note: Mapping[str, Any] | None = None,
) -> Outcome:
    """Try each attempt from the environment's present state, and keep the one that scores best.

    `resume`: go on with an interrupted run's trace; `environment` must stand where that run began.
    """
    budget = budget or Budget(nodes=len(attempts))
    given: dict[str, Any] = {"resume": resume, "on_node": on_node, "watch": watch, "note": note}
    with _Run("best_of_n", environment, scorer, budget, trace, **given) as run:
        field = run.field
        done = [child.action for child in field.root.children]
        actions = [one if isinstance(one, Action) else Action(one) for one in attempts]
        for one in done:
            if one in actions:
                actions.remove(one)
        with run.pool(max(min(workers, len(actions)), 1)) as pool:
            results([pool.submit(_try, field, field.root, action) for action in actions])
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
    resume: bool = False,
    on_node: OnNode | None = None,
    watch: Watch | None = None,
    note: Mapping[str, Any] | None = None,
) -> Outcome:
    """Level by level: `branching` actions from each of the `width` best nodes of the level before.

    `resume`: go on with an interrupted run's trace; `environment` must stand where that run began.
    """
    facts = {"width": width, "branching": branching, "depth": depth}
    given: dict[str, Any] = {"resume": resume, "on_node": on_node, "watch": watch, "note": note}
    with _Run("beam", environment, scorer, budget, trace, facts=facts, **given) as run:
        field, level = run.field, [run.field.root]
        with run.pool(workers) as pool:
            for number in range(depth):
                field.frontier = lambda node, number=number, level=tuple(level): (  # type: ignore[misc]
                    not node.ended and (node in level or node.depth > number)
                )
                proposed = [
                    pair
                    for pairs in results([pool.submit(_proposals, field, policy, node, branching) for node in level])
                    for pair in pairs
                ]
                results([pool.submit(_try, field, *pair) for pair in proposed])
                made = [child for node in level for child in node.children]  # of an interrupted run, too
                level = sorted((node for node in made if not node.ended), key=lambda node: -node.score)[:width]
                if not level or field.meter.over or any(node.score >= 1 for node in made):
                    break
        return run.finish()


def _proposals(field: Field, policy: Policy, node: Node, count: int) -> list[tuple[Node, Action]]:
    count -= len(node.children)
    if count <= 0:
        return []
    try:
        with field.worker() as worker:
            field.stand(worker, node)
            return [(node, action) for action in dict.fromkeys(called(policy.propose, node, worker, count))]
    except (ReplayDiffers, BudgetSpent):
        return []


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
    to_the_end: bool = False,
    trace: Path | None = None,
    resume: bool = False,
    on_node: OnNode | None = None,
    watch: Watch | None = None,
    note: Mapping[str, Any] | None = None,
) -> Outcome:
    """Upper confidence trees with progressive widening; workers side by side are kept apart by virtual loss.

    `to_the_end`: from the node that is chosen, go on until the policy has nothing more to say or `depth` is reached, instead of one
    step: where scores on the way tell little, whole attempts do, and each begins at the most promising state.
    `resume`: go on with an interrupted run's trace; `environment` must stand where that run began.
    """
    facts = {"exploration": exploration, "widening": widening, "depth": depth, "seed": seed, "workers": workers}
    if to_the_end:
        facts["to_the_end"] = True
    given: dict[str, Any] = {"resume": resume, "on_node": on_node, "watch": watch, "note": note}
    with _Run("mcts", environment, scorer, budget, trace, facts=facts, **given) as run:
        uct = Uct(run.field, policy, exploration, widening, depth, random.Random(seed), to_the_end=to_the_end)
        with run.pool(workers) as pool:
            results([pool.submit(uct.work) for _ in range(workers)])
        return run.finish()
