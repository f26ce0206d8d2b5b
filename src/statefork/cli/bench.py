"""`statefork bench`: the same work on every backend of this host, side by side."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from statefork.cli.pages import write_between_marks

__all__ = ["bench"]

_QUICK_SECONDS, _FULL_SECONDS = 105.0, 26 * 60.0
"""Of two minutes and half an hour: what is under way when they have passed comes to its end."""


@click.command()
@click.option("--quick", is_flag=True, help="Small workloads, few rounds: about two minutes.")
@click.option("--backend", "-b", "names", multiple=True, help="Only these; default: all.")
@click.option("--workload", "-w", "workloads", multiple=True, help="Only these workloads, and no patterns of use.")
@click.option("--rounds", type=click.IntRange(min=1), help="How often each verb is timed.  [default: 8, quick: 3]")
@click.option("--results", type=click.Path(path_type=Path), default=Path("bench-results"), show_default=True)
@click.option(
    "--plots/--no-plots", default=True, show_default=True, help="Draw PNG and SVG pictures (needs matplotlib)."
)
@click.option("--page", type=click.Path(path_type=Path), help="Also write the tables between the marks of this page.")
@click.option("--summary", type=click.Path(path_type=Path), help="Also write a short table between the marks of this page.")
@click.option("--from", "measured", type=click.Path(path_type=Path, exists=True), help="Measure nothing: read a results.json.")
@click.option("--ksm", is_flag=True, help="Turn the host's KSM on while forks with merged memory are measured, and off again.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def bench(
    quick: bool,
    names: tuple[str, ...],
    workloads: tuple[str, ...],
    rounds: int | None,
    results: Path,
    plots: bool,
    page: Path | None,
    summary: Path | None,
    measured: Path | None,
    ksm: bool,
    as_json: bool,
) -> None:
    """Snapshot, restore and fork on every backend present, interleaved and repeated.

    The clock of restore and fork stops at the first correct command in what came up. A backend that is missing is listed as
    missing. Run it on a quiet machine: the load is recorded beside the figures. It takes half an hour at most (`--quick`: two
    minutes): slow backends have fewer rounds. Ctrl-C ends it early: what was measured until then is written, and no pages.
    """
    from statefork.bench import report
    from statefork.bench.figures import Figure

    document = _measure(quick, names, workloads, rounds, ksm) if measured is None else json.loads(measured.read_text())
    figures = [Figure(**one) for one in document["figures"]]
    written = [] if measured else report.write_results(results, document, figures)
    whole = not document.get("interrupted")
    if plots and whole:
        from statefork.bench.plots import draw

        results.mkdir(parents=True, exist_ok=True)
        written += draw(results, figures)
    if page is not None and whole:
        write_between_marks(page, "bench", report.as_markdown(document, figures))
    if summary is not None and whole:
        write_between_marks(summary, "bench summary", report.as_summary(document, figures))
    click.echo(json.dumps(document) if as_json else report.as_text(document, figures))
    if not as_json:
        click.echo(f"written: {', '.join(str(path) for path in written)}")
    if not whole:
        raise SystemExit(130)
    if document["failures"]:
        raise SystemExit(1)


def _measure(
    quick: bool, names: tuple[str, ...], workloads: tuple[str, ...], rounds: int | None, ksm: bool
) -> dict[str, Any]:
    from statefork.bench import machine, patterns
    from statefork.bench import workloads as work
    from statefork.bench.allowance import Allowance
    from statefork.bench.figures import Samples
    from statefork.bench.rounds import run_rounds
    from statefork.bench.subjects import BACKENDS, find_subjects
    from statefork.errors import UsageError
    from statefork.testing.images import debian_archive

    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise UsageError(f"no backend {', '.join(unknown)}; there are: {', '.join(BACKENDS)}")
    chosen = work.by_name(workloads, quick=quick)
    samples, watch, described = Samples(), machine.Watch(), machine.describe()
    missing: dict[str, str] = {}
    interrupted = False
    kinds = () if workloads else patterns.PATTERNS
    parts = sum(one.shares for one in chosen) + (patterns.parts(quick) if kinds else 0)
    allow = Allowance(_QUICK_SECONDS if quick else _FULL_SECONDS, parts)

    def run(home: Path) -> None:
        subjects, absent = find_subjects(home, names or BACKENDS, work.packages_for(chosen), _progress, ksm=ksm)
        missing.update(absent)
        if not ksm and not workloads and not quick and "waypoint" not in missing:
            missing["waypoint, merged"] = "the host's KSM is left alone: `--ksm` turns it on while it is measured"
        rootfs = debian_archive(packages=work.packages_for(chosen)) if "waypoint" in {one.name for one in subjects} else None
        for workload in chosen:
            raw = home if not workload.step.strip(":") else None
            run_rounds(
                workload, subjects, samples,
                rounds=rounds or (3 if quick else 8), disk=home, raw=raw, rootfs=rootfs, allow=allow, on_progress=_progress,
            )  # fmt: skip
        for pattern in kinds:
            pattern(subjects, samples, _progress, allow, quick=quick)

    signal.signal(signal.SIGINT, _interrupted)
    try:
        with tempfile.TemporaryDirectory(prefix="statefork-bench-", dir="/var/tmp") as scratch, watch:
            run(Path(scratch))
    except KeyboardInterrupt:
        interrupted = True
    _progress("")
    return {
        "machine": described,
        "watch": watch.to_json(),
        "missing": missing,
        "interrupted": interrupted,
        "failures": samples.failures,
        "left_out": samples.left_out,
        "taken": samples.taken,
        "figures": [figure.to_json() for figure in samples.figures()],
    }


def _interrupted(number: int, frame: object) -> None:
    """Once is enough: what is up is ended, which takes a moment, and a second one would leave it behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _progress("interrupted: ending what is up")
    raise KeyboardInterrupt


def _progress(text: str) -> None:
    """One line that changes in place on a terminal; on anything else a line each."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)
    elif text:
        click.echo(text, err=True)

