"""`statefork fidelity`: prove on this host what a backend brings back, case by case."""

from __future__ import annotations

import json
import secrets
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from statefork.cli.pages import write_between_marks

if TYPE_CHECKING:
    from statefork.environment import Environment
    from statefork.testing.fidelity import Backend, Result

__all__ = ["fidelity"]


@click.command()
@click.option("--backend", "-b", default="waypoint", show_default=True, help="A backend, or a method of one.")
@click.option("--case", "-c", "cases", multiple=True, metavar="CASE", help="A case, a kind, or a pattern of either.")
@click.option("--option", "-o", "options", multiple=True, metavar="NAME=VALUE", help="An argument of the backend's.")
@click.option("--jobs", "-j", default=1, show_default=True, type=click.IntRange(1, 64), help="Cases at a time.")
@click.option("--patience", default=1.0, type=click.FloatRange(1, 100), help="How many times longer all may take.")
@click.option("--all", "judge_all", is_flag=True, help="Judge also single cases that the backend is known to lose.")
@click.option("--list", "only_list", is_flag=True, help="Name the cases and run none.")
@click.option("--page", type=click.Path(path_type=Path), help="Write the table of docs/fidelity.md from JSON documents.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.argument("documents", nargs=-1, type=click.Path(exists=True, path_type=Path))
def fidelity(
    backend: str,
    cases: tuple[str, ...],
    options: tuple[str, ...],
    jobs: int,
    patience: float,
    judge_all: bool,
    only_list: bool,
    page: Path | None,
    as_json: bool,
    documents: tuple[Path, ...],
) -> None:
    """Run every case three ways: restore in place, fork two, fork of a fork. Exit code 1 if a case fails.

    A backend is judged only by what it claims; a case whose program is not installed is skipped and says so.
    """
    from statefork.testing.fidelity import Verdict, report, run_cases, select

    if page is not None:
        write_between_marks(page, "table", report.as_page([json.loads(document.read_text()) for document in documents]))
        return
    chosen = select(cases)
    if only_list:
        for case in chosen:
            click.echo(f"{case.kind}/{case.name:<34}{case.summary}")
        return

    def show(result: Result) -> None:
        click.echo(report.line(result), err=as_json)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that no environment is left behind
    with tempfile.TemporaryDirectory(prefix="fidelity-", dir="/var/tmp") as home:
        judged = replace(_backend(backend, options, Path(home), judge_all), patience=patience)
        try:
            results = run_cases(judged, chosen, jobs=jobs, on_result=show)
        finally:
            judged.close()
    for result in results:
        if result.verdict in (Verdict.FAILED, Verdict.SKIPPED):
            click.echo(f"{result.kind}/{result.case}: {result.message}", err=True)
    if as_json:
        click.echo(json.dumps(report.as_document(backend, results)))
    else:
        click.echo(report.summary(results))
    if any(result.verdict is Verdict.FAILED for result in results):
        raise SystemExit(1)


def _backend(name: str, options: tuple[str, ...], home: Path, judge_all: bool) -> Backend:
    from statefork.backends.option_values import flag
    from statefork.errors import UsageError
    from statefork.factory import create_env_manager
    from statefork.registry import backends
    from statefork.testing.fidelity import Backend, environment_backend
    from statefork.testing.fidelity.known import CLAIMED, NOT_CLAIMED
    from statefork.testing.fidelity.waypoint import CAPABILITIES, engine_with, opener_of

    given: dict[str, str] = {}
    for option in options:
        key, separator, value = option.partition("=")
        if not separator:
            raise UsageError(f"--option {option!r}: say NAME=VALUE")
        given[key] = value
    if name == "waypoint" and given.keys() <= {"twins", "drafts", "deltas"}:  # the engine itself: it can do more than an environment
        engine = engine_with(
            home,
            twins=int(given.get("twins", 0)),
            drafts=flag(given.get("drafts", False)),
            deltas=int(given["deltas"]) if "deltas" in given else None,
        )
        return Backend(name, opener_of(engine), CAPABILITIES, close=engine.close)
    found = backends().get(name)
    method = found.methods[0].name if found else name
    known = {} if judge_all else NOT_CLAIMED.get(name, {})

    def make() -> Environment:
        return create_env_manager(method, home=home, **_named(method, given))

    return environment_backend(name, make, known, CLAIMED.get(name, ()))


def _named(method: str, given: dict[str, str]) -> dict[str, str]:
    """A container name that is asked for must be another one for each environment."""
    if method.startswith("hybrid_build"):
        return {**given, "container_name": f"{given.get('container_name', 'fidelity')}-{secrets.token_hex(4)}"}
    return given

