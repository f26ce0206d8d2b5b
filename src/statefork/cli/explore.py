"""`statefork explore`: run a search that a file or the command line describes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from statefork.cli.main import home, note
from statefork.cli.winners import Wishes, wishes_options
from statefork.errors import Exists, UsageError

__all__ = ["explore"]


def _backends(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from statefork.registry import backends

    return [
        CompletionItem(name, help=found.summary) for name, found in backends().items() if name.startswith(incomplete)
    ]


@click.command()
@click.argument(
    "plan", required=False, type=click.Path(dir_okay=False, exists=True, path_type=Path), metavar="[PLAN.toml]"
)
@click.option(
    "--backend",
    "-b",
    shell_complete=_backends,
    help="Where: a name that `statefork backends` lists.  [default: waypoint]",
)
@click.option("--attach", is_flag=True, help="Begin with something that exists, instead of making it.")
@click.option(
    "--argument",
    "-a",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Of the backend's method (docs/backends.md).",
)
@click.option("--setup", multiple=True, metavar="COMMAND", help="Leads to the state that the search begins with.")
@click.option("--search", "algorithm", type=click.Choice(["mcts", "beam", "best_of_n"]), help="[default: mcts]")
@click.option(
    "--set",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Of the search: workers, depth, seed, width, branching ...",
)
@click.option("--script", "-s", "scripts", multiple=True, metavar="COMMAND", help="Something to try.")
@click.option(
    "--weight", "weights", multiple=True, metavar="WEIGHT=COMMAND", help="Something to try, the more often the heavier."
)
@click.option("--task", help="What a model is to do; where it is: --base-url and --model.")
@click.option("--repeat", is_flag=True, help="A script may be taken more than once on a path.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Of each step.")
@click.option("--exit-code", metavar="COMMAND", help="The score is 1 if this command succeeds, else 0.")
@click.option("--number", metavar="COMMAND", help="The score is the last number that it prints.")
@click.option("--tests", metavar="COMMAND", help="The score is the share of tests that pass, by pytest's summary.")
@click.option("--scale", type=float, help="With --number: multiply it; 1 is solved.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="The search ends then.")
@click.option("--nodes", type=click.IntRange(min=1), help="It ends after so many.")
@click.option("--forks", type=click.IntRange(min=1), help="It ends when states were brought up so often.")
@click.option("--storage", metavar="SIZE", help="What its snapshots may hold, such as 2G; the least promising go.")
@click.option("--memory", metavar="SIZE", help="The same, of memory alone.")
@click.option(
    "--base-url",
    envvar="STATEFORK_CHAT_URL",
    show_envvar=True,
    help="Of a chat endpoint, such as http://localhost:8000/v1",
)
@click.option("--model", envvar="STATEFORK_CHAT_MODEL", show_envvar=True)
@click.option(
    "--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write down what happens (docs/explore.md)."
)
@click.option("--resume", is_flag=True, help="Go on with the run of --trace that was interrupted.")
@click.option("--promote", is_flag=True, help="With --attach: what was attached to goes on as the winner.")
@wishes_options
@click.option("--quiet", "-q", is_flag=True, help="Show no progress.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def explore(
    plan: Path | None,
    trace: Path | None,
    resume: bool,
    promote: bool,
    base_url: str | None,
    model: str | None,
    quiet: bool,
    as_json: bool,
    path: str | None,
    apply: Path | None,
    force: bool,
    patch: Path | None,
    oci: Path | None,
    name: str,
    keep: str | None,
    **given: Any,
) -> None:
    """Search over live state: try steps side by side from the same state, judge each outcome, keep the best.

    \b
    statefork explore -a rootfs=/srv/root --setup 'cd /app' -s 'git apply a.patch' -s 'git apply b.patch' \\
        --search best_of_n --tests 'cd /app && python3 -m pytest -q' --path /app --patch winner.patch
    statefork explore plan.toml --trace run.jsonl        # see docs/explore.md for the file

    What is given here comes before what the file says. The key of a chat endpoint is $STATEFORK_CHAT_KEY. Ends in 0 if it is
    solved (a score of 1 or more), else in 1. An interrupted search goes on with --resume.
    """
    from statefork.cli.progress import watch_for
    from statefork.explore.plan import Plan, read_plan
    from statefork.explore.promoting import promote as promote_winner

    wishes = Wishes(path, apply, force, patch, oci, name, keep).checked()
    if resume and trace is None:
        raise UsageError("--resume needs --trace: which run?")
    given["chat"] = {"base_url": base_url, "model": model}
    chosen = _merged(read_plan(plan) if plan else Plan(), given).checked()
    if promote and not chosen.attach:
        raise UsageError(
            "--promote is for --attach: what this command makes is gone when it ends; see --keep, --apply, --patch, --oci"
        )
    if trace is not None and trace.exists() and not resume:
        raise Exists(f"{trace} is the trace of another run; --resume goes on with that, or choose another name")
    chat = _chat(chosen) if chosen.task else None
    try:
        with chosen.environment(home()) as environment:
            outcome = chosen.search(environment, trace=trace, resume=resume, watch=watch_for(quiet), chat=chat)
            with outcome.environment as winner:
                steps = [action.command for action in outcome.actions]
                done = wishes.fulfil(winner, outcome.began, steps) if outcome.best.parent is not None else {}
                if promote and outcome.best.parent is not None:
                    promote_winner(outcome, environment)
                    done["promoted"] = environment.description
    except KeyboardInterrupt:
        note("interrupted" + (f"; --resume --trace {trace} goes on with it" if trace else ""))
        raise
    document = {
        "solved": outcome.solved,
        "score": outcome.best.score,
        "node": outcome.best.id,
        "nodes": outcome.nodes,
        "seconds": round(outcome.seconds, 3),
        "steps": steps,
        "output": outcome.best.output,
        "trace": str(trace) if trace else None,
        "done": done,
    }
    click.echo(json.dumps(document) if as_json else _told(document, bool(wishes) and not done))
    if not outcome.solved:
        raise SystemExit(1)


def _told(document: dict[str, Any], nothing: bool) -> str:
    word = "solved" if document["solved"] else "not solved"
    lines = [
        f"{word}: score {document['score']:g} at node {document['node']}, {document['nodes']} nodes in {document['seconds']:.1f} s"
    ]
    lines += [f"  {number}. {step}" for number, step in enumerate(document["steps"], 1)]
    lines += [f"{what}: {where}" for what, where in document["done"].items()]
    if nothing:
        lines.append("nothing is better than the state that it began with: nothing was written")
    return "\n".join(lines)


def _merged(plan: Any, given: dict[str, Any]) -> Any:
    """What the command line says, over what the file says."""
    fresh: dict[str, Any] = {
        name: given[name] for name in ("backend", "algorithm", "task", "timeout", "scale") if given[name] is not None
    }
    fresh |= {name: True for name in ("attach", "repeat") if given[name]}
    fresh |= {name: list(given[name]) for name in ("setup", "scripts") if given[name]}
    if given["arguments"]:
        fresh["arguments"] = {**plan.arguments, **dict(_pair(one) for one in given["arguments"])}
    if given["options"]:
        fresh["options"] = {
            **plan.options,
            **{name: _number(name, value) for name, value in map(_pair, given["options"])},
        }
    if given["weights"]:
        fresh["weights"] = {command: _number(command, weight) for weight, command in map(_pair, given["weights"])}
    ways = {name: fresh[name] for name in ("scripts", "weights", "task") if name in fresh}
    if ways:  # another way than the file's takes its place
        fresh |= {"scripts": (), "weights": {}, "task": ""} | ways
    judges = [name for name in ("exit_code", "number", "tests") if given[name] is not None]
    if len(judges) > 1:
        raise UsageError("give one of --exit-code, --number and --tests")
    if judges:
        fresh |= {"scorer": judges[0], "score": given[judges[0]]}
    fresh["chat"] = {**plan.chat, **{name: value for name, value in given["chat"].items() if value}}
    limits = {
        name: given[name] for name in ("seconds", "nodes", "forks", "storage", "memory") if given[name] is not None
    }
    return replace(plan, **fresh, budget={**plan.budget, **limits})


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{text!r}: write it as NAME=VALUE")
    return name, value


def _number(what: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{what}: {text!r} is not a number") from None
    return int(value) if value.is_integer() else value


def _chat(plan: Any) -> Any:
    from statefork.explore.chat_endpoint import ChatSettings

    if not plan.chat.get("base_url") or not plan.chat.get("model"):
        raise UsageError(
            "a task needs a model: give --base-url and --model, or $STATEFORK_CHAT_URL and $STATEFORK_CHAT_MODEL"
        )
    return ChatSettings(**plan.chat, key=os.environ.get("STATEFORK_CHAT_KEY"))
