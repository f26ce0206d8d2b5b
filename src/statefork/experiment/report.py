"""The results as Markdown: what was run, on what machine, what was found."""

from __future__ import annotations

from collections.abc import Sequence

from statefork.experiment.curves import Curve, alike, curves, losses, pass_at, reach
from statefork.experiment.results import Results

__all__ = ["as_markdown", "as_text"]

_KS = (1, 2, 5, 10, 20, 50)


def as_markdown(results: Results, pictures: Sequence[str] = ()) -> str:
    """`pictures`: links to them, from the page."""
    found = curves(results.trials)
    limit = results.settings.seconds
    title = f"### Error rates of the tasks x {results.settings.error_scale:g}, searches of {limit:g} s\n"
    parts = [
        title,
        _about(results, found),
        *_picture(pictures),
        _shares(found, limit),
        _against(found, limit),
        _passes(found),
    ]
    parts += [_losses(results), _costs(found), _by_task(found), _failures(results)]
    return "\n".join(part for part in parts if part)


def as_text(results: Results) -> str:
    """For a terminal: the tables without their pipes' markup is Markdown that reads well enough."""
    found = curves(results.trials)
    limit = results.settings.seconds
    return "\n".join(part for part in (_shares(found, limit), _against(found, limit), _losses(results)) if part)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def _percent(value: float) -> str:
    return f"{value * 100:.0f}%"


def _about(results: Results, found: Sequence[Curve]) -> str:
    settings = results.settings
    lines = []
    for run in results.runs:
        if run["trials"]:
            about = run["machine"]
            host = f"{about['cores']} cores ({about['processor']}), {about['memory_mib'] // 1024} GiB, Linux {about['kernel']}"
            lines.append(f"Run on {run['started_at']}: {host}.")
    for load in results.loads:
        while_it_ran = (
            f"{load['load_mean']} in the mean and {load['load_most']} at most while it ran ({load['seconds']:.0f} s)"
        )
        lines.append(f"Load of the machine: {load['load_before']} before, {while_it_ran}.")
    kind = "whole attempts from the state that it chooses, " if settings.to_the_end else ""
    search = f"{kind}exploration {settings.exploration:g}, widening {settings.widening:g}, one worker"
    lines.append(
        f"Player: {settings.player}, {settings.think_seconds:g} s of thinking for each action; {settings.lanes} trials at a time; "
        f"up to {settings.attempts} attempts from scratch; {settings.seconds:g} s for a search ({search})."
    )
    for curve in found:
        tasks, seeds = len({trial.task for trial in curve.trials}), ", ".join(map(str, curve.seeds))
        lines.append(f"{curve.name}: {tasks} tasks, seeds {seeds}, {len(curve.trials)} trials.")
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _picture(pictures: Sequence[str]) -> list[str]:
    return [f"![share of tasks solved against wall time]({one})\n" for one in pictures if one.endswith(".svg")]


def _shares(found: Sequence[Curve], limit: float) -> str:
    """`limit`: when a search ends."""
    if not found:
        return ""
    ends = sorted({*(end for end in (5, 10, 20, 30, 60, 90) if end < limit), limit})
    head = [
        "",
        *(f"solved in {end:g} s" for end in ends),
        "at the end",
        "median time of the solved",
        "attempts or nodes, mean",
    ]
    rows = [
        [
            curve.name,
            *(_percent(curve.share_at(end)) for end in ends),
            f"**{_percent(curve.solved)}**",
            _seconds(curve.median_seconds),
            f"{curve.mean_tries:.1f}",
        ]
        for curve in found
    ]
    shared = alike(found)
    note = ""
    if shared and any(len(a.trials) != len(b.trials) for a, b in zip(shared, found, strict=False)):
        ends_alike = ", ".join(f"{curve.name} {_percent(curve.solved)}" for curve in shared)
        pairs = f"the {len(shared[0].trials)} pairs of task and seed that all of them have"
        note = f"\nNot all have played the same. On {pairs}: {ends_alike}.\n"
    return _table(head, rows) + note


def _against(found: Sequence[Curve], limit: float) -> str:
    """A search ends at `limit` and Pass@K does not, so what both had solved by then is said, too."""
    known = reach(found)
    if known is None or not known[2]:
        return ""
    share, seconds, answers = known
    begin = f"From scratch {_percent(share)} are solved in the end, the last of them after {seconds:.1f} s."
    lines = [f"{begin} In comparison, on the tasks and seeds that both have played:\n"]
    for one in answers:
        then = f" (Pass@K at that time: {_percent(one.scratch_at(limit))})"
        if one.seconds is None:
            lines.append(
                f"- MCTS on {one.backend} does not come so far in its {limit:g} s: {_percent(one.solved)}{then}."
            )
        else:
            part = f", {_percent(one.fraction)} of the time" if one.fraction is not None else ""
            lines.append(
                f"- MCTS on {one.backend} has solved as many after {one.seconds:.1f} s{part}, and {_percent(one.solved)} in the end."
            )
    return "\n".join(lines) + "\n"


def _passes(found: Sequence[Curve]) -> str:
    scratch = next((curve for curve in found if curve.way == "scratch"), None)
    if scratch is None:
        return ""
    most = max(trial.tries for trial in scratch.trials)
    searches = [(one, alike([scratch, one])) for one in found if one.way == "mcts"]
    searches = [(one, shared) for one, shared in searches if shared]
    rows = []
    for k in (k for k in _KS if k <= most):
        share, seconds = pass_at(scratch, k)
        reached = [_seconds(mine.reaches(pass_at(base, k)[0])) for _, (base, mine) in searches]
        rows.append([f"Pass@{k}", f"{seconds:.1f} s", _percent(share), _seconds(scratch.reaches(share)), *reached])
    head = ["attempts", "their wall time, mean", "solved", f"so many were solved after: {scratch.name}"]
    return _table([*head, *(one.name for one, _ in searches)], rows)


def _losses(results: Results) -> str:
    found = losses(results.trials)
    if not found:
        return ""
    restores = {name: what for run in results.runs for name, what in run["restores"].items()}
    rows = [
        [name, ", ".join(restores.get(name, ())), f"{solved} of {of}", f"{lost:.2f}"]
        for name, (solved, of, lost) in found.items()
    ]
    head = [
        "backend",
        "a restore brings back",
        "tasks that the right steps alone solve",
        "score that a restore loses, mean",
    ]
    return "What restores lose: the right steps only, with a snapshot and a restore before each.\n\n" + _table(
        head, rows
    )


def _costs(found: Sequence[Curve]) -> str:
    rows = [
        [curve.backend, *(f"{costs.get(name, 0):.0f} ms" for name in ("restore", "exec", "run", "snapshot"))]
        for curve in found
        if curve.way == "mcts" and (costs := curve.costs_ms())
    ]
    head = ["MCTS, for each node", "restores", "commands", "judging", "snapshot"]
    return _table(head, rows) if rows else ""


def _by_task(found: Sequence[Curve]) -> str:
    names = sorted({trial.task for curve in found for trial in curve.trials})
    rows = []
    for name in names:
        row = [name]
        for curve in found:
            mine = [trial for trial in curve.trials if trial.task == name]
            solved = [trial.seconds for trial in mine if trial.solved]
            row.append(
                f"{len(solved)} of {len(mine)}" + (f", {sum(solved) / len(solved):.1f} s" if solved else "")
                if mine
                else ""
            )
        rows.append(row)
    return "Seeds that solved each task, and the mean time of those:\n\n" + _table(
        ["task", *(curve.name for curve in found)], rows
    )


def _failures(results: Results) -> str:
    lines = [
        f"- {trial.task}, {trial.way} on {trial.backend}, seed {trial.seed}{', when it was solved' if trial.solved else ''}: "
        f"{' '.join(trial.error.split())[:200]}"
        for trial in results.trials
        if trial.error
    ]
    parts = []
    if lines:
        parts.append(
            "Trials that ended because the backend failed (they count as unsolved, unless the tests had passed before):\n\n"
            + "\n".join(lines)
            + "\n"
        )
    for backend in dict.fromkeys(trial.backend for trial in results.trials):
        hit = [trial for trial in results.trials if trial.backend == backend and trial.failures]
        if hit:
            tasks = ", ".join(sorted({trial.task for trial in hit}))
            count = sum(trial.failures for trial in hit)
            parts.append(
                f"On {backend} a state could not be stored or brought back {count} times in {len(hit)} searches ({tasks}); they went on"
                " without it.\n"
            )
    return "\n".join(parts)
