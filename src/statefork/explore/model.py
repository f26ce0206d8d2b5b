"""The words of a search: actions, nodes, what proposes and what judges, and when to stop."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from statefork.environment import Environment
from statefork.errors import UsageError

__all__ = ["Action", "Budget", "Meter", "Node", "Policy", "Scorer", "Watch", "called"]

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


@dataclass(slots=True, eq=False)
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
    spent: bool = False
    """The policy has nothing more to try here."""
    children: list[Node] = field(default_factory=list)
    visits: int = 0
    total: float = 0.0
    busy: int = 0
    """How many workers are below it now (virtual loss)."""
    error: str = ""
    """Why nothing can follow it, where the environment and not the command failed."""
    state: str = ""
    """Of the processes that were running when it was stored: a replay must leave the same ones."""

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


class Watch(Protocol):
    """Told what a search does, from any of its threads; for those who show it."""

    def began(self, meter: Meter, nodes: Mapping[int, Node]) -> None: ...
    def made(self, node: Node) -> None: ...
    def ended(self) -> None: ...


def called(work: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
    """The answer of a plain or an async function; the caller's thread may have an event loop of its own."""
    found = work(*arguments)
    if not inspect.isawaitable(found):
        return found

    async def wait() -> T:
        return await cast("Awaitable[T]", found)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    with ThreadPoolExecutor(1, thread_name_prefix="explore-await") as aside:
        return aside.submit(asyncio.run, wait()).result()


@dataclass(frozen=True, slots=True)
class Budget:
    """When a search ends, whichever comes first; and how much its snapshots may hold before the least promising go."""

    seconds: float | None = None
    nodes: int | None = None
    forks: int | None = None
    """How often a state is brought up from a snapshot, by fork or by restore."""
    storage_bytes: int | None = None
    """Files and memory that the snapshots of the search hold. What workers stand on, the root and the best node are kept
    whatever they take."""
    memory_bytes: int | None = None
    """The same, of the processes' memory alone."""

    def __post_init__(self) -> None:
        if self.seconds is None and self.nodes is None and self.forks is None:
            raise UsageError("a search needs an end: give its Budget seconds, nodes or forks")


class Meter:
    """What of a budget is used up. Threads share one."""

    def __init__(self, budget: Budget, *, nodes: int = 0, forks: int = 0, seconds: float = 0.0) -> None:
        """What an interrupted run has used already counts."""
        self.budget = budget
        self._lock = threading.Lock()
        self._began = time.monotonic() - seconds
        self._stopped = False
        self.nodes = nodes
        self.forks = forks

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def claim_node(self) -> bool:
        """One more node may be made; False: the budget is used up."""
        with self._lock:
            if self._stopped or self._late() or _reached(self.nodes, self.budget.nodes):
                return False
            self.nodes += 1
            return True

    def claim_fork(self) -> bool:
        """One more state may be brought up."""
        with self._lock:
            if self._stopped or _reached(self.forks, self.budget.forks):
                return False
            self.forks += 1
            return True

    def stop(self) -> None:
        """Nothing more is begun."""
        with self._lock:
            self._stopped = True

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def over(self) -> bool:
        with self._lock:
            used = _reached(self.nodes, self.budget.nodes) or _reached(self.forks, self.budget.forks)
            return self._stopped or self._late() or used

    def _late(self) -> bool:
        return self.budget.seconds is not None and self.seconds >= self.budget.seconds

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


def _reached(used: int, limit: int | None) -> bool:
    return limit is not None and used >= limit
