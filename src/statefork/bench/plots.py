"""The figures as pictures: one bar chart for each workload, cost against size where a workload has one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from statefork.bench.figures import Figure
from statefork.errors import HostUnsupported

__all__ = ["draw"]

_VERBS = ("snapshot", "restore", "fork", "exec of cat")
_SIZES = {
    "cost against memory": r"(\d+) (MiB|GiB)\Z",
    "cost against files": r"([\d,]+) files\Z",
    "cost against depth": r"depth (\d+)\Z",
    "cost against forks": r"fan-out (\d+)\Z",
}


def draw(directory: Path, figures: Sequence[Figure]) -> list[Path]:
    """PNG and SVG of each plot; HostUnsupported without matplotlib."""
    try:
        from matplotlib.figure import Figure as Picture
    except ImportError as error:
        fix = "pip install 'statefork[bench]'"
        raise HostUnsupported(f"plots need matplotlib; {fix}, or --no-plots", fix=fix) from error
    paths = []
    for workload in dict.fromkeys(figure.workload for figure in figures):
        mine = [figure for figure in figures if figure.workload == workload and figure.unit == "ms"]
        if mine:
            picture = Picture(figsize=(8, 4), layout="constrained")
            _bars(picture, workload, mine)
            paths += _save(picture, directory / _slug(workload))
    for title, pattern in _SIZES.items():
        picture = Picture(figsize=(8, 4), layout="constrained")
        if _lines(picture, title, figures, pattern):
            paths += _save(picture, directory / _slug(title))
    return paths


def _bars(picture: object, title: str, figures: Sequence[Figure]) -> None:
    axes = picture.subplots()  # type: ignore[attr-defined]
    backends = list(dict.fromkeys(figure.backend for figure in figures))
    whats = list(dict.fromkeys(figure.what for figure in figures))
    width = 0.8 / len(whats)
    for at, what in enumerate(whats):
        by_backend = {figure.backend: figure for figure in figures if figure.what == what}
        places = [n + at * width for n, name in enumerate(backends) if name in by_backend]
        values = [by_backend[name].p50 for name in backends if name in by_backend]
        above = [max(by_backend[name].p95 - by_backend[name].p50, 0) for name in backends if name in by_backend]
        axes.bar(places, values, width, yerr=[[0] * len(above), above], label=what, capsize=2)
    axes.set_xticks([n + 0.4 - width / 2 for n in range(len(backends))], backends)
    axes.set_yscale("log")
    axes.set_ylabel("ms (p50, whisker p95)")
    axes.set_title(title)
    axes.legend()


def _lines(picture: object, title: str, figures: Sequence[Figure], pattern: str) -> bool:
    """One line for each backend and verb; False when fewer than two sizes were measured."""
    series: dict[str, list[tuple[float, float]]] = {}
    for figure in figures:
        size = re.match(pattern, figure.workload)
        if size and figure.what in _VERBS:
            scale = 1024 if "GiB" in figure.workload else 1
            series.setdefault(f"{figure.backend} {figure.what}", []).append((int(size[1].replace(",", "")) * scale, figure.p50))
    series = {name: sorted(points) for name, points in series.items() if len(points) > 1}
    if not series:
        return False
    axes = picture.subplots()  # type: ignore[attr-defined]
    for name, points in series.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylabel("ms (p50)")
    axes.set_title(title)
    axes.legend(fontsize="small")
    return True


def _save(picture: object, stem: Path) -> list[Path]:
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    for path in paths:
        picture.savefig(path)  # type: ignore[attr-defined]
    return paths


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
