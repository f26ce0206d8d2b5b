"""All trials of an experiment, in lanes side by side, in an order that gives every way of playing the same hours of the machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from statefork.bench import machine
from statefork.experiment.arenas import Arena
from statefork.experiment.players import Player
from statefork.experiment.results import Recorder
from statefork.experiment.tasks import Task
from statefork.experiment.trials import Settings, Trial, Way, play
from statefork.explore.searches import results

__all__ = ["Plan", "plan", "run_experiment"]

Plan = tuple[Way, Arena, Task, int]
"""One trial to be played: how, where, what, with which seed."""


def plan(
    tasks: Sequence[Task], arenas: Sequence[Arena], ways: Sequence[Way], seeds: Sequence[int], scratch: Arena | None
) -> list[Plan]:
    """Seed by seed and task by task, each on all backends in turn. Right steps need no luck, and so no second seed."""
    found: list[Plan] = []
    for seed in seeds:
        for task in tasks:
            if "scratch" in ways and scratch is not None:
                found.append(("scratch", scratch, task, seed))
            if "mcts" in ways:
                found += [("mcts", arena, task, seed) for arena in arenas]
            if "straight" in ways and seed == seeds[0]:
                found += [("straight", arena, task, 0) for arena in arenas]
    return found


def run_experiment(
    plans: Sequence[Plan],
    player: Player,
    settings: Settings,
    recorder: Recorder,
    on_trial: Callable[[Trial, int, int], None],
) -> list[Trial]:
    """Those that are not known yet; `on_trial` is told each, with how many are done and how many there are."""
    known = recorder.known.keys
    left = [one for one in plans if (one[2].name, one[0], one[1].backend, one[3]) not in known]
    recorder.write(
        "run",
        {
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine.describe(),
            "trials": len(left),
            "restores": {one[1].backend: sorted(one[1].restores) for one in plans},
        },
    )
    done: list[Trial] = []
    lock = threading.Lock()

    def one(chosen: Plan) -> None:
        way, arena, task, seed = chosen
        trial = play(arena, task, way, seed, player, settings)
        recorder.trial(trial)
        with lock:
            done.append(trial)
            on_trial(trial, len(done), len(left))

    with machine.Watch() as watch:
        with ThreadPoolExecutor(settings.lanes, thread_name_prefix="lane") as lanes:
            futures = [lanes.submit(one, chosen) for chosen in left]
            try:
                results(futures)
            except BaseException:
                lanes.shutdown(wait=False, cancel_futures=True)
                raise
    recorder.write("load", watch.to_json())
    return done
