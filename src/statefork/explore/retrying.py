"""`retry`: one environment, one step after another, and back to the clean state when a step fails."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from statefork.environment import Environment
from statefork.errors import SessionDead
from statefork.explore.field import act
from statefork.explore.model import Action, Node, called
from statefork.explore.proof import output_digest
from statefork.explore.trace import Trace
from statefork.model import ExecResult

__all__ = ["retry"]


def retry(
    environment: Environment,
    steps: Sequence[Action | str],
    *,
    accept: Callable[[Environment], bool | Awaitable[bool]] | None = None,
    attempts: int = 3,
    trace: Path | None = None,
) -> bool:
    """Take the steps one after another in the environment itself; one that fails goes back to the clean state before it.

    A step has failed when its command ends non-zero, takes too long or kills the environment, or when `accept` says no.
    False when a step fails `attempts` times: the environment then stands in the clean state before that step. In the trace
    the score of a node is the share of the steps that are taken.
    """
    with Trace(trace) as written:
        written.run(algorithm="retry", backend=environment.backend, attempts=attempts, steps=len(steps))
        last, number = Node(0, score=0.0 if steps else 1.0, snapshot=environment.snapshot()), 0
        written.node(last)
        for done, one in enumerate(steps):
            action = one if isinstance(one, Action) else Action(one)
            clean = last.snapshot
            assert clean is not None
            for _ in range(attempts):
                number += 1
                node, ok, times = _attempt(environment, Node(number, last, action), accept)
                node.score = (done + ok) / len(steps)
                node.ended = not ok or done + 1 == len(steps)
                if ok:
                    node.snapshot = environment.snapshot()
                written.node(node, exec_ms=times)
                if ok:
                    last = node
                    break
                environment.restore(clean)
            else:
                break
        written.write("end", best=last.id, score=last.score, nodes=number + 1)
        return last.score >= 1


def _attempt(
    environment: Environment, node: Node, accept: Callable[[Environment], bool | Awaitable[bool]] | None
) -> tuple[Node, bool, float]:
    assert node.action is not None
    began = time.perf_counter()
    result, ok = ExecResult(-1), False
    try:
        result = act(environment, node.action)
        ok = result.ok and not result.timed_out and (accept is None or bool(called(accept, environment)))
    except SessionDead as error:
        node.error = error.message
    node.output, node.digest, node.exit_code = result.output[-2000:], output_digest(result), result.exit_code
    return node, ok, (time.perf_counter() - began) * 1000
