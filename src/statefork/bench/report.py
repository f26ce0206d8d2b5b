"""The results as a table for a person, as CSV and JSON for programs, and as the part of a page that is generated."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from statefork.bench.figures import Figure
from statefork.bench.subjects import BACKENDS

__all__ = ["as_markdown", "as_summary", "as_text", "write_results"]

_MAIN = ("snapshot", "paused", "restore", "fork", "storage")


def write_results(directory: Path, document: dict[str, Any], figures: Sequence[Figure]) -> list[Path]:
    """results.json, results.csv and results.md; returns the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"results.{ending}" for ending in ("json", "csv", "md")]
    paths[0].write_text(json.dumps(document, indent=1) + "\n")
    with paths[1].open("w", newline="") as out:
        rows = [figure.to_json() for figure in figures]
        writer = csv.DictWriter(out, list(rows[0]) if rows else ["workload"])
        writer.writeheader()
        writer.writerows(rows)
    paths[2].write_text(as_markdown(document, figures))
    return paths


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    if figure.unit == "MiB":
        return f"{figure.p50:.2f}"
    return f"{figure.p50:.1f} ({figure.p95:.1f})" if figure.n > 1 else f"{figure.p50:.1f}"


def _in_order(figures: Sequence[Figure]) -> list[str]:
    """The backends as they are listed everywhere, then what they are compared with: each round begins with another one."""
    found = dict.fromkeys(figure.backend for figure in figures)
    return sorted(found, key=lambda name: BACKENDS.index(kind) if (kind := name.partition(",")[0]) in BACKENDS else len(BACKENDS))


def _tables(figures: Sequence[Figure]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, columns, rows): one table for each workload, a row for each backend, a column for each thing measured."""
    found = []
    for workload in dict.fromkeys(figure.workload for figure in figures):
        mine = [figure for figure in figures if figure.workload == workload]
        whats = dict.fromkeys(figure.what for figure in mine)
        columns = sorted(whats, key=lambda what: _MAIN.index(what) if what in _MAIN else len(_MAIN))
        units = {figure.what: figure.unit for figure in mine}
        rows = []
        for backend in _in_order(mine):
            by_what = {figure.what: figure for figure in mine if figure.backend == backend}
            rows.append([backend, *(_cell(by_what.get(what)) for what in columns)])
        found.append((workload, ["", *(f"{what}, {units[what]}" for what in columns)], rows))
    return found


def as_text(document: dict[str, Any], figures: Sequence[Figure]) -> str:
    lines = []
    for title, columns, rows in _tables(figures):
        widths = [max(len(row[at]) for row in [columns, *rows]) for at in range(len(columns))]
        lines.append(f"\n{title}")
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [columns, *rows]
        ]
    return "\n".join([*lines, "", *_words(document)])


def as_markdown(document: dict[str, Any], figures: Sequence[Figure]) -> str:
    lines = []
    for title, columns, rows in _tables(figures):
        lines += [f"**{title}**", "", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        lines.append("")
    return "\n".join([*lines, *(f"{line}  " for line in _words(document))]) + "\n"


def as_summary(document: dict[str, Any], figures: Sequence[Figure]) -> str:
    """A shell with a background job on every backend, in how many times Waypoint's own figure; for the front page."""
    found = {(figure.workload, figure.backend, figure.what): figure for figure in figures}
    work, verbs = "shell and job", ("snapshot", "restore", "fork")
    ours = {verb: found[work, "waypoint", verb].p50 for verb in verbs if (work, "waypoint", verb) in found}
    lines = ["| a shell with a background job | snapshot, ms | restore, ms | fork, ms |", "| --- | --- | --- | --- |"]
    for backend in _in_order([figure for figure in figures if figure.workload == work]):
        cells = [_beside(found.get((work, backend, verb)), ours.get(verb), backend) for verb in verbs]
        lines.append(f"| {backend} | {' | '.join(cells)} |")
    for figure in figures:
        if figure.backend == "waypoint, ahead" and figure.workload.startswith("agent loop, 0.2") and figure.what == "snapshot":
            back = found[figure.workload, figure.backend, "restore"]
            lines.append(f"| waypoint, while an agent thinks | {_cell(figure)} | {_cell(back)} | |")
    return "\n".join([*lines, "", *(f"{line}  " for line in _words(document)[:2])]) + "\n"


def _beside(figure: Figure | None, ours: float | None, backend: str) -> str:
    if figure is None or not ours or backend == "waypoint":
        return _cell(figure)
    return f"{_cell(figure)}, {figure.p50 / ours:.1f}x"


def _words(document: dict[str, Any]) -> list[str]:
    machine, watch = document["machine"], document["watch"]
    lines = [
        "p50 (p95); restore and fork until the first correct command",
        f"{machine['cores']} cores, {machine['processor']}, kernel {machine['kernel']}; load {watch['load_before']} before, "
        f"{watch['load_mean']} on average, {watch['load_most']} at most; {watch['seconds']:.0f} s in all",
    ]
    if document.get("interrupted"):
        lines.append("interrupted: not everything was measured")
    if "first_use_us" in machine:
        lines.append(
            f"a page of free memory took {machine['first_use_us']} µs when it was used first, {machine['second_use_us']} µs when it had "
            "just been: before each clock as much as the workload's process holds has been in use"
        )
    taken = [f"{what} {some} of {all_}" for what, (some, all_) in document.get("taken", {}).items() if some]
    if taken:
        lines.append(f"clocks before which the host had taken away memory that was in use: {', '.join(taken)}")
    lines += [f"left out for want of time: {what}: {', '.join(names)}" for what, names in document.get("left_out", {}).items()]
    lines += [f"missing: {name}: {why}" for name, why in document["missing"].items()]
    lines += [f"failed: {one['backend']} on {one['workload']}: {one['why']}" for one in document["failures"]]
    return lines
