"""How environments are used: one exec after another, many forks at once, a search tree, an agent that thinks between commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from statefork.bench.figures import Samples
from statefork.bench.machine import memory_used_bytes
from statefork.bench.rounds import timed_ms
from statefork.bench.subjects import Subject
from statefork.bench.workloads import Workload
from statefork.environment import Environment
from statefork.errors import WaypointError

__all__ = ["PATTERNS", "agent_loop", "execs", "fan_out", "tree_search", "unchanged"]

Progress = Callable[[str], None]
_SHELL = Workload("", "", setup="sleep 1000000 & :")


def _each(
    name: str, subjects: Sequence[Subject], samples: Samples, say: Progress, work: Callable[[Subject], None]
) -> None:
    for subject in subjects:
        say(f"{name}: {subject.name}")
        try:
            work(subject)
        except WaypointError as error:
            samples.fail(name, subject.name, error.message)


def execs(subjects: Sequence[Subject], samples: Samples, say: Progress, *, quick: bool) -> None:
    """Round trip of `true`, and how many a second one after another."""
    name, count = "exec", 50 if quick else 200

    def work(subject: Subject) -> None:
        with subject.make() as env:
            env.exec_command("true")
            began = time.perf_counter()
            for _ in range(count):
                samples.add(name, subject.name, "exec of true", timed_ms(lambda: env.exec_command("true")))
            samples.add(name, subject.name, "execs", count / (time.perf_counter() - began), "per second")

    _each(name, subjects, samples, say, work)


def fan_out(subjects: Sequence[Subject], samples: Samples, say: Progress, *, quick: bool) -> None:
    """N forks of one snapshot, all of which have answered a correct command; and what each costs in memory."""
    for n in (1, 10) if quick else (1, 10, 100, 300):
        name = f"fan-out {n}"

        def work(subject: Subject, n: int = n, name: str = name) -> None:
            if n > 10 and subject.name != "waypoint":
                return  # the others take minutes or all memory for that
            with subject.make() as env:
                _SHELL.prepare(env)
                _SHELL.next_round(env, n)
                snapshot = env.snapshot()
                before = memory_used_bytes()
                forks: list[Environment] = []
                try:
                    samples.add(
                        name, subject.name, "fork", timed_ms(lambda: _fork_all(env, snapshot, n, forks, subject))
                    )
                    time.sleep(0.5)
                    grown = (memory_used_bytes() - before) / n / 2**20
                    samples.add(name, subject.name, "memory per fork", max(grown, 0.0), "MiB")
                finally:
                    with ThreadPoolExecutor(4) as pool:
                        list(pool.map(lambda fork: fork.destroy(), forks))

        _each(name, subjects, samples, say, work)


def _fork_all(env: Environment, snapshot: str, n: int, forks: list[Environment], subject: Subject) -> None:
    forks.extend(env.fork(n, from_snapshot=snapshot))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda fork: _SHELL.check(fork, n, subject.claims), forks))


def tree_search(subjects: Sequence[Subject], samples: Samples, say: Progress, *, quick: bool) -> None:
    """Depth by width: fork, act in each child, snapshot the best, go on from there."""
    depth, width = (5, 3) if quick else (30, 3)
    name = f"tree search {depth} x {width}"

    def work(subject: Subject) -> None:
        with subject.make() as env:
            _SHELL.prepare(env)
            _SHELL.next_round(env, 0)
            samples.add(name, subject.name, "whole search", timed_ms(lambda: _search(env, depth, width, subject)))

    _each(name, subjects, samples, say, work)


def _search(env: Environment, depth: int, width: int, subject: Subject) -> None:
    for level in range(depth):
        snapshot = env.snapshot()
        children = env.fork(width, from_snapshot=snapshot)
        try:
            for child in children:
                _SHELL.check(child, level, subject.claims)
                child.exec_command("echo try >>/root/tries")
            best = children[0].snapshot()
            env.restore(best)
        finally:
            for child in children:
                child.destroy()
        _SHELL.next_round(env, level + 1)


def agent_loop(subjects: Sequence[Subject], samples: Samples, say: Progress, *, quick: bool) -> None:
    """What an agent sees of snapshots and restores when it thinks between its commands."""
    for seconds in (0.2,) if quick else (0.2, 1.0, 3.0):
        name = f"agent loop, {seconds:g} s of thought"

        def work(subject: Subject, seconds: float = seconds, name: str = name) -> None:
            with subject.make() as env:
                _SHELL.prepare(env)
                for turn in range(4 if quick else 8):
                    time.sleep(seconds)
                    _SHELL.next_round(env, turn)
                    time.sleep(seconds)
                    taken: list[str] = []
                    samples.add(name, subject.name, "snapshot", timed_ms(lambda: taken.append(env.snapshot())))  # noqa: B023
                    time.sleep(seconds)
                    _SHELL.spoil(env)
                    time.sleep(seconds)
                    samples.add(name, subject.name, "restore", timed_ms(lambda: _back(env, taken[0], turn, subject)))  # noqa: B023

        both = [one for subject in subjects for one in (subject, subject.ahead) if one is not None]
        _each(name, both, samples, say, work)


def unchanged(subjects: Sequence[Subject], samples: Samples, say: Progress, *, quick: bool) -> None:
    """A snapshot when nothing has happened since the last one."""
    name = "nothing changed"

    def work(subject: Subject) -> None:
        with subject.make() as env:
            _SHELL.prepare(env)
            env.snapshot()
            for _ in range(3 if quick else 10):
                time.sleep(0.05)
                samples.add(name, subject.name, "snapshot", timed_ms(env.snapshot))

    _each(name, subjects, samples, say, work)


def _back(env: Environment, snapshot: str, turn: int, subject: Subject) -> None:
    env.restore(snapshot)
    _SHELL.check(env, turn, subject.claims)


PATTERNS = (execs, unchanged, fan_out, tree_search, agent_loop)
