"""`statefork experiment`: does branching pay? Terminal tasks, an agent that errs, from scratch and with a tree search."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from statefork.cli.pages import write_between_marks

if TYPE_CHECKING:
    from statefork.experiment.arenas import Arena
    from statefork.experiment.players import Player
    from statefork.experiment.trials import Trial

__all__ = ["experiment"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_SHIPPED = Path(__file__).parents[3] / "experiments/tasks"
_RESULTS = Path("experiment-results")

_tasks = click.option(
    "--tasks",
    type=click.Path(path_type=Path, file_okay=False),
    default=_SHIPPED,
    show_default="those of the repository",
    help="The directory that holds the tasks.",
)
_some = click.option("--task", "-t", "names", multiple=True, help="Only these tasks.")
_results = click.option(
    "--results", type=click.Path(path_type=Path), default=_RESULTS, show_default=True, help="Where results are kept."
)
_page = click.option(
    "--page", type=click.Path(path_type=Path), help="Also write the findings between the marks of this page."
)
_plots = click.option(
    "--plots/--no-plots", default=True, show_default=True, help="Draw PNG and SVG (needs matplotlib)."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


def _backends(default: tuple[str, ...]) -> Callable[[_Command], _Command]:
    return click.option(
        "--backend", "-b", "backends", multiple=True, default=default, show_default=True, help="Where to play."
    )


@click.group()
def experiment() -> None:
    """Compare Pass@K from scratch with the same tree search on several backends.

    The tasks are Harbor's format; an agent with documented error rates plays them, or a model. See docs/experiment.md.
    """


@experiment.command("list")
@_tasks
@_json
def list_tasks(tasks: Path, as_json: bool) -> None:
    """The tasks, with the number of steps and the chance that a step goes wrong."""
    from statefork.experiment.tasks import load_tasks

    found = load_tasks(tasks)
    if as_json:
        facts = [{"name": t.name, "description": t.description, "steps": len(t.steps)} for t in found]
        click.echo(json.dumps(facts))
        return
    for task in found:
        rates = sorted({step.error_rate for step in task.steps})
        click.echo(
            f"{task.name:<20} {len(task.steps)} steps  {'-'.join(f'{rate:g}' for rate in rates):<5} {task.description}"
        )


@experiment.command()
@_tasks
@_some
@_backends(("waypoint",))
def setup(tasks: Path, names: tuple[str, ...], backends: tuple[str, ...]) -> None:
    """Make the tasks' base image and build the tasks, ahead of a run; what is there is left as it is."""
    from statefork.experiment.tasks import load_tasks

    chosen = load_tasks(tasks, names)
    for arena in _arenas(backends):
        for task in chosen:
            _progress(f"{arena.backend}: {task.name}")
            arena.prepare(task)
        _progress("")
        click.echo(f"{arena.backend:<10} {len(chosen)} tasks ready")


@experiment.command()
@_tasks
@_some
@_backends(("waypoint",))
@_json
def check(tasks: Path, names: tuple[str, ...], backends: tuple[str, ...], as_json: bool) -> None:
    """Run each task's solution and then its tests. Ends in 1 if any fails."""
    from statefork.experiment.judging import TaskScorer
    from statefork.experiment.tasks import load_tasks

    verdicts: list[dict[str, Any]] = []
    chosen = load_tasks(tasks, names)
    for arena in _arenas(backends):
        for task in chosen:
            with arena.fresh(task) as environment:
                before = TaskScorer(task).judge(environment)
                environment.exec_command(f"bash -c {_quoted(task.solution)}", timeout=120)
                after = TaskScorer(task).judge(environment)
            good = after.solved and not before.solved
            verdicts.append({"backend": arena.backend, "task": task.name, "solved": good, "said": after.said})
            if not as_json:
                click.echo(f"{arena.backend:<10} {task.name:<20} {'ok' if good else 'FAILED'}")
                if not good:
                    click.echo(after.said, err=True)
    if as_json:
        click.echo(json.dumps(verdicts))
    if not all(verdict["solved"] for verdict in verdicts):
        raise SystemExit(1)


@experiment.command()
@_tasks
@_some
@_backends(("waypoint", "docker", "hybrid"))
@click.option("--scratch", default="waypoint", show_default=True, help="Where the attempts from scratch are played.")
@click.option("--way", "ways", multiple=True, type=click.Choice(["scratch", "mcts", "straight"]), help="Only these.")
@click.option("--seed", "seeds", multiple=True, type=int, default=(0, 1, 2), show_default=True)
@click.option("--think", type=click.FloatRange(min=0), default=0.5, show_default=True, help="Seconds for each action.")
@click.option(
    "--error-scale", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Times the tasks' rates."
)
@click.option("--attempts", type=click.IntRange(min=1), default=20, show_default=True, help="K of Pass@K.")
@click.option("--seconds", type=click.FloatRange(min=1), default=60.0, show_default=True, help="For one search.")
@click.option("--exploration", type=click.FloatRange(min=0), default=1.4, show_default=True, help="Of the search.")
@click.option("--widening", type=click.FloatRange(min=0), default=1.5, show_default=True, help="Of the search.")
@click.option("--to-the-end", is_flag=True, help="The search takes whole attempts from the state that it chooses.")
@click.option("--lanes", type=click.IntRange(min=1), default=1, show_default=True, help="Trials at a time.")
@click.option("--base-url", help="Let a model play: an OpenAI-compatible endpoint; its key is $STATEFORK_CHAT_KEY.")
@click.option("--model", help="The model's name at that endpoint.")
@_results
@_plots
@_page
@_json
def run(
    tasks: Path,
    names: tuple[str, ...],
    backends: tuple[str, ...],
    scratch: str,
    ways: tuple[str, ...],
    seeds: tuple[int, ...],
    think: float,
    error_scale: float,
    attempts: int,
    seconds: float,
    exploration: float,
    widening: float,
    to_the_end: bool,
    lanes: int,
    base_url: str | None,
    model: str | None,
    results: Path,
    plots: bool,
    page: Path | None,
    as_json: bool,
) -> None:
    """Play all tasks in all ways, and report. What is in the results already is not played again.

    A backend that does not work here is named and left out.
    """
    from statefork.experiment.results import Recorder
    from statefork.experiment.running import plan, run_experiment
    from statefork.experiment.tasks import load_tasks
    from statefork.experiment.trials import WAYS, Settings

    chosen = load_tasks(tasks, names)
    player, player_name = _player(think, error_scale, base_url, model)
    settings = Settings(think, attempts, seconds, player_name, error_scale, exploration, widening, lanes, to_the_end)
    wanted = [way for way in WAYS if not ways or way in ways]
    needed = dict.fromkeys(
        [*(backends if set(wanted) - {"scratch"} else ()), *([scratch] if "scratch" in wanted else ())]
    )
    arenas = {arena.backend: arena for arena in _arenas(tuple(needed))}
    searched = [arenas[name] for name in backends if name in arenas]
    with Recorder(results, settings) as recorder:
        plans = plan(chosen, searched, wanted, seeds, arenas.get(scratch))
        for _, arena, task, _ in plans:
            _progress(f"building {task.name} for {arena.backend}")
            arena.prepare(task)
        run_experiment(plans, player, settings, recorder, _tell)
    _progress("")
    _report((results,), plots, page, as_json)


@experiment.command()
@click.argument("results", nargs=-1, type=click.Path(path_type=Path))
@_plots
@_page
@_json
def report(results: tuple[Path, ...], plots: bool, page: Path | None, as_json: bool) -> None:
    """The findings of one or more directories of RESULTS: tables, pictures, and a page's part."""
    _report(results or (_RESULTS,), plots, page, as_json)


def _report(directories: tuple[Path, ...], plots: bool, page: Path | None, as_json: bool) -> None:
    from statefork.experiment import report
    from statefork.experiment.curves import curves
    from statefork.experiment.results import read_results

    parts: list[str] = []
    documents: list[dict[str, Any]] = []
    for directory in directories:
        known = read_results(directory)
        found = curves(known.trials)
        written: list[Path] = []
        if plots:
            from statefork.experiment.plots import draw

            written = draw(directory, found)
        if page is not None:
            parts.append(report.as_markdown(known, [os.path.relpath(path, page.parent) for path in written]))
        facts = [{"way": c.way, "backend": c.backend, "trials": len(c.trials), "solved": c.solved} for c in found]
        documents.append({"settings": known.settings.to_json(), "curves": facts})
        if not as_json:
            click.echo(report.as_text(known))
            click.echo("".join(f"written: {path}\n" for path in written), nl=False)
    if page is not None:
        write_between_marks(page, "experiment", "\n".join(parts))
    if as_json:
        click.echo(json.dumps(documents))


def _arenas(names: tuple[str, ...]) -> list[Arena]:
    from statefork.cli.main import home, note
    from statefork.errors import HostUnsupported, UsageError
    from statefork.experiment.arenas import BACKENDS, default_arena_home, find_arenas

    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise UsageError(f"no backend {', '.join(unknown)} for tasks; there are: {', '.join(BACKENDS)}")
    found, missing = find_arenas(home() or default_arena_home(), names)
    for name, why in missing.items():
        note(f"{name} is left out: {why}")
    if not found:
        raise HostUnsupported("none of these backends works here; `statefork doctor` says why")
    return found


def _player(think: float, error_scale: float, base_url: str | None, model: str | None) -> tuple[Player, str]:
    from statefork.errors import UsageError
    from statefork.experiment.players import chat_player, stochastic_player

    if base_url is None and model is None:
        return stochastic_player(think, error_scale), "stochastic"
    if base_url is None or model is None:
        raise UsageError("a model needs both --base-url and --model")
    from statefork.explore import ChatSettings

    return chat_player(ChatSettings(base_url, model, os.environ.get("STATEFORK_CHAT_KEY"))), model


def _tell(trial: Trial, done: int, of: int) -> None:
    outcome = f"solved in {trial.seconds:.1f} s" if trial.solved else f"not solved, {trial.seconds:.1f} s"
    _progress(
        f"[{done}/{of}] {trial.way} on {trial.backend}, {trial.task}, seed {trial.seed}: {outcome}, {trial.tries} tries"
    )


def _progress(text: str) -> None:
    """One line that changes in place on a terminal; on anything else a line each."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)
    elif text:
        click.echo(text, err=True)


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)
