"""Every task of the experiment on Waypoint: its solution passes its tests, and harm that is done on the way does not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from statefork.environment import Environment
from statefork.errors import ExecTimeout
from statefork.experiment.arenas import Arena, default_arena_home, find_arenas
from statefork.experiment.base import IMAGE
from statefork.experiment.judging import TaskScorer
from statefork.experiment.tasks import Task, load_tasks

TASKS = load_tasks(Path(__file__).parents[2] / "experiments/tasks")
AT_A_TIME = 3


@pytest.fixture(scope="module")
def arena() -> Arena:
    """Over the images that `statefork experiment setup` has built; what is missing is built now."""
    found, missing = find_arenas(default_arena_home(), ["waypoint"])
    assert not missing, missing
    for task in TASKS:
        found[0].prepare(task)
    return found[0]


def in_all(work: Callable[[Task], str]) -> list[str]:
    """What is wrong with each task, those with nothing wrong left out."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return [f"{task.name}: {said}" for task, said in zip(TASKS, pool.map(work, TASKS), strict=True) if said]


def take(environment: Environment, command: str) -> None:
    try:
        environment.exec_command(command, timeout=60)
    except ExecTimeout as error:
        raise AssertionError(f"{command!r} does not end: {error.result.output}") from error


def test_the_tasks_are_many_and_whole() -> None:
    assert len(TASKS) >= 24
    for task in TASKS:
        assert 4 <= len(task.steps) <= 8, task.name
        assert {wrong.kind for wrong in task.wrong} == {"harmful", "useless"}, task.name
        assert (task.environment_dir / "Dockerfile").read_text().startswith(f"FROM {IMAGE}\n"), task.name
        said = [f"# {step.name}\n{step.command.strip()}" for step in task.steps]
        assert task.solution.partition("\n\n")[2].rstrip() == "\n\n".join(said), f"{task.name}: solve.sh is not its steps"
        for script in ("tests/test.sh", "solution/solve.sh"):
            assert (task.directory / script).stat().st_mode & 0o111, f"{task.name}: {script} cannot be run"


@pytest.mark.timeout(600)
def test_solutions_pass_and_doing_nothing_does_not(arena: Arena) -> None:
    def solve(task: Task) -> str:
        scorer = TaskScorer(task)
        with arena.fresh(task) as environment:
            before = scorer.judge(environment)
            printed = environment.run(["/bin/bash", "-c", task.solution], timeout=120, cwd="/app").output
            after = scorer.judge(environment)
        if before.solved:
            return "solved before anything was done"
        return "" if after.solved else f"{after.said}\n{printed}"

    assert not in_all(solve)


@pytest.mark.timeout(600)
def test_a_harmful_step_cannot_be_made_good(arena: Arena) -> None:
    """The first that the task lists, at its last place, and then all steps that the agent would still take."""

    def spoil(task: Task) -> str:
        wrong = next(one for one in task.wrong if one.kind == "harmful")
        place = max(n for n, step in enumerate(task.steps) if not wrong.at or step.name in wrong.at)
        with arena.fresh(task) as environment:
            for step in task.steps[:place]:
                take(environment, step.command)
            take(environment, wrong.command)
            for step in task.steps[place + wrong.moves_on :]:
                take(environment, step.command)
            verdict = TaskScorer(task).judge(environment)
        return f"solved in spite of {wrong.name!r} at {task.steps[place].name!r}" if verdict.solved else ""

    assert not in_all(spoil)


@pytest.mark.timeout(120)
def test_what_a_restore_loses_shows_in_the_score(arena: Arena) -> None:
    """Live state comes back with a whole snapshot, and is missed after one of files only."""
    task = next(one for one in TASKS if one.name == "kv-in-memory")
    scorer = TaskScorer(task)
    with arena.fresh(task) as environment:
        for step in task.steps[:3]:
            take(environment, step.command)
        score = scorer.score(environment)
        whole, files = environment.snapshot(), environment.snapshot(mode="files")
        environment.restore(files)
        assert scorer.score(environment) < score
        environment.restore(whole)
        assert scorer.score(environment) == score
