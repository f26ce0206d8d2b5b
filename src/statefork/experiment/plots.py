"""The picture: the share of tasks that is solved against wall time, one line for each way of playing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from statefork.errors import HostUnsupported
from statefork.experiment.curves import Curve

__all__ = ["draw"]

_COLOURS = {"scratch": "#555555", "waypoint": "#1b7837", "docker": "#2166ac", "hybrid": "#b2182b", "podman": "#762a83"}


def draw(directory: Path, found: Sequence[Curve]) -> list[Path]:
    """solved.png and solved.svg; HostUnsupported without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        fix = "pip install 'statefork[bench]'"
        raise HostUnsupported(f"plots need matplotlib; {fix}, or --no-plots", fix=fix) from error
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    end = max((trial.seconds for curve in found for trial in curve.trials), default=1.0)
    for curve in found:
        colour = _COLOURS.get(curve.backend if curve.way == "mcts" else "scratch")
        played = max(trial.seconds for trial in curve.trials)  # beyond it nothing is known
        times = [0.0, *curve.solving_seconds, played]
        axes.step(
            times, [curve.share_at(at) for at in times], where="post", label=curve.name, color=colour, linewidth=2
        )
        if len(curve.seeds) > 1:
            low = [min(curve.share_at(at, seed) for seed in curve.seeds) for at in times]
            high = [max(curve.share_at(at, seed) for seed in curve.seeds) for at in times]
            axes.fill_between(times, low, high, step="post", alpha=0.12, color=colour, linewidth=0)
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("seconds of wall time for a task, thinking time included")
    axes.set_ylabel("share of tasks solved")
    ticks = [tick for tick in (0, 1, 2, 5, 10, 20, 50, 100, 200, 500) if tick <= end]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right" if len(found) < 3 else "upper left")
    paths = [directory / "solved.png", directory / "solved.svg"]
    for path in paths:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths
