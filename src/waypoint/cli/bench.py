"""`waypoint bench`: the engine's own speed on this machine, now."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from waypoint.cli import output
from waypoint.cli.options import json_option

__all__ = ["bench"]


@click.command()
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(min=1), help="How often each verb is timed.")
@click.option("--rootfs", type=click.Path(exists=True, path_type=Path), help="Over this root; default: the host's own.")
@click.option("--cold", is_flag=True, help="Start every CRIU worker when it is needed, as one-shot commands do.")
@json_option
def bench(rounds: int, rootfs: Path | None, cold: bool, as_json: bool) -> None:
    """Time exec, snapshot, restore and fork; each clock stops at the first correct command."""
    from waypoint.bases import base_from_rootfs
    from waypoint.bench import measure
    from waypoint.engine import Engine

    with Engine(Path(output.home()), ahead=not cold) as engine:
        base = None if rootfs is None else base_from_rootfs(engine.store, rootfs)
        found = measure(engine, base, rounds, output.show_progress)
        found["cold"] = cold
        found["figures"].append(_whole_process(engine, rounds))
    output.show_progress("")
    if as_json:
        output.print_json(found)
        return
    print(f"{'':44}{'p50':>9}{'p95':>9}{'least':>9}   ms")
    for figure in found["figures"]:
        print(f"{figure['what']:44}{figure['p50_ms']:9.2f}{figure['p95_ms']:9.2f}{figure['least_ms']:9.2f}")
    print(
        f"{found['rounds']} rounds {'cold' if cold else 'with workers ahead'} over {found['base']}, {found['cores']} cores, "
        f"load {found['load_before']} before, {found['load_after']} after"
    )


def _whole_process(engine: Any, rounds: int) -> dict[str, Any]:
    """`waypoint exec` as a person or script starts it."""
    from waypoint.kernel.programs import run_program

    session = engine.new()
    samples = []
    try:
        session.exec("true")
        for _ in range(rounds):
            began = time.perf_counter()
            run_program([sys.executable, "-m", "waypoint.cli.main", "exec", session.id, "true"], timeout=60).check("exec")
            samples.append((time.perf_counter() - began) * 1000)
    finally:
        session.remove()
    ordered = sorted(samples)
    return {
        "what": "`waypoint exec S true` as a process",
        "n": rounds,
        "p50_ms": round(ordered[len(ordered) // 2], 2),
        "p95_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))], 2),
        "least_ms": round(ordered[0], 2),
    }
