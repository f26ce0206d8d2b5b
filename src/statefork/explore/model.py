"""The words of a search: actions, nodes, what proposes and what judges, and when to stop."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from statefork.environment import Environment
from statefork.errors import UsageError

__all__ = ["Action", "Budget", "Meter", "Node", "Policy", "Scorer", "called"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Action:
    """One step: a command for the environment's shell."""

    command: str
    label: str = ""
    timeout: float | None = None

    @property
    def name(self) -> str:
        return self.label or " ".join(self.command.split())[:60]


@dataclass(slots=True)
class Node:
    """A state that was reached, and what is known of it. The root has no action."""

    id: int
    parent: Node | None = None
    action: Action | None = None
    score: float = 0.0
    """What the scorer said of this very state."""
    output: str = ""
    """The tail of what the action printed."""
    digest: str = ""
    """Of all that it printed, and its exit code: a replay must print the same."""
    exit_code: int = 0
    snapshot: str | None = None
    ended: bool = False
    """Nothing is to be tried from here: it is solved, or it failed."""
    children: list[Node] = field(default_factory=list)
    visits: int = 0
    total: float = 0.0
    busy: int = 0
    """How many workers are below it now (virtual loss)."""

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def mean(self) -> float:
        return self.total / self.visits if self.visits else 0.0

    def path(self) -> list[Node]:
        """From the root, which is left out, to this one."""
        return [] if self.parent is None else [*self.parent.path(), self]

    def history(self) -> list[Action]:
        return [node.action for node in self.path() if node.action is not None]


class Policy(Protocol):
    """Proposes what to try next. It may look into the environment, which stands at the node, and must not change it."""

    def propose(
        self, node: Node, environment: Environment, count: int
    ) -> Sequence[Action] | Awaitable[Sequence[Action]]:
        """Up to `count` actions that are not among `node.children` yet; none: nothing is left to try here."""
        ...


class Scorer(Protocol):
    """Judges a live environment. Higher is better; 1 or more is solved."""

    def score(self, environment: Environment) -> float | Awaitable[float]: ...


def called(work: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
    """The answer of a plain or an async function, on a thread without an event loop."""
    found = work(*arguments)
    if inspect.isawaitable(found):

        async def wait() -> T:
            return await cast("Awaitable[T]", found)

        return asyncio.run(wait())
    return found


@dataclass(frozen=True, slots=True)
class Budget:
    """When a search ends, whichever comes first; and how much its snapshots may hold before the least promising go."""

    seconds: float | None = None
    nodes: int | None = None
    forks: int | None = None
    storage_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is None and self.nodes is None and self.forks is None:
            raise UsageError("a search needs an end: give its Budget seconds, nodes or forks")


class Meter:
    """What of a budget is used up. Threads share one."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self.nodes = 0
        self.forks = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def claim_node(self) -> bool:
        """One more node may be made; False: the budget is used up."""
        with self._lock:
            if self._over():
                return False
            self.nodes += 1
            return True

    def count_fork(self, n: int = 1) -> None:
        with self._lock:
            self.forks += n

    @property
    def over(self) -> bool:
        with self._lock:
            return self._over()

    def _over(self) -> bool:
        budget = self.budget
        return (
            (budget.seconds is not None and self.seconds >= budget.seconds)
            or (budget.nodes is not None and self.nodes >= budget.nodes)
            or (budget.forks is not None and self.forks >= budget.forks)
        )

    def left(self) -> str:
        """For a person."""
        budget, words = self.budget, []
        if budget.seconds is not None:
            words.append(f"{max(budget.seconds - self.seconds, 0):.0f} s")
        if budget.nodes is not None:
            words.append(f"{max(budget.nodes - self.nodes, 0)} nodes")
        if budget.forks is not None:
            words.append(f"{max(budget.forks - self.forks, 0)} forks")
        return ", ".join(words)
