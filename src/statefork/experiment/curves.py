"""From trials to figures: which share of the tasks was solved within how many seconds, and what that took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from statefork.experiment.trials import Trial

__all__ = ["Curve", "Reach", "alike", "curves", "losses", "pass_at", "reach"]


@dataclass(frozen=True, slots=True)
class Curve:
    """One way of playing on one backend."""

    way: str
    backend: str
    trials: tuple[Trial, ...]

    @property
    def name(self) -> str:
        return f"Pass@K from scratch ({self.backend})" if self.way == "scratch" else f"MCTS on {self.backend}"

    @property
    def seeds(self) -> list[int]:
        return sorted({trial.seed for trial in self.trials})

    @property
    def solved(self) -> float:
        return self.share_at(float("inf"))

    @property
    def solving_seconds(self) -> list[float]:
        return sorted(trial.seconds for trial in self.trials if trial.solved)

    @property
    def median_seconds(self) -> float | None:
        """Of those that were solved."""
        return median(self.solving_seconds) if self.solving_seconds else None

    @property
    def mean_seconds(self) -> float:
        """Of all: an unsolved one counts with all the time that it took."""
        return mean(trial.seconds for trial in self.trials)

    @property
    def mean_tries(self) -> float:
        return mean(trial.tries for trial in self.trials)

    def share_at(self, seconds: float, seed: int | None = None) -> float:
        mine = [trial for trial in self.trials if seed is None or trial.seed == seed]
        return sum(trial.solved and trial.seconds <= seconds for trial in mine) / len(mine)

    def reaches(self, share: float) -> float | None:
        """After how many seconds so much was solved; None: never."""
        times = self.solving_seconds
        needed = next((n for n in range(len(times) + 1) if n / len(self.trials) >= share - 1e-9), None)
        if needed is None:
            return None
        return times[needed - 1] if needed else 0.0

    def costs_ms(self) -> dict[str, float]:
        """Milliseconds per node of a search, by what they went for."""
        nodes = sum(trial.tries for trial in self.trials)
        names = dict.fromkeys(name for trial in self.trials for name in trial.spent_ms)
        return {name: sum(one.spent_ms.get(name, 0.0) for one in self.trials) / max(nodes, 1) for name in names}


def curves(trials: Sequence[Trial]) -> list[Curve]:
    """From scratch first, then the searches in the order in which they were run."""
    keys = dict.fromkeys((trial.way, trial.backend) for trial in trials if trial.way != "straight")
    ordered = sorted(keys, key=lambda key: (key[0] != "scratch", list(keys).index(key)))
    return [Curve(way, name, tuple(t for t in trials if (t.way, t.backend) == (way, name))) for way, name in ordered]


def alike(found: Sequence[Curve]) -> list[Curve]:
    """Only tasks and seeds that all of them have played: shares of different tasks cannot be compared."""
    if not found:
        return []
    common = set.intersection(*({(trial.task, trial.seed) for trial in curve.trials} for curve in found))
    kept = [
        Curve(curve.way, curve.backend, tuple(one for one in curve.trials if (one.task, one.seed) in common))
        for curve in found
    ]
    return [curve for curve in kept if curve.trials]


def pass_at(curve: Curve, k: int) -> tuple[float, float]:
    """(share that is solved within k attempts, seconds that k attempts take in the mean) of a curve from scratch."""
    within = [trial for trial in curve.trials if trial.solved and trial.tries <= k]
    seconds = [trial.marks[min(k, len(trial.marks)) - 1] for trial in curve.trials if trial.marks]
    return len(within) / len(curve.trials), mean(seconds) if seconds else 0.0


@dataclass(frozen=True, slots=True)
class Reach:
    """How a search compares with Pass@K: when it has solved as much, and how much it solves in the end."""

    backend: str
    seconds: float | None
    fraction: float | None
    """Of the time that Pass@K took to come so far."""
    solved: float
    scratch: Curve
    """Pass@K on the same tasks and seeds."""

    def scratch_at(self, seconds: float) -> float:
        return self.scratch.share_at(seconds)


def reach(found: Sequence[Curve]) -> tuple[float, float, list[Reach]] | None:
    """(Pass@K's share, when it had reached it, each search against it); compared are tasks and seeds that both have played."""
    scratch = next((curve for curve in found if curve.way == "scratch"), None)
    if scratch is None:
        return None
    answers = []
    for curve in found:
        if curve.way != "mcts":
            continue
        shared = alike([scratch, curve])
        if not shared:
            continue
        base, mine = shared
        took, wanted = mine.reaches(base.solved), base.reaches(base.solved) or 0.0
        answers.append(
            Reach(curve.backend, took, took / wanted if took is not None and wanted else None, mine.solved, base)
        )
    return scratch.solved, scratch.reaches(scratch.solved) or 0.0, answers


def losses(trials: Sequence[Trial]) -> dict[str, tuple[int, int, float]]:
    """By backend: (tasks that the right steps solve in spite of a restore before each, tasks, mean score lost by one restore)."""
    found: dict[str, tuple[int, int, float]] = {}
    straight = [trial for trial in trials if trial.way == "straight"]
    for backend in dict.fromkeys(trial.backend for trial in straight):
        mine = [trial for trial in straight if trial.backend == backend]
        lost = [max(value, 0.0) for trial in mine for value in trial.marks]
        found[backend] = (sum(trial.solved for trial in mine), len(mine), mean(lost) if lost else 0.0)
    return found
