"""The stochastic agent: it knows the right steps, and takes a wrong one instead with a documented chance.

It stands for a model that mostly knows what to do. Where it stands in a task follows from what it did so far: each right step moves it on,
and so does a wrong one that it takes for the step itself (`moves_on`). It cannot see that it was wrong; a search can, by the score.
The same seed proposes the same at the same place of the same path, on every backend. It names one action a call, and thinks for each.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from statefork.environment import Environment
from statefork.experiment.tasks import Step, Task, Wrong
from statefork.explore import Action, Node

__all__ = ["StochasticAgent", "action_of"]

STEP_SECONDS = 30.0
MOST_ERRORS = 0.9


class StochasticAgent:
    """A policy of `statefork.explore`; `attempt` sets those apart that begin from scratch."""

    def __init__(
        self, task: Task, *, seed: int, think_seconds: float = 0.0, attempt: int = 0, error_scale: float = 1.0
    ) -> None:
        """`error_scale` multiplies the rates of the task, up to MOST_ERRORS."""
        self._task = task
        self._error_scale = error_scale
        self._seed = f"{seed}:{task.name}:{attempt}"
        self._think_seconds = think_seconds

    def propose(self, node: Node, environment: Environment, count: int) -> list[Action]:
        """Draws without replacement: what was tried at this node is not proposed again. None: it believes that it is done."""
        time.sleep(self._think_seconds)
        history = node.history()
        step = self._turn(history)
        if step is None:
            return []
        tried = {child.action.command for child in node.children if child.action is not None}
        path = "\n".join(action.command for action in history)
        chance = random.Random(f"{self._seed}:{path}:{len(tried)}")
        right = step.command not in tried
        wrong = [one for one in self._wrong_at(step) if one.command not in tried]
        if right and (not wrong or chance.random() >= self._error_rate(step)):
            return [action_of(step)]
        return [action_of(one) for one in chance.choices(wrong, [one.weight for one in wrong])] if wrong else []

    def _error_rate(self, step: Step) -> float:
        return min(step.error_rate * self._error_scale, MOST_ERRORS)

    def _turn(self, history: Sequence[Action]) -> Step | None:
        """The step that the agent believes comes next."""
        steps, done = self._task.steps, 0
        for action in history:
            if done == len(steps):
                break
            taken_for_it = (one.command for one in self._wrong_at(steps[done]) if one.moves_on)
            done += action.command in (steps[done].command, *taken_for_it)
        return steps[done] if done < len(steps) else None

    def _wrong_at(self, step: Step) -> list[Wrong]:
        return [one for one in self._task.wrong if not one.at or step.name in one.at]


def action_of(one: Step | Wrong) -> Action:
    mark = "" if isinstance(one, Step) else f"{one.kind}: "
    return Action(one.command, label=f"{mark}{one.name}", timeout=STEP_SECONDS)
