"""How environments are used: one exec after another, many forks at once, a search tree, an agent that thinks between commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from statefork.bench.allowance import Allowance
from statefork.bench.figures import Samples
from statefork.bench.machine import memory_used_bytes, merging, pss_bytes, until_merged
from statefork.bench.rounds import timed_ms
from statefork.bench.subjects import Subject
from statefork.bench.workloads import Workload, by_name
from statefork.environment import Environment
from statefork.errors import WaypointError

__all__ = ["PATTERNS", "agent_loop", "depths", "execs", "fan_out", "parts", "tree_search", "unchanged"]

Progress = Callable[[str], None]
_SEARCH_SECONDS = 20.0
_SHELL = Workload("", "", setup="sleep 1000000 & :")


def parts(quick: bool) -> int:
    """How many there are, to share the time among."""
    return 5 if quick else 15


def _each(
    name: str, subjects: Sequence[Subject], samples: Samples, say: Progress, allow: Allowance, work: Callable[[Subject], None]
) -> None:
    """Ours first: whoever comes when the time is used up is left out."""
    allow.begin_part()
    for subject in subjects:
        if allow.left() < 0 and not subject.name.startswith("waypoint"):
            samples.leave_out(name, subject.name)
            continue
        say(f"{name}: {subject.name}")
        try:
            work(subject)
        except WaypointError as error:
            samples.fail(name, subject.name, error.message)


def execs(subjects: Sequence[Subject], samples: Samples, say: Progress, allow: Allowance, *, quick: bool) -> None:
    """Round trip of `true`, and how many a second one after another."""
    name, count = "exec", 20 if quick else 200

    def work(subject: Subject) -> None:
        with subject.make() as env:
            env.exec_command("true")
            began = time.perf_counter()
            for _ in range(count):
                samples.add(name, subject.name, "exec of true", timed_ms(lambda: env.exec_command("true")))
            samples.add(name, subject.name, "execs", count / (time.perf_counter() - began), "per second")

    _each(name, subjects, samples, say, allow, work)


def fan_out(subjects: Sequence[Subject], samples: Samples, say: Progress, allow: Allowance, *, quick: bool) -> None:
    """N forks of one snapshot, all of which have answered a correct command; and what each costs in memory."""
    for n in (10,) if quick else (1, 10, 100, 300):
        name = f"fan-out {n}"

        def work(subject: Subject, n: int = n, name: str = name) -> None:
            if n > 10 and subject.name != "waypoint":
                return  # the others take minutes or all memory for that
            with subject.make() as env:
                _SHELL.prepare(env)
                _SHELL.next_round(env, n)
                _fan(_SHELL, name, subject, env, n, samples)

        _each(name, subjects, samples, say, allow, work)
    if not quick:
        _memory_of_forks(subjects, samples, say, allow)
        merged = [subject.merged for subject in subjects if subject.merged is not None]
        if merged:
            with merging():
                _memory_of_forks(merged, samples, say, allow, settle=until_merged)


def _memory_of_forks(
    subjects: Sequence[Subject], samples: Samples, say: Progress, allow: Allowance, settle: Callable[[], None] = lambda: None
) -> None:
    """What ten forks of a warm interpreter cost, beside what one of it holds, when they have been idle for a while."""
    (workload,) = by_name(("numpy and pandas",), quick=False)
    name = f"ten forks of {workload.name}"

    def work(subject: Subject) -> None:
        if not workload.needs <= subject.claims:
            return
        before = pss_bytes()
        with subject.make() as env:
            workload.prepare(env)
            workload.next_round(env, 10)
            samples.add(name, subject.name, "the original", max(pss_bytes() - before, 0) / 2**20, "MiB")
            settle()
            _fan(workload, name, subject, env, 10, samples, settle)

    _each(name, subjects, samples, say, allow, work)


def _fan(
    workload: Workload,
    name: str,
    subject: Subject,
    env: Environment,
    n: int,
    samples: Samples,
    settle: Callable[[], None] = lambda: None,
) -> None:
    snapshot = env.snapshot()
    used, pss = memory_used_bytes(), pss_bytes()
    forks: list[Environment] = []

    def all_answer() -> None:
        forks.extend(env.fork(n, from_snapshot=snapshot))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda fork: workload.check(fork, n, subject.claims), forks))

    try:
        samples.add(name, subject.name, "fork", timed_ms(all_answer))
        time.sleep(0.5)
        settle()
        samples.add(name, subject.name, "memory per fork", max(memory_used_bytes() - used, 0) / n / 2**20, "MiB")
        samples.add(name, subject.name, "PSS per fork", max(pss_bytes() - pss, 0) / n / 2**20, "MiB")
    finally:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda fork: fork.destroy(), forks))


def depths(subjects: Sequence[Subject], samples: Samples, say: Progress, allow: Allowance, *, quick: bool) -> None:
    """What a command, a snapshot and a restore cost when so many snapshots lie below, each with changed files."""
    for depth in () if quick else (1, 10, 100):
        name = f"depth {depth}"

        def work(subject: Subject, depth: int = depth, name: str = name) -> None:
            if depth > 10 and subject.name != "waypoint":
                return  # minutes, or more layers than they take
            with subject.make() as env:
                _SHELL.prepare(env)
                for level in range(depth):
                    _SHELL.next_round(env, level)
                    env.exec_command(f"mkdir -p /root/levels && echo {level} >/root/levels/{level}")
                    last = env.snapshot()
                samples.add(name, subject.name, "restore", timed_ms(lambda: _back(env, last, depth - 1, subject)))
                for _ in range(20):
                    command = "cat /root/levels/0 /etc/passwd >/dev/null"
                    samples.add(name, subject.name, "exec of cat", timed_ms(lambda: env.exec_command(command)))  # noqa: B023
                env.exec_command("echo last >/root/levels/last")
                samples.add(name, subject.name, "snapshot", timed_ms(env.snapshot))

        _each(name, subjects, samples, say, allow, work)


def tree_search(subjects: Sequence[Subject], samples: Samples, say: Progress, allow: Allowance, *, quick: bool) -> None:
    """Depth by width: fork, act in each child, snapshot the best, go on from there. Slow backends do not come to the end."""
    depth, width = (2, 2) if quick else (30, 3)
    name = f"tree search {depth} x {width}"

    def work(subject: Subject) -> None:
        with subject.make() as env:
            _SHELL.prepare(env)
            _SHELL.next_round(env, 0)
            began = time.perf_counter()
            for level in range(depth):
                samples.add(name, subject.name, "a level", timed_ms(lambda: _level(env, level, width, subject)))  # noqa: B023
                if time.perf_counter() - began > _SEARCH_SECONDS:
                    return
            samples.add(name, subject.name, "whole search", (time.perf_counter() - began) * 1000)

    _each(name, subjects, samples, say, allow, work)


def _level(env: Environment, level: int, width: int, subject: Subject) -> None:
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


def agent_loop(subjects: Sequence[Subject], samples: Samples, say: Progress, allow: Allowance, *, quick: bool) -> None:
    """What an agent sees of snapshots and restores when it thinks between its commands."""
    for seconds, turns in ((0.2, 2),) if quick else ((0.2, 8), (1.0, 5), (3.0, 3)):
        name = f"agent loop, {seconds:g} s of thought"

        def work(subject: Subject, seconds: float = seconds, turns: int = turns, name: str = name) -> None:
            with subject.make() as env:
                _SHELL.prepare(env)
                for turn in range(turns if subject.name.startswith("waypoint") else max(turns // 4, 1)):
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
        _each(name, both, samples, say, allow, work)


def unchanged(subjects: Sequence[Subject], samples: Samples, say: Progress, allow: Allowance, *, quick: bool) -> None:
    """A snapshot when nothing has happened since the last one."""
    name = "nothing changed"

    def work(subject: Subject) -> None:
        with subject.make() as env:
            _SHELL.prepare(env)
            env.snapshot()
            for _ in range(3 if quick else 10):
                time.sleep(0.05)
                samples.add(name, subject.name, "snapshot", timed_ms(env.snapshot))

    _each(name, subjects, samples, say, allow, work)


def _back(env: Environment, snapshot: str, turn: int, subject: Subject) -> None:
    env.restore(snapshot)
    _SHELL.check(env, turn, subject.claims)


PATTERNS = (execs, unchanged, fan_out, depths, tree_search, agent_loop)
