"""Tasks in Harbor's format, with one file beside Harbor's own: `agent.toml`, by which the stochastic agent plays.

error_rate = 0.3                     chance that a step goes wrong, for steps that do not say their own
[[steps]]  name, command             what solves the task, in order; error_rate if it differs
[[wrong]]  name, command             plausible, and no help
           kind                      "useless" changes nothing that matters; "harmful" damages live state or uses something up
           at = ["step", ...]        at whose turn it may be taken; left out: at any
           weight = 1.0              how likely among the wrong ones
           moves_on = true           the agent takes it for the step itself and goes on; else it notices, and tries the step again
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from statefork.errors import NotFound, UsageError

__all__ = ["Kind", "Step", "Task", "Wrong", "load_task", "load_tasks"]

Kind = Literal["useless", "harmful"]
_PARTS = ("task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh", "solution/solve.sh", "agent.toml")


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    command: str
    error_rate: float


@dataclass(frozen=True, slots=True)
class Wrong:
    name: str
    command: str
    kind: Kind
    at: tuple[str, ...] = ()
    weight: float = 1.0
    moves_on: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    directory: Path
    description: str
    instruction: str
    steps: tuple[Step, ...]
    wrong: tuple[Wrong, ...]
    verifier: str
    """The text of tests/test.sh."""
    verifier_seconds: float

    @property
    def environment_dir(self) -> Path:
        return self.directory / "environment"

    @property
    def solution(self) -> str:
        return (self.directory / "solution/solve.sh").read_text()

    def digest(self) -> str:
        """Of what its environment is built from: names, modes and contents."""
        found = hashlib.blake2b(digest_size=8)
        for path in sorted(self.environment_dir.rglob("*")):
            if path.is_file():
                head = f"{path.relative_to(self.environment_dir)} {path.stat().st_mode & 0o111:o}\n"
                found.update(head.encode() + path.read_bytes())
        return found.hexdigest()


def load_tasks(directory: Path, names: Sequence[str] = ()) -> list[Task]:
    """All tasks of a directory by name, or those that are named."""
    known = {path.parent.name: path.parent for path in sorted(directory.glob("*/task.toml"))}
    if not known:
        raise NotFound(f"there are no tasks in {directory}; --tasks names the directory that holds them")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no task {', '.join(unknown)}; there are: {', '.join(known)}")
    return [load_task(path) for name, path in known.items() if not names or name in names]


def load_task(directory: Path) -> Task:
    missing = [part for part in _PARTS if not (directory / part).is_file()]
    if missing:
        raise UsageError(f"task {directory}: it has no {', '.join(missing)}")
    facts, agent = _toml(directory / "task.toml"), _toml(directory / "agent.toml")
    try:
        usual = float(agent["error_rate"])
        steps = tuple(Step(one["name"], one["command"], float(one.get("error_rate", usual))) for one in agent["steps"])
        wrong = tuple(_wrong(one) for one in agent["wrong"])
        task = Task(
            name=directory.name,
            directory=directory.resolve(),
            description=facts["task"]["description"],
            instruction=(directory / "instruction.md").read_text(),
            steps=steps,
            wrong=wrong,
            verifier=(directory / "tests/test.sh").read_text(),
            verifier_seconds=float(facts["verifier"]["timeout_sec"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"task {directory}: task.toml or agent.toml lacks or misspells {error}") from error
    _check(task)
    return task


def _wrong(entry: dict[str, Any]) -> Wrong:
    kind = entry["kind"]
    if kind not in ("useless", "harmful"):
        raise ValueError(f"kind {kind!r}")
    at, weight = tuple(entry.get("at", ())), float(entry.get("weight", 1.0))
    return Wrong(entry["name"], entry["command"], cast("Kind", kind), at, weight, bool(entry.get("moves_on", False)))


def _check(task: Task) -> None:
    names = [step.name for step in task.steps]
    if len(set(names)) != len(names):
        raise UsageError(f"task {task.name}: two steps have the same name")
    for wrong in task.wrong:
        strange = [name for name in wrong.at if name not in names]
        if strange:
            raise UsageError(f"task {task.name}: {wrong.name!r} is at {', '.join(strange)}, which is no step")
    commands = [step.command for step in task.steps] + [wrong.command for wrong in task.wrong]
    for step in task.steps:
        if not any(not wrong.at or step.name in wrong.at for wrong in task.wrong):
            raise UsageError(f"task {task.name}: nothing can go wrong at {step.name!r}")
        if not 0 <= step.error_rate < 1:
            raise UsageError(f"task {task.name}: the error rate of {step.name!r} is not from 0 to 1")
    if not all(command.strip() for command in commands):
        raise UsageError(f"task {task.name}: a command is empty")


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from error
