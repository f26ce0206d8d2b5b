"""One trial: a task, played one way, on one backend, with one seed. The clock runs from before the environment is made.

scratch    up to K attempts, each in a fresh environment, until the tests pass (Pass@K)
mcts       one tree search, every node a snapshot, until the tests pass or the time is used up
straight   the right steps only, with a snapshot and a restore before each: what restores lose shows, and nothing else
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from statefork.environment import Environment
from statefork.errors import ExecTimeout, WaypointError
from statefork.experiment.agent import action_of
from statefork.experiment.arenas import Arena
from statefork.experiment.judging import TaskScorer
from statefork.experiment.players import Player
from statefork.experiment.tasks import Task
from statefork.explore import Action, Budget, Node, Policy, mcts
from statefork.explore.model import called

__all__ = ["WAYS", "Settings", "Trial", "Way", "play"]

Way = Literal["scratch", "mcts", "straight"]
WAYS: tuple[Way, ...] = ("scratch", "mcts", "straight")


@dataclass(frozen=True, slots=True)
class Settings:
    """What all trials of one set of results have in common."""

    think_seconds: float = 0.5
    attempts: int = 20
    """K of Pass@K."""
    seconds: float = 60.0
    """How long a tree search may take; and the right steps, with a restore before each."""
    player: str = "stochastic"
    error_scale: float = 1.0
    """What the tasks' error rates are multiplied by: how hard the stochastic agent finds them."""
    exploration: float = 1.4
    widening: float = 1.5
    lanes: int = 1
    """How many trials run at a time."""
    to_the_end: bool = False
    """The search takes whole attempts from the state that it chooses, not single steps."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Trial:
    task: str
    way: Way
    backend: str
    seed: int
    solved: bool = False
    seconds: float = 0.0
    """Until it was solved; all of it when it was not."""
    tries: int = 0
    """Attempts from scratch, nodes of the tree, or steps."""
    best: float = 0.0
    marks: list[float] = field(default_factory=list)
    """When each attempt ended; straight: what of the score each restore lost."""
    spent_ms: dict[str, float] = field(default_factory=dict)
    """Where the time of a search went: bringing up states, commands, judging, snapshots."""
    failures: int = 0
    """How often the backend failed in a search, which went on elsewhere."""
    error: str = ""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.task, self.way, self.backend, self.seed

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def play(arena: Arena, task: Task, way: Way, seed: int, player: Player, settings: Settings) -> Trial:
    """A backend that fails is an unsolved trial with its error: it is not left out of the count."""
    arena.prepare(task)
    began = time.monotonic()
    try:
        if way == "scratch":
            facts = _scratch(arena, task, seed, player, settings, began)
        elif way == "mcts":
            facts = _mcts(arena, task, seed, player, settings, began)
        else:
            facts = _straight(arena, task, began + settings.seconds)
    except WaypointError as error:
        facts = {"error": _said(arena, error)}
    facts.setdefault("seconds", time.monotonic() - began)
    facts["seconds"] = round(facts["seconds"], 3)
    return Trial(task.name, way, arena.backend, seed, **facts)


def _scratch(arena: Arena, task: Task, seed: int, player: Player, settings: Settings, began: float) -> dict[str, Any]:
    ended: list[float] = []
    best = 0.0
    for attempt in range(settings.attempts):
        with player(task, seed, attempt) as policy, arena.fresh(task) as environment:
            _attempt(policy, environment, most=4 * len(task.steps))
            verdict = TaskScorer(task).judge(environment)
            ended.append(round(time.monotonic() - began, 3))
        best = max(best, verdict.score)
        if verdict.solved:
            break
    return {"solved": best >= 1, "seconds": ended[-1], "tries": len(ended), "best": best, "marks": ended}


def _attempt(policy: Policy, environment: Environment, most: int) -> None:
    """One line of nodes without a tree: the policy sees the same as in a search, and there is no way back."""
    node = Node(0)
    for number in range(1, most + 1):
        proposed = called(policy.propose, node, environment, 1)
        if not proposed:
            return
        action = proposed[0]
        try:
            result = environment.exec_command(action.command, timeout=action.timeout)
        except ExecTimeout as error:
            result = error.result
        node = Node(number, node, action, output=result.output[-2000:], exit_code=result.exit_code)


class _FirstSolved:
    """Told every node of a search: what is known of it even if it fails."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._seconds: float | None = None
        self._nodes = 0
        self._best = 0.0

    def __call__(self, node: Node) -> None:
        self._nodes += 1
        self._best = max(self._best, node.score)
        if node.score >= 1 and self._seconds is None:
            self._seconds = time.monotonic() - self._began

    def facts(self, searched: float) -> dict[str, Any]:
        return {
            "solved": self._seconds is not None,
            "seconds": searched if self._seconds is None else self._seconds,
            "tries": self._nodes,
            "best": self._best,
        }


def _mcts(arena: Arena, task: Task, seed: int, player: Player, settings: Settings, began: float) -> dict[str, Any]:
    """One worker: the agent does one thing at a time, as it does from scratch."""
    first = _FirstSolved(began)
    with player(task, seed, 0) as policy, arena.fresh(task) as environment:
        left = settings.seconds - (time.monotonic() - began)
        try:
            outcome = mcts(
                environment,
                policy,
                TaskScorer(task),
                Budget(seconds=max(left, 0.1)),
                exploration=settings.exploration,
                widening=settings.widening,
                to_the_end=settings.to_the_end,
                depth=4 * len(task.steps),
                workers=1,
                seed=seed,
                on_node=first,
            )
        except WaypointError as error:  # it may have been solved before: then only the winner could not be handed over
            return first.facts(time.monotonic() - began) | {"error": _said(arena, error)}
        searched = time.monotonic() - began
        spent = {name: round(summary.mean_ms * summary.count, 1) for name, summary in _operations(outcome.environment)}
        outcome.environment.destroy()
    return first.facts(searched) | {"spent_ms": spent, "failures": outcome.failures}


def _operations(environment: Environment) -> list[tuple[str, Any]]:
    wanted = ("exec", "run", "snapshot", "restore")
    return [(name, one) for name, one in environment.stats.operations.items() if name in wanted]


def _straight(arena: Arena, task: Task, deadline: float) -> dict[str, Any]:
    """Its steps have limits of their own, and so has what a backend does; the deadline is looked at between them."""
    scorer, lost, best = TaskScorer(task), [], 0.0
    with arena.fresh(task) as environment:
        for number, step in enumerate(task.steps):
            environment.restore(environment.snapshot())
            if number:
                lost.append(round(best - scorer.score(environment), 3))
            if time.monotonic() > deadline:
                return {"tries": number, "best": best, "marks": lost, "error": "timeout: its time was over"}
            best = _step(environment, action_of(step), scorer)
    return {"solved": best >= 1, "tries": len(task.steps), "best": best, "marks": lost}


def _step(environment: Environment, action: Action, scorer: TaskScorer) -> float:
    with contextlib.suppress(ExecTimeout):  # as in a search: an outcome like any other
        environment.exec_command(action.command, timeout=action.timeout)
    return scorer.score(environment)


def _said(arena: Arena, error: WaypointError) -> str:
    return f"{error.code}: {error.message}".replace(str(arena.home), "HOME")[:500]
