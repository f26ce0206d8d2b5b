"""A small benchmark of the engine: each clock stops at the first correct command, and the machine's load is told beside it.

The comparison with other systems is `statefork bench`; this one is for working on the engine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from waypoint.engine import Engine
from waypoint.errors import WaypointError
from waypoint.model import BaseRecord
from waypoint.session import Session

__all__ = ["Figure", "measure"]


@dataclass(frozen=True, slots=True)
class Figure:
    """Milliseconds over `n` rounds."""

    what: str
    n: int
    p50_ms: float
    p95_ms: float
    least_ms: float


def _figure(what: str, samples: list[float]) -> Figure:
    ordered = sorted(samples)
    p95 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
    return Figure(what, len(ordered), round(statistics.median(ordered), 2), round(p95, 2), round(ordered[0], 2))


def _ask(session: Session, wanted: str) -> None:
    """The first correct command: the shell's own state must answer it."""
    said = session.exec("echo $BENCH-$(cat /bench-file)").stdout.decode().strip()
    if said != wanted:
        raise WaypointError(f"the session answered {said!r}, not {wanted!r}: the restore is wrong, no figure is worth anything")


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def measure(
    engine: Engine, base: BaseRecord | None, rounds: int, on_progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Idle shell plus one background job. Rounds of the verbs are interleaved, so that a busy moment hits all alike."""
    say = on_progress or (lambda _: None)
    before = os.getloadavg()
    session = engine.new(base=base)
    samples: dict[str, list[float]] = {}
    try:
        session.exec("BENCH=kept; echo file > /bench-file; sleep 100000 &")
        for i in range(rounds):
            say(f"round {i + 1} of {rounds}")
            _round(session, samples, i)
    finally:
        tree = session.record.tree
        for record in engine.sessions():
            if record.tree == tree:
                engine.session(record.id).remove()
        engine.drop_snapshots([record.id for record in reversed(engine.snapshots(tree))])
    figures = [_figure(what, values) for what, values in samples.items()]
    return {
        "figures": [asdict(figure) for figure in figures],
        "rounds": rounds,
        "base": base.kind if base is not None else "host",
        "cores": os.cpu_count(),
        "load_before": round(before[0], 2),
        "load_after": round(os.getloadavg()[0], 2),
    }


def _round(session: Session, samples: dict[str, list[float]], i: int) -> None:
    def add(what: str, value: float) -> None:
        samples.setdefault(what, []).append(value)

    wanted = f"kept-{i}"
    session.exec(f"echo {i} > /bench-file")
    add("exec true (library)", _timed(lambda: session.exec("true")))
    taken: list[str] = []
    paused: list[float] = []

    def snapshot() -> None:
        record = session.snapshot()
        taken.append(record.id)
        paused.append(record.paused_ms)
        _ask(session, wanted)

    add("snapshot, until the first correct exec", _timed(snapshot))
    add("snapshot, session paused", paused[0])
    session.exec("BENCH=broken; rm /bench-file")

    def restore(*, verify: bool = False) -> None:
        session.restore(taken[0], verify=verify)
        _ask(session, wanted)

    add("restore, until the first correct exec", _timed(restore))
    session.exec("BENCH=broken; rm /bench-file")
    add("restore --verify, until the first correct exec", _timed(lambda: restore(verify=True)))
    forks: list[Session] = []

    def fork() -> None:
        forks.extend(session.fork(1, from_snapshot=taken[0]))
        _ask(forks[0], wanted)

    add("fork, until the first correct exec", _timed(fork))
    forks[0].remove()
