"""The stochastic agent: it knows the right steps, and takes a wrong one instead with a documented chance.

It stands for a model that mostly knows what to do. Where it stands in a task follows from what it did so far: each right step moves it on,
and so does a wrong one that it takes for the step itself (`moves_on`). It cannot see that it was wrong; a search can, by the score.
The same seed proposes the same at the same place of the same path, on every backend. Thinking is a pause, for each action.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from statefork.environment import Environment
from statefork.experiment.tasks import Step, Task, Wrong
from statefork.explore import Action, Node

__all__ = ["StochasticAgent"]

STEP_SECONDS = 30.0


class StochasticAgent:
    """A policy of `statefork.explore`, and a player of single attempts."""

    def __init__(self, task: Task, *, seed: int, think_seconds: float, attempt: int = 0) -> None:
        """`attempt`: each one from scratch draws anew."""
        self._task = task
        self._seed = f"{seed}:{task.name}:{attempt}"
        self._think_seconds = think_seconds

    def propose(self, node: Node, environment: Environment, count: int) -> list[Action]:
        """Draws without replacement: what was tried at this node is not proposed again."""
        tried = {child.action.command for child in node.children if child.action is not None}
        return self._think(self._draw(node.history(), tried, count))

    def next_action(self, history: Sequence[Action]) -> Action | None:
        """For an attempt without a tree; None when the agent believes that it is done."""
        found = self._think(self._draw(history, set(), 1))
        return found[0] if found else None

    def _draw(self, history: Sequence[Action], tried: set[str], count: int) -> list[Action]:
        step = self._turn(history)
        if step is None:
            return []
        path = "\n".join(action.command for action in history)
        chance = random.Random(f"{self._seed}:{path}:{len(tried)}")
        right = [step] if step.command not in tried else []
        wrong = [one for one in self._wrong_at(step) if one.command not in tried]
        drawn: list[Step | Wrong] = []
        while (right or wrong) and len(drawn) < count:
            if right and (not wrong or chance.random() >= step.error_rate):
                drawn.append(right.pop())
            else:
                (one,) = chance.choices(wrong, [one.weight for one in wrong])
                wrong.remove(one)
                drawn.append(one)
        return [_action(one) for one in drawn]

    def _think(self, actions: list[Action]) -> list[Action]:
        time.sleep(self._think_seconds * max(len(actions), 1))
        return actions

    def _turn(self, history: Sequence[Action]) -> Step | None:
        """The step that the agent believes comes next."""
        moving = {_action(one).command for one in self._task.wrong if one.moves_on}
        done = 0
        for action in history:
            if done < len(self._task.steps):
                done += action.command in (self._task.steps[done].command, *moving)
        return self._task.steps[done] if done < len(self._task.steps) else None

    def _wrong_at(self, step: Step) -> list[Wrong]:
        return [one for one in self._task.wrong if not one.at or step.name in one.at]


def _action(one: Step | Wrong) -> Action:
    mark = "" if isinstance(one, Step) else f"{one.kind}: "
    return Action(one.command, label=f"{mark}{one.name}", timeout=STEP_SECONDS)
