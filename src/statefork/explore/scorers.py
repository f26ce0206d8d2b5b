"""Scorers: a command's exit code, a number that it prints, the share of tests that pass, or a callable."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from statefork.environment import Environment
from statefork.errors import ExecTimeout

__all__ = ["ByCallable", "ExitCode", "Number", "PassedTests"]

_FLOAT = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class ExitCode:
    """1 when the command succeeds, else 0. It runs beside the shell, which it does not disturb."""

    command: str
    timeout: float | None = 300

    def score(self, environment: Environment) -> float:
        return float(_run(environment, self.command, self.timeout)[0] == 0)


@dataclass(frozen=True, slots=True)
class Number:
    """The last number that the command prints, times `scale`; `missing` when it prints none."""

    command: str
    scale: float = 1.0
    missing: float = 0.0
    timeout: float | None = 300

    def score(self, environment: Environment) -> float:
        found = _FLOAT.findall(_run(environment, self.command, self.timeout)[1])
        return float(found[-1]) * self.scale if found else self.missing


@dataclass(frozen=True, slots=True)
class PassedTests:
    """The share of tests that pass, by the summary line of pytest (`3 passed, 1 failed`); a clean exit is 1."""

    command: str = "python3 -m pytest -q"
    timeout: float | None = 600

    def score(self, environment: Environment) -> float:
        exit_code, output = _run(environment, self.command, self.timeout)
        if exit_code == 0:
            return 1.0
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?)\b", output)}
        total = sum(counts.values())
        return min(counts.get("passed", 0) / total, 0.99) if total else 0.0


@dataclass(frozen=True, slots=True)
class ByCallable:
    judge: Callable[[Environment], float | Awaitable[float]]

    def score(self, environment: Environment) -> float | Awaitable[float]:
        return self.judge(environment)


def _run(environment: Environment, command: str, timeout: float | None) -> tuple[int, str]:
    try:
        done = environment.run(["/bin/sh", "-c", command], timeout=timeout)
    except ExecTimeout as error:
        return 124, error.result.output
    return done.exit_code, done.output
