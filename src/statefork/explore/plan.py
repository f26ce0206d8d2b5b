"""A search that a file or a command line describes: where, by which search, what is tried, what judges, and when it ends.

A plan is written into the trace of its run, without any key, so that `statefork promote` and `statefork trace replay` can make the
same environment again.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from statefork.backends.option_values import size_bytes
from statefork.environment import Environment
from statefork.errors import BuildError, UsageError
from statefork.explore.chat import ChatPolicy
from statefork.explore.chat_endpoint import ChatSettings
from statefork.explore.model import Action, Budget, Policy, Scorer, Watch
from statefork.explore.policies import Scripts, Weighted
from statefork.explore.scorers import ExitCode, Number, PassedTests
from statefork.explore.searches import Outcome, beam, best_of_n, mcts
from statefork.explore.trace import read_trace
from statefork.factory import create_env_manager

__all__ = ["ALGORITHMS", "Plan", "read_plan"]

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "best_of_n": ("workers",),
    "beam": ("width", "branching", "depth", "workers"),
    "mcts": ("exploration", "widening", "depth", "workers", "seed", "to_the_end"),
}
"""The searches, and what each takes."""

ScorerKind = Literal["exit_code", "number", "tests"]
_CHAT = ("base_url", "model", "temperature", "most_tokens", "timeout", "retries", "most_proposals", "extra")
_BUDGET = ("seconds", "nodes", "forks", "storage", "memory")


@dataclass(frozen=True, slots=True)
class Plan:
    backend: str = "waypoint"
    attach: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Those of the backend's method, as docs/backends.md lists them."""
    setup: Sequence[str] = ()
    """Commands that lead to the state the search begins with; each has to succeed."""
    algorithm: str = "mcts"
    options: Mapping[str, Any] = field(default_factory=dict)
    scripts: Sequence[str] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    task: str = ""
    """For a model."""
    chat: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ChatSettings for a task, all but the key."""
    repeat: bool = False
    """A script may be taken more than once on a path."""
    timeout: float | None = None
    """Of each step, in seconds."""
    scorer: ScorerKind = "exit_code"
    score: str = ""
    """The command that judges."""
    scale: float = 1.0
    budget: Mapping[str, Any] = field(default_factory=dict)

    def checked(self) -> Plan:
        """Raises UsageError, before anything is made."""
        if self.algorithm not in ALGORITHMS:
            raise UsageError(f"no search {self.algorithm!r}; there are: {', '.join(ALGORITHMS)}")
        _known("search", self.options, ALGORITHMS[self.algorithm])
        _known("budget", self.budget, _BUDGET)
        _known("chat", self.chat, _CHAT)
        ways = [name for name in ("scripts", "weights", "task") if getattr(self, name)]
        if len(ways) != 1:
            raise UsageError(
                f"give what to try, in one way: scripts, weights or a task; not {' and '.join(ways) or 'none'}"
            )
        if self.algorithm == "best_of_n" and not self.scripts:
            raise UsageError("best_of_n tries scripts; weights and tasks are for mcts and beam")
        if not self.score:
            raise UsageError("give what judges: a command whose exit code, last number or test summary is the score")
        self.limits()
        return self

    def limits(self) -> Budget:
        given = dict(self.budget)
        sizes = {f"{name}_bytes": size_bytes(given.pop(name)) for name in ("storage", "memory") if name in given}
        if not given and self.algorithm == "best_of_n":
            given["nodes"] = len(self.scripts)
        return Budget(**given, **sizes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> Plan:
        return cls(**document)

    @classmethod
    def of_trace(cls, path: Path) -> Plan:
        """Raises UsageError if the search was not made from a plan: then only its program can make its environment."""
        _, events = read_trace(path)
        note = next((event.get("note") for event in events if event["event"] == "run"), None)
        if not note or "plan" not in note:
            raise UsageError(f"{path} does not say how its environment was made: no `statefork explore` wrote it")
        return cls.of_json(note["plan"])

    # -- doing --------------------------------------------------------------------------------------------------------

    def environment(self, home: Path | None) -> Environment:
        """Made, and set up."""
        method = f"{self.backend}_{'attach' if self.attach else 'build'}"
        environment = create_env_manager(method, home=home, **self.arguments)
        try:
            for step in self.setup:
                done = environment.exec_command(step)
                if not done.ok:
                    raise BuildError(f"setup: {step!r} ended in {done.exit_code}: {done.output[-500:].strip()}")
        except BaseException:
            environment.destroy()
            raise
        return environment

    def judge(self) -> Scorer:
        if self.scorer == "number":
            return Number(self.score, self.scale)
        return (ExitCode if self.scorer == "exit_code" else PassedTests)(self.score)

    def policy(self, chat: ChatSettings | None) -> Policy:
        if self.task:
            if chat is None:
                raise UsageError("a task needs a model: give its base URL and name")
            return ChatPolicy(chat, self.task, timeout=self.timeout)
        if self.weights:
            return Weighted(self.weights, seed=int(self.options.get("seed", 0)), timeout=self.timeout)
        return Scripts(self.actions(), once=not self.repeat)

    def actions(self) -> list[Action]:
        return [Action(script, timeout=self.timeout) for script in self.scripts]

    def search(
        self,
        environment: Environment,
        *,
        trace: Path | None,
        resume: bool,
        watch: Watch | None,
        chat: ChatSettings | None,
    ) -> Outcome:
        given: dict[str, Any] = {"trace": trace, "resume": resume, "watch": watch, "note": {"plan": self.to_json()}}
        given |= self.options
        if self.algorithm == "best_of_n":
            return best_of_n(environment, self.actions(), self.judge(), budget=self.limits(), **given)
        search: Callable[..., Outcome] = beam if self.algorithm == "beam" else mcts
        policy = self.policy(chat)
        with policy if isinstance(policy, ChatPolicy) else nullcontext():
            return search(environment, policy, self.judge(), self.limits(), **given)


def read_plan(path: Path) -> Plan:
    """From TOML, as docs/explore.md shows it."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    tables = {"arguments", "search", "policy", "chat", "scorer", "budget"}
    _known(str(path), document, ("backend", "attach", "setup", *sorted(tables)))
    for name in tables & document.keys():
        if not isinstance(document[name], dict):
            raise UsageError(f"{path}: {name} must be a table: [{name}]")
    plan = Plan(
        backend=str(document.get("backend", "waypoint")),
        attach=bool(document.get("attach", False)),
        arguments=document.get("arguments", {}),
        setup=list(document.get("setup", ())),
        budget=document.get("budget", {}),
        chat=document.get("chat", {}),
    )
    options = dict(document.get("search", {}))
    plan = replace(plan, algorithm=str(options.pop("algorithm", "mcts")), options=options)
    policy = document.get("policy", {})
    _known("policy", policy, ("scripts", "weights", "task", "repeat", "timeout"))
    return _with_scorer(replace(plan, **policy), document.get("scorer", {}))


def _with_scorer(plan: Plan, scorer: Mapping[str, Any]) -> Plan:
    kinds: tuple[ScorerKind, ...] = ("exit_code", "number", "tests")
    _known("scorer", scorer, (*kinds, "scale"))
    found = [kind for kind in kinds if kind in scorer]
    if len(found) > 1:
        raise UsageError(f"scorer: give one of {', '.join(found)}")
    if found:
        plan = replace(plan, scorer=found[0], score=str(scorer[found[0]]))
    return replace(plan, scale=float(scorer.get("scale", plan.scale)))


def _known(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"{where}: there is no {name!r}; there are: {', '.join(known)}")
