"""Policies that need no model: a list of scripts, and a random one with weights."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from statefork.environment import Environment
from statefork.explore.model import Action, Node

__all__ = ["Scripts", "Weighted"]


def _actions(commands: Sequence[Action | str]) -> list[Action]:
    return [one if isinstance(one, Action) else Action(one) for one in commands]


class Scripts:
    """Proposes the same actions at every node, in order; with `once`, each only once on a path."""

    def __init__(self, commands: Sequence[Action | str], *, once: bool = True) -> None:
        self._actions = _actions(commands)
        self._once = once

    def propose(self, node: Node, environment: Environment, count: int) -> list[Action]:
        tried = {child.action for child in node.children}
        taken = set(node.history()) if self._once else set()
        return [action for action in self._actions if action not in tried and action not in taken][:count]


class Weighted:
    """Draws without replacement, by weight; the same seed draws the same at the same node of the same path."""

    def __init__(self, weights: Mapping[str, float], *, seed: int = 0, timeout: float | None = None) -> None:
        self._weights = dict(weights)
        self._timeout = timeout
        self._seed = seed

    def propose(self, node: Node, environment: Environment, count: int) -> list[Action]:
        path = "\n".join(action.command for action in node.history())
        chance = random.Random(f"{self._seed}:{path}:{len(node.children)}")
        tried = {child.action.command for child in node.children if child.action is not None}
        left = {command: weight for command, weight in self._weights.items() if command not in tried and weight > 0}
        found: list[Action] = []
        while left and len(found) < count:
            (drawn,) = chance.choices(list(left), list(left.values()))
            del left[drawn]
            found.append(Action(drawn, timeout=self._timeout))
        return found
