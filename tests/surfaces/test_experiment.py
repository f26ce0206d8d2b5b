"""The experiment: its agent and its arithmetic, and one small run of it by the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from statefork.errors import StoreError, UsageError
from statefork.experiment.agent import StochasticAgent
from statefork.experiment.arenas import default_arena_home, find_arenas
from statefork.experiment.curves import curves, losses, pass_at, reach
from statefork.experiment.players import stochastic_player
from statefork.experiment.report import as_markdown
from statefork.experiment.results import Recorder, read_results
from statefork.experiment.tasks import load_task, load_tasks
from statefork.experiment.trials import Settings, Trial, play
from statefork.explore import Node

TASKS = Path(__file__).parents[2] / "experiments/tasks"
RUN = [sys.executable, "-c", "from statefork.cli.main import main; main()"]


def experiment(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "STATEFORK_HOME": str(default_arena_home()), "MPLCONFIGDIR": str(tmp_path)}
    env.pop("WAYPOINT_HOME", None)
    argv = [*RUN, "experiment", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, env=env, timeout=280, check=False)


# -- the agent --------------------------------------------------------------------------------------------------------


def attempt(agent: StochasticAgent, most: int) -> list[str]:
    """The names of what it does in one line, without an environment: it never looks at one."""
    node = Node(0)
    for number in range(1, most + 1):
        found = agent.propose(node, None, 1)  # type: ignore[arg-type]
        if not found:
            break
        node = Node(number, node, found[0])
    return [action.name for action in node.history()]


def test_the_agent_errs_as_documented_and_the_same_with_the_same_seed() -> None:
    task = load_task(TASKS / "release-token")
    first = [attempt(StochasticAgent(task, seed=1, attempt=n), 1)[0] for n in range(600)]
    assert first == [attempt(StochasticAgent(task, seed=1, attempt=n), 1)[0] for n in range(600)]
    wrong = sum(":" in name for name in first) / len(first)
    assert wrong == pytest.approx(task.steps[0].error_rate, abs=0.05)
    doubled = [attempt(StochasticAgent(task, seed=1, attempt=n, error_scale=2), 1)[0] for n in range(600)]
    assert sum(":" in name for name in doubled) / 600 == pytest.approx(2 * task.steps[0].error_rate, abs=0.05)
    assert attempt(StochasticAgent(task, seed=1, error_scale=0), 20) == [step.name for step in task.steps]


def test_the_agent_takes_some_wrong_steps_for_right_and_repeats_others() -> None:
    task = load_task(TASKS / "release-token")
    agent = StochasticAgent(task, seed=0, error_scale=0)
    by_name = {one.name: one.command for one in task.wrong}
    from statefork.explore import Action

    on = Node(1, Node(0), Action(by_name["token in a pipe"]))
    assert agent.propose(on, None, 1)[0].name == "region"  # type: ignore[arg-type]
    again = Node(1, Node(0), Action(by_name["show the configuration"]))
    assert agent.propose(again, None, 1)[0].name == "token"  # type: ignore[arg-type]


def test_the_agent_names_nothing_twice_at_a_node() -> None:
    task = load_task(TASKS / "kv-in-memory")
    agent, node = StochasticAgent(task, seed=4), Node(0)
    while found := agent.propose(node, None, 1):  # type: ignore[arg-type]
        node.children.append(Node(len(node.children) + 1, node, found[0]))
    named = [child.action for child in node.children]
    start = task.steps[0].name
    assert len(named) == len(set(named)) == 1 + sum(not one.at or start in one.at for one in task.wrong)


def test_tasks_that_are_wrong_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no task nonsense; there are: bc-coproc"):
        load_tasks(TASKS, ["nonsense"])
    (tmp_path / "t").mkdir()
    (tmp_path / "t/task.toml").write_text("")
    with pytest.raises(UsageError, match=r"it has no instruction.md, .*agent.toml"):
        load_tasks(tmp_path)


# -- results ----------------------------------------------------------------------------------------------------------


def made() -> list[Trial]:
    """Ten tasks: from scratch eight are solved, the last after 40 s; the search on `fast` is there after 8 s, `slow` never."""
    scratch = [Trial(f"t{n}", "scratch", "fast", 0, n < 8, 5.0 * (n + 1) if n < 8 else 60.0, n + 1, marks=[5.0 * (k + 1) for k in range(n + 1)]) for n in range(10)]
    fast = [Trial(f"t{n}", "mcts", "fast", 0, n < 9, 1.0 + n, 10, spent_ms={"restore": 50.0}) for n in range(10)]
    slow = [Trial(f"t{n}", "mcts", "slow", 0, n < 2, 30.0, 3, error="" if n else "dead: it died") for n in range(5)]
    straight = [Trial("t0", "straight", "slow", 0, False, 1.0, 3, marks=[0.25, 0.75])]
    return [*fast, *scratch, *slow, *straight]


def test_curves_say_what_was_solved_when() -> None:
    found = curves(made())
    assert [curve.name for curve in found] == ["Pass@K from scratch (fast)", "MCTS on fast", "MCTS on slow"]
    scratch, fast, slow = found
    assert (scratch.solved, fast.solved, slow.solved) == (0.8, 0.9, 0.4)
    assert scratch.share_at(14.9) == 0.2 and scratch.share_at(15) == 0.3
    assert pass_at(scratch, 3) == (pytest.approx(0.3), pytest.approx((5 + 10 + 15 * 8) / 10))
    known = reach(found)
    assert known is not None
    share, seconds, (on_fast, on_slow) = known
    assert (share, seconds) == (0.8, 40.0)
    assert (on_fast.seconds, on_fast.fraction, on_fast.solved) == (8.0, 0.2, 0.9)
    assert (on_slow.seconds, on_slow.fraction, on_slow.solved) == (None, None, 0.4), "compared on the five tasks that both played"
    assert losses(made()) == {"slow": (0, 1, 0.5)}


def test_results_go_on_after_a_kill_and_keep_to_their_settings(tmp_path: Path) -> None:
    settings = Settings(think_seconds=0.1)
    with Recorder(tmp_path, settings) as recorder:
        recorder.write("run", {"started_at": "now", "machine": {}, "trials": 0, "restores": {"slow": ["files"]}})
        for trial in made():
            recorder.trial(trial)
    file = tmp_path / "results.jsonl"
    with file.open("a") as torn:
        torn.write('{"event": "trial", "task": "t9')
    with Recorder(tmp_path, settings) as recorder:
        assert recorder.known.trials == made()
        recorder.trial(Trial("t5", "mcts", "slow", 0, failures=2))
    known = read_results(tmp_path)
    assert len(known.trials) == len(made()) + 1
    text = as_markdown(known, ["solved.svg"])
    assert "MCTS on fast has solved as many after 8.0 s, 20% of the time, and 90% in the end." in text
    assert "MCTS on slow does not come so far in its 60 s: 33% (Pass@K at that time: 100%)." in text
    assert "| slow | files | 0 of 1 | 0.50 |" in text and "dead: it died" in text and "(solved.svg)" in text
    assert "On slow a state could not be stored or brought back 2 times in 1 searches (t5)" in text
    with pytest.raises(UsageError, match="choose another --results"):
        Recorder(tmp_path, Settings(think_seconds=9))
    file.write_text("nonsense\n")
    with pytest.raises(StoreError, match="line 1 is no result"):
        read_results(tmp_path)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_a_small_experiment(tmp_path: Path) -> None:
    """Two tasks on Waypoint; a second run finds everything played and only reports."""
    page = tmp_path / "page.md"
    page.write_text("words\n<!-- experiment -->\n<!-- end of experiment -->\nmore words\n")
    arguments = [
        "run", "-b", "waypoint", "--seed", "5", "--think", "0", "--attempts", "3", "--seconds", "20", "--error-scale", "0.5",
        "-t", "release-token", "-t", "sealed-stage", "--results", str(tmp_path / "out"), "--page", str(page),
    ]  # fmt: skip
    done = experiment(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    known = read_results(tmp_path / "out")
    assert {(trial.task, trial.way) for trial in known.trials} == {
        (task, way) for task in ("release-token", "sealed-stage") for way in ("scratch", "mcts", "straight")
    }
    assert not [trial.error for trial in known.trials if trial.error]
    by_way = {(trial.task, trial.way): trial for trial in known.trials}
    for task in ("release-token", "sealed-stage"):
        assert by_way[task, "straight"].solved and by_way[task, "straight"].marks == [0.0] * len(by_way[task, "straight"].marks)
        assert 1 <= by_way[task, "scratch"].tries <= 3 and len(by_way[task, "scratch"].marks) == by_way[task, "scratch"].tries
        assert by_way[task, "mcts"].tries > 0 and {"snapshot", "exec", "run"} <= set(by_way[task, "mcts"].spent_ms)
    assert (tmp_path / "out/solved.png").stat().st_size > 1000 and "<svg" in (tmp_path / "out/solved.svg").read_text()
    text = page.read_text()
    assert text.startswith("words\n") and text.endswith("more words\n") and "| waypoint | files" in text
    again = experiment(tmp_path, *arguments, "--json", "--no-plots")
    assert again.returncode == 0, again.stderr
    assert read_results(tmp_path / "out").trials == known.trials
    (document,) = json.loads(again.stdout)
    assert {(curve["way"], curve["trials"]) for curve in document["curves"]} == {("scratch", 2), ("mcts", 2)}


def test_right_steps_have_a_time_limit_too() -> None:
    (arena,), _ = find_arenas(default_arena_home(), ["waypoint"])
    trial = play(arena, load_task(TASKS / "release-token"), "straight", 0, stochastic_player(0), Settings(seconds=0))
    assert not trial.solved and trial.tries == 0 and trial.error == "timeout: its time was over"


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    assert "no task nonsense" in experiment(tmp_path, "run", "-t", "nonsense").stderr
    assert "there are no results" in experiment(tmp_path, "report", str(tmp_path)).stderr
    listed = experiment(tmp_path, "list", "--json")
    assert len(json.loads(listed.stdout)) >= 24
