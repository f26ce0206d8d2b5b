"""Take the actions of a trace again, and tell where they lead to something else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from statefork.environment import Environment
from statefork.errors import NotFound
from statefork.explore.field import ReplayDiffers, act
from statefork.explore.model import Node
from statefork.explore.proof import output_digest, state_digest
from statefork.explore.trace import read_trace

__all__ = ["Replayed", "replay", "replay_to", "winner"]


@dataclass(frozen=True, slots=True)
class Replayed:
    """`differing` nodes were reached and printed something else, or left other processes; what is below them was not tried."""

    equal: tuple[int, ...]
    differing: tuple[int, ...]
    untried: tuple[int, ...]

    @property
    def ok(self) -> bool:
        return not self.differing


def winner(path: Path, number: int | None = None) -> Node:
    """A node of a trace, by default the best one: the highest score, then the fewest steps, then the first."""
    nodes, _ = read_trace(path)
    if number is not None:
        if number not in nodes:
            raise NotFound(f"{path} has no node {number}; `statefork trace show {path}` draws it")
        return nodes[number]
    if not nodes:
        raise NotFound(f"{path} has no nodes: its search ended before the first")
    return min(nodes.values(), key=lambda node: (-node.score, node.depth, node.id))


def replay_to(environment: Environment, node: Node) -> None:
    """Take the steps to one node, in the environment itself, which must stand where the trace began.

    Raises ReplayDiffers at the first step that prints something else; the environment then stands behind that step.
    """
    for step in node.path():
        assert step.action is not None
        if output_digest(act(environment, step.action)) != step.digest:
            raise ReplayDiffers(f"node {step.id}, {step.action.name!r}, did not print again what it had printed")


def replay(environment: Environment, path: Path) -> Replayed:
    """The whole tree, in the order of the trace, in a fork of the environment, which must stand where the trace began."""
    nodes, _ = read_trace(path)
    taken: dict[int, str] = {}
    equal: list[int] = []
    differing: list[int] = []
    untried: list[int] = []
    (worker,) = environment.fork(1)
    with worker:
        for node in sorted(nodes.values(), key=lambda node: node.id):
            if node.parent is None:
                taken[node.id] = worker.snapshot()
            elif node.parent.id not in taken:
                untried.append(node.id)
            else:
                assert node.action is not None
                worker.restore(taken[node.parent.id])
                same = output_digest(act(worker, node.action)) == node.digest
                if same and node.children:
                    taken[node.id] = worker.snapshot()
                    same = not node.state or state_digest(worker, taken[node.id]) == node.state
                (equal if same else differing).append(node.id)
                if not same:
                    taken.pop(node.id, None)
    return Replayed(tuple(equal), tuple(differing), tuple(untried))
