"""Samples and what is said of them. A figure is a median and a 95th percentile of so many rounds, never a single best."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Figure", "Samples"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured thing: `unit` is ms, MiB or per second."""

    workload: str
    backend: str
    what: str
    unit: str
    n: int
    p50: float
    p95: float
    least: float
    most: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Samples:
    """What the rounds bring in, by workload, backend and what was measured; in the order in which it first came."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str, str, str], list[float]] = {}
        self.failures: list[dict[str, str]] = []
        self.left_out: dict[str, list[str]] = {}
        """For want of time: backends by workload."""
        self.taken: dict[str, list[int]] = {}
        """By workload: before how many clocks the host had taken away memory that was in use, and how many there were."""

    def add(self, workload: str, backend: str, what: str, value: float, unit: str = "ms") -> None:
        self._values.setdefault((workload, backend, what, unit), []).append(value)

    def fail(self, workload: str, backend: str, why: str) -> None:
        self.failures.append({"workload": workload, "backend": backend, "why": why})

    def leave_out(self, workload: str, backend: str) -> None:
        self.left_out.setdefault(workload, []).append(backend)

    def note_taken(self, workload: str, was_taken: bool) -> None:
        counts = self.taken.setdefault(workload, [0, 0])
        counts[0] += was_taken
        counts[1] += 1

    def figures(self) -> Iterator[Figure]:
        for (workload, backend, what, unit), values in self._values.items():
            ordered = sorted(values)
            p95 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
            numbers = [round(value, 3) for value in (statistics.median(ordered), p95, ordered[0], ordered[-1])]
            yield Figure(workload, backend, what, unit, len(ordered), *numbers)
