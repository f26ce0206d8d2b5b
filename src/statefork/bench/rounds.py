"""Snapshot, restore and fork of every backend, round by round: a busy moment of the machine hits all of them alike.

The clock of restore and fork stops at the first correct command in what came up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from statefork.bench.allowance import Allowance
from statefork.bench.figures import Samples
from statefork.bench.machine import InUse, disk_used_bytes, forget_big_files, use_memory
from statefork.bench.programs import fetch_programs
from statefork.bench.raw import RawTree, SameTree
from statefork.bench.subjects import Subject
from statefork.bench.workloads import Workload
from statefork.environment import Environment
from statefork.errors import WaypointError

__all__ = ["run_rounds", "timed_ms"]

RAW, SAME, WRITE = "criu (command line)", "criu, the same tree", "a plain copy of as much"
_LEAST_READY_MIB = 512
_LEAST_ROUNDS = 2
_SHARE_SECONDS = 6.0
"""Of each backend in a workload: one that has had this and its least rounds has had enough, or the slowest would take all the time."""
_FORGOTTEN_SECONDS = 20.0
"""See programs.py."""


Ready = Callable[[], None]


def timed_ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


@dataclass(slots=True)
class _Runner:
    name: str
    work: Callable[[int, Ready], None]
    """One round."""
    ready: Ready
    """To be called before each clock."""
    seconds: float = 0.0
    ended: float = float("-inf")
    """When its last round did."""


def run_rounds(
    workload: Workload,
    subjects: Sequence[Subject],
    samples: Samples,
    *,
    rounds: int,
    disk: Path,
    raw: Path | None,
    rootfs: Path | None,
    allow: Allowance,
    on_progress: Callable[[str], None],
) -> None:
    """`raw`: where the plain `criu` command line may keep its images, where the workload has an equal for it; with `rootfs` it is
    also tried on a session's own tree.

    When its share of the time has passed twice, no round is begun but the first, and no other backend but ours is prepared.
    """
    allow.begin_part(workload.shares)
    share = allow.left()  # with what it takes to prepare: a machine that emulates another needs minutes for 2 GiB
    with ExitStack() as stack:
        runners: list[_Runner] = []

        def add(name: str, work: Callable[[int, Ready], None]) -> None:
            runners.append(_Runner(name, work, partial(_ready, workload, samples, InUse())))

        for subject in subjects:
            if not workload.needs <= subject.claims:
                continue
            if allow.left() < -share and subject.name != "waypoint":
                samples.leave_out(workload.name, subject.name)
                continue
            on_progress(f"{workload.name}: preparing {subject.name}")
            try:
                env = subject.make(workload.memory_mib)
                stack.callback(env.destroy)
                workload.prepare(env)
                add(subject.name, partial(_one, workload, subject, env, samples, disk))
            except WaypointError as error:
                samples.fail(workload.name, subject.name, error.message)
        if raw is not None:
            tree = stack.enter_context(RawTree(raw, workload.memory_mib))
            add(RAW, partial(_plain, workload, tree, samples))
            if rootfs is not None and not workload.memory_mib:
                try:
                    same = stack.enter_context(SameTree(raw, rootfs, workload.setup))
                    add(SAME, partial(_same, workload, same, samples))
                except WaypointError as error:
                    samples.fail(workload.name, SAME, error.message)
        for i in range(1, (min(workload.rounds, rounds) if workload.rounds else rounds) + 1):
            if i > 1 and allow.left() < -share:
                break
            on_progress(f"{workload.name}: round {i}")
            first = i % len(runners) if runners else 0
            for runner in [*runners[first:], *runners[:first]]:  # another one comes first in each round
                if i > _LEAST_ROUNDS and runner.seconds > _SHARE_SECONDS:
                    continue
                os.sync()  # or it would pay for what the one before it has written
                if workload.memory_mib:  # the images of earlier rounds, which nobody reads any more
                    forget_big_files(disk)
                if time.monotonic() - runner.ended > _FORGOTTEN_SECONDS:
                    fetch_programs()
                began = time.monotonic()
                try:
                    runner.work(i, runner.ready)
                except WaypointError as error:
                    samples.fail(workload.name, runner.name, error.message)
                    runners.remove(runner)
                runner.ended = time.monotonic()
                runner.seconds += runner.ended - began


def _ready(workload: Workload, samples: Samples, in_use: InUse) -> None:
    """`in_use` is touched for one backend only: it is as long unused as what that backend has in memory."""
    samples.note_taken(workload.name, in_use.was_taken())
    if workload.memory_mib:  # more than its process holds: not all of what was just freed is what is given out next
        use_memory(max(workload.memory_mib * 3 // 2, _LEAST_READY_MIB))


def _plain(workload: Workload, tree: RawTree, samples: Samples, _: int, ready: Ready) -> None:
    for what, work in (("snapshot", tree.dump), ("restore", tree.restore)):
        ready()
        samples.add(workload.name, RAW, what, work())
    if workload.memory_mib:
        copy = tree.copier()
        os.sync()
        ready()
        samples.add(workload.name, WRITE, "snapshot", timed_ms(copy))


def _same(workload: Workload, tree: SameTree, samples: Samples, _: int, ready: Ready) -> None:
    for what, work in (("snapshot", tree.dump), ("restore", tree.restore)):
        ready()
        samples.add(workload.name, SAME, what, work())


def _one(
    workload: Workload, subject: Subject, env: Environment, samples: Samples, disk: Path, i: int, ready: Ready
) -> None:
    def add(what: str, value: float, unit: str = "ms") -> None:
        samples.add(workload.name, subject.name, what, value, unit)

    workload.next_round(env, i)
    if workload.dirty == "1%":  # since the last snapshot, not since the restore before it
        env.snapshot()
        os.sync()  # or it would pay for the whole of it
        workload.next_round(env, i)
    before = disk_used_bytes(disk)
    taken: list[str] = []
    ready()
    add("snapshot", timed_ms(lambda: taken.append(env.snapshot())))
    add("paused", next(one.paused_ms for one in env.snapshots() if one.id == taken[0]))
    add("storage", (disk_used_bytes(disk) - before) / 2**20, "MiB")
    workload.check(env, i, subject.claims)
    workload.spoil(env)

    def restore() -> None:
        env.restore(taken[0])
        workload.check(env, i, subject.claims)

    ready()
    add("restore", timed_ms(restore))
    ready()
    forks: list[Environment] = []

    def fork() -> None:
        forks.extend(env.fork(1, from_snapshot=taken[0]))
        workload.check(forks[0], i, subject.claims)

    try:
        add("fork", timed_ms(fork))
    finally:
        for one in forks:
            one.destroy()
