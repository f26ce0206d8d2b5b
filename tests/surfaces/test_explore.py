"""Searches over live Waypoint sessions: what they find is live, what they drop is gone, what they wrote can be read again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from statefork.environment import Environment
from statefork.explore import (
    Action,
    Budget,
    ByCallable,
    ExitCode,
    Node,
    Number,
    PassedTests,
    Scripts,
    Weighted,
    beam,
    best_of_n,
    mcts,
    read_trace,
    retry,
)  # fmt: skip
from statefork.factory import create_env_manager


@pytest.fixture(scope="module")
def rooted(tmp_path_factory: pytest.TempPathFactory, small_rootfs: Path) -> Iterator[Environment]:
    home = tmp_path_factory.mktemp("explore")
    with create_env_manager("waypoint_build", home=home, store=home / "store", rootfs=small_rootfs) as env:
        yield env


@pytest.fixture
def env(rooted: Environment) -> Iterator[Environment]:
    """A fork of its own, and nothing of a search is left when the test is over."""
    rooted.exec_command("kill $(jobs -p) 2>/dev/null; wait; cd /; N=0; rm -f /tmp/*; sleep 100000 & :")
    (found,) = rooted.fork(1)
    before = rooted.stats.environments
    yield found
    assert rooted.stats.environments == before, "a search left environments behind"
    found.destroy()


def test_best_of_n_keeps_the_winner_live(env: Environment, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    outcome = best_of_n(
        env, ["N=1; echo 3 >/tmp/n", "N=2; echo 7 >/tmp/n", "N=3; echo 5 >/tmp/n", "false"],
        Number("cat /tmp/n 2>/dev/null", scale=0.1), trace=trace, workers=2,
    )  # fmt: skip
    try:
        assert outcome.best.action == Action("N=2; echo 7 >/tmp/n")
        assert outcome.best.score == pytest.approx(0.7)
        assert outcome.environment.exec_command("echo $N; cat /tmp/n").stdout.split() == ["2", "7"]
        assert env.exec_command("echo $N; ls /tmp/n").stdout.split() == ["0"], "the original is untouched"
    finally:
        outcome.environment.destroy()
    nodes, events = read_trace(trace)
    assert len(nodes) == 5
    assert events[0]["algorithm"] == "best_of_n"
    assert events[-1] | {"at_ms": 0, "seconds": 0, "forks": 0} == {
        "event": "end", "best": outcome.best.id, "score": 0.7000000000000001, "nodes": 5, "at_ms": 0, "seconds": 0, "forks": 0,
    }  # fmt: skip


def test_beam_finds_an_order(env: Environment) -> None:
    """Each right letter is a third; the shell's own variable carries the word."""
    policy = Scripts([f"W=${{W}}{letter}; echo $W >/tmp/w" for letter in "abc"])
    judge = ByCallable(lambda live: _prefix(live.exec_command("cat /tmp/w 2>/dev/null").stdout.strip(), "cab") / 3)
    outcome = beam(env, policy, judge, Budget(nodes=30), width=2, branching=3, depth=4, workers=2)
    with outcome.environment as live:
        assert outcome.solved
        assert live.exec_command("echo $W").stdout == "cab\n"
        assert [action.command[6] for action in outcome.actions] == ["c", "a", "b"]


def _prefix(found: str, wanted: str) -> int:
    return next((n for n, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), min(len(found), len(wanted)))


async def _async_score(live: Environment) -> float:
    return int(live.exec_command("echo $((N))").stdout) / 3


def test_mcts_climbs_with_sync_and_async_parts(env: Environment) -> None:
    class Steps:
        async def propose(self, node: Node, environment: Environment, count: int) -> Sequence[Action]:
            return Weighted({"N=$((N + 1))": 3, "N=$((N - 1))": 1, ":": 1}, seed=3).propose(node, environment, count)

    outcome = mcts(env, Steps(), ByCallable(_async_score), Budget(nodes=80, seconds=120), workers=2, seed=1)
    with outcome.environment as live:
        assert outcome.solved, f"best is {outcome.best.score} after {outcome.nodes} nodes"
        assert live.exec_command("echo $N").stdout == "3\n"
        assert live.exec_command("jobs -pr | wc -l").stdout == "1\n", "the job is alive in the winner"


def test_dropped_states_are_rebuilt_only_if_they_are_equal(env: Environment, tmp_path: Path) -> None:
    """With room for next to nothing, every node that is gone on from is rebuilt; what tells the time cannot be."""
    trace = tmp_path / "trace.jsonl"
    policy = Scripts(["N=$((N + 1)); echo $N", "N=$((N + 2)); cat /proc/uptime"], once=False)
    judge = ByCallable(lambda live: int(live.exec_command("echo $N").stdout) / 100)
    outcome = mcts(env, policy, judge, Budget(nodes=24, seconds=120, storage_bytes=1), workers=1, trace=trace, depth=4)
    with outcome.environment as live:
        assert outcome.best.score == int(live.exec_command("echo $N").stdout) / 100
    nodes, events = read_trace(trace)
    last = max(number for number, event in enumerate(events) if event["event"] == "node")
    kinds = {kind: [nodes[event["node"]] for event in events[:last] if event["event"] == kind] for kind in ("drop", "rebuilt", "lost")}
    assert kinds["drop"] and kinds["rebuilt"] and kinds["lost"]
    clocks = {node.id for node in nodes.values() if node.action and "uptime" in node.action.command}
    assert all({one.id for one in node.path()} & clocks for node in kinds["lost"]), "itself, or what it was made from"
    assert not {node.id for node in kinds["rebuilt"]} & clocks


def test_an_interrupted_search_goes_on(env: Environment, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    policy = Scripts(["N=$((N + 1)); echo $N", "echo no; false"], once=False)
    judge = ByCallable(lambda live: int(live.exec_command("echo $N").stdout) / 4)
    first = mcts(env, policy, judge, Budget(nodes=3), workers=1, trace=trace)
    first.environment.destroy()
    assert not first.solved
    with trace.open("a") as file:
        file.write('{"event": "node", "nod')  # its writer was killed here
    again = mcts(env, policy, judge, Budget(nodes=40, seconds=120), workers=1, trace=trace, resume=True)
    with again.environment as live:
        assert again.solved
        assert live.exec_command("echo $N").stdout == "4\n"
    nodes, _ = read_trace(trace)
    assert set(range(4)) <= set(nodes), "what the first run knew is still there"
    assert [json.loads(line)["event"] for line in trace.read_text().splitlines()].count("run") == 2


def test_a_resumed_search_decides_as_it_would_have(env: Environment, tmp_path: Path) -> None:
    """What the policy had nothing more to say to is known again, too."""
    policy = Scripts([f"N=$((N * 2 + {add})); echo $N" for add in (0, 1, 3)])
    judge = ByCallable(lambda live: int(live.exec_command("echo $N").stdout) % 7 / 10)

    def ways(name: str, *budgets: int) -> list[tuple[int, str]]:
        for number, nodes in enumerate(budgets):
            mcts(env, policy, judge, Budget(nodes=nodes), workers=1, trace=tmp_path / name, resume=number > 0).environment.destroy()
        found, events = read_trace(tmp_path / name)
        assert any(event["event"] == "spent" for event in events)
        return [(node.parent.id, node.action.command) for node in found.values() if node.parent and node.action]

    assert ways("once", 14) == ways("twice", 8, 14)


def test_a_replay_that_prints_something_else_is_given_up(env: Environment, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    policy = Scripts(["echo $RANDOM$RANDOM; N=1", "N=6"], once=False)
    judge = ByCallable(lambda live: int(live.exec_command("echo $N").stdout) / 6)
    env.exec_command("RANDOM=1")
    mcts(env, Scripts(["echo $RANDOM$RANDOM; N=1"], once=False), judge, Budget(nodes=2), workers=1, trace=trace).environment.destroy()
    env.exec_command("RANDOM=2")
    again = mcts(env, policy, judge, Budget(nodes=20, seconds=60), workers=1, trace=trace, resume=True)
    with again.environment as live:
        assert live.exec_command("echo $N").stdout == "6\n"
    assert again.actions == [Action("N=6")]


def test_retry_goes_back_to_the_clean_state(env: Environment) -> None:
    env.exec_command("echo 0 >/tmp/count")
    flaky = "N=$((N + 1)); echo dirty >>/tmp/mess; read -r c </dev/shm/tries; echo $((c + 1)) >/dev/shm/tries; [ $c -ge 1 ]"
    assert not retry(env, ["echo 0 >/dev/shm/tries", flaky], attempts=2), "a restore takes the tries back, too"
    assert env.exec_command("cat /tmp/mess; echo $N").stdout.split() == ["0"]
    assert retry(env, ["N=9", "[ $N = 9 ] && echo done >/tmp/done"], accept=lambda live: live.exec_command("true").ok)
    assert env.exec_command("cat /tmp/done; echo $N").stdout.split() == ["done", "9"]


def test_scorers(env: Environment) -> None:
    assert ExitCode("test -d /tmp").score(env) == 1
    assert ExitCode("test -d /nowhere").score(env) == 0
    assert Number("echo loss 0.25").score(env) == 0.25
    assert Number("true", missing=-1).score(env) == -1
    assert PassedTests("echo '3 passed, 1 failed in 0.1s'; false").score(env) == 0.75
    assert PassedTests("echo '4 passed'").score(env) == 1


def test_whole_attempts_begin_where_it_looks_best(env: Environment, tmp_path: Path) -> None:
    """Nothing on the way scores: only the third right step in a row does, and a wrong one spoils it for good."""
    env.exec_command("N=0; step() { if [ $N -ge 0 ] && [ $1 = $N ]; then N=$((N+1)); else N=-9; fi; echo $N | tee /tmp/n; }")
    policy = Weighted({"step 0": 1.0, "step 1": 1.0, "step 2": 1.0}, seed=3)
    scorer = ExitCode("grep -qx 3 /tmp/n")
    outcome = mcts(env, policy, scorer, Budget(nodes=150), depth=3, workers=1, to_the_end=True, trace=tmp_path / "t")
    try:
        assert outcome.solved
        assert [action.command for action in outcome.actions] == ["step 0", "step 1", "step 2"]
        lines = [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()]
        parents = {one["node"]: one["parent"] for one in lines if one["event"] == "node"}
        assert [parents[n] for n in (1, 2, 3)] == [0, 1, 2], "the first attempt goes to the end"
    finally:
        outcome.environment.destroy()


def test_mcts_leaves_a_tempting_state_that_leads_nowhere(env: Environment) -> None:
    """A short cut scores at once and spoils the rest for good, whatever follows it; the right way shows little until its end."""
    env.exec_command(
        "W=; take() { W=$W$1; case $W in ab*) s=0.2;; a*) s=0.1;; *) s=0;; esac; case $W in *x*) s=0.8;; abcd) s=1;; esac;"
        " echo $s >/tmp/n; }; echo 0 >/tmp/n"
    )

    class Tempted:
        """The short cut first, with much to try behind it; at each other place something else before the right one."""

        def propose(self, node: Node, environment: Environment, count: int) -> Sequence[Action]:
            word = "".join(action.command[-1] for action in node.history())
            if len(word) == 4:
                return []
            letters = "uvwyz" if "x" in word else "x" * (not word) + "y" + "abcd"[len(word)]
            tried = [child.action.command[-1] for child in node.children if child.action]
            return [Action(f"take {letter}") for letter in letters if letter not in tried][:1]

    outcome = mcts(env, Tempted(), Number("cat /tmp/n"), Budget(nodes=80), workers=1, depth=4)
    with outcome.environment as live:
        assert outcome.solved, f"only {outcome.best.score:g} after {outcome.nodes} nodes"
        assert live.exec_command("echo $W").stdout == "abcd\n"
