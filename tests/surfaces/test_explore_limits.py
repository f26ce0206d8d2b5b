"""What a search does when something is short, breaks, is interrupted or is asked for twice."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from statefork.environment import Environment
from statefork.errors import CriuError, SessionDead, StoreError
from statefork.explore import (
    Action,
    Budget,
    ByCallable,
    ExitCode,
    Node,
    Scripts,
    beam,
    best_of_n,
    mcts,
    read_trace,
    replay,
    retry,
)  # fmt: skip
from statefork.factory import create_env_manager


@pytest.fixture(scope="module")
def rooted(tmp_path_factory: pytest.TempPathFactory, small_rootfs: Path) -> Iterator[Environment]:
    home = tmp_path_factory.mktemp("explore")
    with create_env_manager("waypoint_build", home=home, store=home / "store", rootfs=small_rootfs) as env:
        env.exec_command("N=0")
        yield env


@pytest.fixture
def env(rooted: Environment) -> Iterator[Environment]:
    (found,) = rooted.fork(1)
    before = rooted.stats.environments
    yield found
    assert rooted.stats.environments == before, "a search left environments behind"
    found.destroy()


def _n(live: Environment) -> int:
    return int(live.exec_command("echo $N").stdout)


COUNTING = Scripts(["N=$((N + 1)); echo $N", "N=$((N + 10)); echo $N"], once=False)


def test_workers_side_by_side_try_nothing_twice(env: Environment) -> None:
    """The policy is slow enough that all workers ask at the same node before the first has acted."""
    met = threading.Barrier(3, timeout=30)
    once = threading.Event()

    class Slow:
        def propose(self, node: Node, environment: Environment, count: int) -> Sequence[Action]:
            if node.parent is None and not once.is_set():
                met.wait()
                once.set()
            return Scripts([f"echo {n}" for n in range(6)]).propose(node, environment, count)

    outcome = mcts(env, Slow(), ExitCode("false"), Budget(nodes=9), workers=3)
    outcome.environment.destroy()
    root = outcome.best
    assert root.parent is None
    tried = Counter(child.action for child in root.children)
    assert max(tried.values()) == 1, tried


def test_a_failing_policy_ends_all_workers(env: Environment) -> None:
    class Broken:
        def propose(self, node: Node, environment: Environment, count: int) -> Sequence[Action]:
            if node.depth == 1:
                raise RuntimeError("out of ideas")
            return [Action(f"echo {node.id}.{n}") for n in range(count)]

    with pytest.raises(RuntimeError, match="out of ideas"):
        mcts(env, Broken(), ExitCode("false"), Budget(seconds=600), workers=2)


def test_forks_are_a_budget(env: Environment, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    outcome = best_of_n(env, [f"N={n}" for n in range(6)], ExitCode("false"), budget=Budget(forks=3), workers=1, trace=trace)
    outcome.environment.destroy()
    _, events = read_trace(trace)
    assert outcome.nodes == 1 + 3, "one fork, and then two restores"
    assert events[-1]["forks"] == 3


def test_a_state_that_does_not_come_back_is_lost_and_told(
    env: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two states that the search wants back do not come; it goes on from the others."""
    trace = tmp_path / "trace.jsonl"
    restore, made, refused = Environment.restore, list[str | None](), set[str]()

    def fails_twice(self: Environment, snapshot: str) -> object:
        if snapshot in refused or (len(refused) < 2 and snapshot in made):
            refused.add(snapshot)
            raise CriuError(f"cannot bring {snapshot} back")
        return restore(self, snapshot)

    monkeypatch.setattr(Environment, "restore", fails_twice)
    judge = ByCallable(lambda live: {0: 0.0, 1: 0.5, 2: 0.4, 11: 0.7, 12: 0.6, 21: 1.0}.get(_n(live), 0.2))
    outcome = mcts(
        env, COUNTING, judge, Budget(nodes=60), workers=1, depth=4, trace=trace, on_node=lambda node: made.append(node.snapshot)
    )  # fmt: skip
    outcome.environment.destroy()
    assert outcome.solved and outcome.failures == 2 and len(refused) == 2
    _, events = read_trace(trace)
    failed = [event for event in events if event["event"] == "failed"]
    assert len(failed) == 2 and all("cannot bring" in event["why"] for event in failed)
    assert events[-1]["failures"] == 2


def test_a_backend_that_brings_nothing_back_ends_the_search(
    env: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.jsonl"

    def fails(self: Environment, snapshot: str) -> object:
        raise SessionDead(f"{snapshot} is dead")

    monkeypatch.setattr(Environment, "restore", fails)
    with pytest.raises(SessionDead, match="is dead"):
        mcts(env, COUNTING, ByCallable(lambda live: 0.0), Budget(nodes=60), workers=1, depth=3, trace=trace)
    _, events = read_trace(trace)
    assert sum(event["event"] == "failed" for event in events) == 3


def test_what_nothing_follows_goes_before_the_frontier(env: Environment, tmp_path: Path) -> None:
    """A dead end with a good score is dropped, a poor node on the frontier is not; the best stays."""
    trace = tmp_path / "trace.jsonl"
    taken = env.snapshot()
    (size,) = (snapshot.memory_bytes for snapshot in env.snapshots() if snapshot.id == taken)
    budget = Budget(nodes=10, memory_bytes=5 * size)
    outcome = mcts(env, COUNTING, ByCallable(lambda live: min(_n(live) / 21, 0.9)), budget, workers=1, trace=trace, depth=2)
    with outcome.environment as live:
        assert _n(live) / 21 == pytest.approx(outcome.best.score) or outcome.best.score == 0.9
    nodes, events = read_trace(trace)
    dropped = [nodes[event["node"]] for event in events if event["event"] == "drop"]
    assert dropped[0].depth == 2, "at the depth limit nothing follows"
    assert outcome.best.id not in {node.id for node in dropped}


def test_a_step_that_kills_everything_is_only_a_node(env: Environment, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    steps = ["kill -9 -1; kill -9 $$", "exit 3", "N=7; echo ok"]
    judge = ByCallable(lambda live: _n(live) / 7 if live.exec_command("echo $N").stdout.strip() else 0.0)
    outcome = best_of_n(env, steps, judge, workers=1, trace=trace)
    with outcome.environment as live:
        assert outcome.solved
        assert _n(live) == 7
    assert len(read_trace(trace)[0]) == 4


def test_beam_and_best_of_n_go_on_after_a_crash(env: Environment, tmp_path: Path) -> None:
    trace = tmp_path / "beam.jsonl"
    judge = ByCallable(lambda live: _n(live) / 30)
    first = beam(env, COUNTING, judge, Budget(nodes=3), width=1, branching=2, depth=3, workers=1, trace=trace)
    first.environment.destroy()
    again = beam(env, COUNTING, judge, Budget(nodes=30), width=1, branching=2, depth=3, workers=1, trace=trace, resume=True)
    with again.environment as live:
        assert _n(live) == 30 and again.solved
    nodes, _ = read_trace(trace)
    assert len(nodes) == 1 + 6, "nothing was tried twice"

    trace = tmp_path / "best.jsonl"
    cut = best_of_n(env, ["N=1", "N=2"], judge, workers=1, trace=trace)
    cut.environment.destroy()
    whole = best_of_n(env, ["N=1", "N=2", "N=3"], judge, budget=Budget(nodes=9), workers=1, trace=trace, resume=True)
    with whole.environment as live:
        assert _n(live) == 3
    assert len(read_trace(trace)[0]) == 4
    with pytest.raises(StoreError, match="cannot go on as a mcts"):
        mcts(env, COUNTING, judge, Budget(nodes=1), trace=trace, resume=True)


def test_a_trace_is_replayed(env: Environment, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    policy = Scripts(["N=$((N + 1)); echo $N", "cat /proc/uptime; N=5"])
    outcome = mcts(env, policy, ByCallable(lambda live: _n(live) / 100), Budget(nodes=4), workers=1, trace=trace)
    outcome.environment.destroy()
    found = replay(env, trace)
    nodes, _ = read_trace(trace)
    clocks = {node.id for node in nodes.values() if node.action and "uptime" in node.action.command}
    assert not found.ok and set(found.differing) <= clocks and found.differing
    assert found.equal
    assert sorted(found.equal + found.differing + found.untried) == [1, 2, 3, 4]


def test_inside_an_event_loop(env: Environment) -> None:
    async def score(live: Environment) -> float:
        await asyncio.sleep(0)
        return float(_n(live))

    async def main() -> float:
        outcome = best_of_n(env, ["N=0", "N=1"], ByCallable(score), workers=1)
        outcome.environment.destroy()
        return outcome.best.score

    assert asyncio.run(main()) == 1


def test_retry_writes_a_trace_and_survives_time_outs(env: Environment, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"

    async def agreed(live: Environment) -> bool:
        return live.exec_command("true").ok

    slow = Action("touch /tmp/half; sleep 100", timeout=0.3)
    assert not retry(env, ["N=4", slow], accept=agreed, attempts=2, trace=trace)
    assert env.exec_command("echo $N; ls /tmp/half").stdout == "4\n", "back in the clean state"
    nodes, events = read_trace(trace)
    assert [node.score for node in nodes.values()] == [0, 0.5, 0.5, 0.5]
    assert events[-1]["best"] == 1
