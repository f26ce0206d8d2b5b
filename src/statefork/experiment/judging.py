"""A task's own tests as a scorer: 1 when they pass, and the share of their checks that hold as long as they do not.

The tests run beside the shell, in the live environment, after every step. Their text is handed over as an argument, so nothing of
them lies in the environment for the agent to read, and what they wrote is removed again.
"""

from __future__ import annotations

from dataclasses import dataclass

from statefork.environment import Environment
from statefork.errors import ExecTimeout
from statefork.experiment.tasks import Task

__all__ = ["MOST_WITHOUT_REWARD", "TaskScorer", "Verdict"]

MOST_WITHOUT_REWARD = 0.95
"""Progress alone never counts as solved, whatever a task's tests say of it."""
_TELL = '(eval "$1") 2>&1; echo; cat /logs/verifier/reward.txt /logs/verifier/progress.txt; rm -rf /logs'


@dataclass(frozen=True, slots=True)
class Verdict:
    solved: bool
    progress: float
    """The share of checks that hold."""
    said: str
    """What the tests printed."""

    @property
    def score(self) -> float:
        return 1.0 if self.solved else min(self.progress, MOST_WITHOUT_REWARD)


@dataclass(frozen=True, slots=True)
class TaskScorer:
    task: Task

    def judge(self, environment: Environment) -> Verdict:
        argv = ["/bin/bash", "-c", _TELL, "bash", self.task.verifier]
        try:
            said = environment.run(argv, timeout=self.task.verifier_seconds).stdout
        except ExecTimeout as error:
            return Verdict(False, 0.0, error.result.stdout)
        try:
            *lines, reward, progress = said.splitlines()
            held, of = map(int, progress.split())
            return Verdict(float(reward) >= 1, held / of, "\n".join(lines))
        except (ValueError, ZeroDivisionError):  # the environment is broken so far that the tests cannot even run
            return Verdict(False, 0.0, said)

    def score(self, environment: Environment) -> float:
        return self.judge(environment).score
