"""Who plays: the stochastic agent, or a model behind a chat endpoint. Both are policies of `statefork.explore`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from statefork.experiment.agent import STEP_SECONDS, StochasticAgent
from statefork.experiment.tasks import Task
from statefork.explore import ChatPolicy, ChatSettings, Policy

__all__ = ["Player", "chat_player", "stochastic_player"]

Player = Callable[[Task, int, int], AbstractContextManager[Policy]]
"""(task, seed, attempt) to the policy that plays it."""


def stochastic_player(think_seconds: float, error_scale: float = 1.0) -> Player:
    @contextmanager
    def play(task: Task, seed: int, attempt: int) -> Iterator[Policy]:
        yield StochasticAgent(task, seed=seed, think_seconds=think_seconds, attempt=attempt, error_scale=error_scale)

    return play


def chat_player(settings: ChatSettings) -> Player:
    """It is told the task's instruction and nothing else; seeds and attempts differ by what the model makes of it."""

    @contextmanager
    def play(task: Task, seed: int, attempt: int) -> Iterator[Policy]:
        with ChatPolicy(settings, task.instruction, timeout=STEP_SECONDS) as policy:
            yield policy

    return play
