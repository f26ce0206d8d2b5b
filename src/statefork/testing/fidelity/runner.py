"""Runs cases on environments, each in three ways, and gives a verdict for each way.

restore     perturb the live state, restore in place, judge
fork        fork twice; both are equal; perturbing one shows neither in the other nor in the original
generation  fork, snapshot the fork, perturb it, fork from that snapshot, judge
"""

from __future__ import annotations

import contextlib
import fnmatch
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum

from statefork.errors import WaypointError
from statefork.testing.fidelity.case import Case
from statefork.testing.fidelity.subject import CaseFailed, Inside, Options, Subject

__all__ = ["WAYS", "Backend", "Outcome", "Result", "Verdict", "run_case", "run_cases"]

_FAILURES = (CaseFailed, WaypointError, OSError)
WAYS = ("restore", "fork", "generation")


class Verdict(StrEnum):
    PASSED = "passed"
    REFUSED = "refused cleanly"
    FAILED = "failed"
    NOT_CLAIMED = "not claimed"
    SKIPPED = "skipped"

    @property
    def good(self) -> bool:
        return self in (Verdict.PASSED, Verdict.REFUSED)


@dataclass(frozen=True, slots=True)
class Backend:
    """What is judged: how to make an environment, and what the backend claims that `restore` brings back."""

    name: str
    open: Callable[[Options], Subject]
    claims: frozenset[str]
    unclaimed: Mapping[str, str] = field(default_factory=dict)
    """Single cases (`files/times`, `lost/*`) that it does not claim although it claims what they need: why."""
    patience: float = 1
    """How many times longer than usual everything may take."""
    close: Callable[[], None] = lambda: None
    """When all is judged: ends what the backend still does in the background."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way of one case."""

    verdict: Verdict
    message: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """One case on one backend."""

    case: str
    kind: str
    summary: str
    outcomes: dict[str, Outcome]
    duration_ms: float

    @property
    def verdict(self) -> Verdict:
        """The worst of its ways."""
        found = {outcome.verdict for outcome in self.outcomes.values()}
        order = (Verdict.FAILED, Verdict.SKIPPED, Verdict.NOT_CLAIMED, Verdict.REFUSED, Verdict.PASSED)
        return next(verdict for verdict in order if verdict in found)

    @property
    def message(self) -> str:
        return "; ".join(f"{way}: {one.message}" for way, one in self.outcomes.items() if one.message)


def run_cases(
    backend: Backend,
    cases: Sequence[Case],
    *,
    jobs: int = 1,
    on_result: Callable[[Result], None] | None = None,
) -> list[Result]:
    """All cases, `jobs` at a time, in the order given. No case stops another.

    What interrupts it (Ctrl-C, SystemExit of a signal handler) goes on to the caller when no environment is left.
    """
    stopped = threading.Event()

    def one(case: Case) -> Result:
        result = run_case(backend, case)
        if on_result is not None and not stopped.is_set():
            on_result(result)
        return result

    with ThreadPoolExecutor(jobs, thread_name_prefix="fidelity") as pool:
        futures = [pool.submit(one, case) for case in cases]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            _destroy_live()  # the cases that hold them fail at once, and the pool can end
            raise


def run_case(backend: Backend, case: Case) -> Result:
    began = time.monotonic()
    try:
        outcomes = _judge(backend, case)
    except Exception as error:  # noqa: BLE001  a mistake in one case must not hide the others' verdicts
        outcomes = _all_ways(Verdict.FAILED, f"the case itself broke: {type(error).__name__}: {error}")
    return Result(case.name, case.kind, case.summary, outcomes, (time.monotonic() - began) * 1000)


def _judge(backend: Backend, case: Case) -> dict[str, Outcome]:
    missing = sorted(case.needs - backend.claims)
    if missing:
        return _all_ways(Verdict.NOT_CLAIMED, f"{backend.name} does not claim {', '.join(missing)}")
    for pattern, why in backend.unclaimed.items():
        if fnmatch.fnmatchcase(f"{case.kind}/{case.name}", pattern):
            return _all_ways(Verdict.NOT_CLAIMED, why)
    try:
        subject = backend.open(case.options)
    except WaypointError as error:
        verdict = Verdict.FAILED if case.options.plain else Verdict.SKIPPED
        return _all_ways(verdict, f"no environment with {case.options}: {error}")
    with _destroyed([subject]):
        inside = Inside(subject, backend.patience)
        lacking = _lacking(inside, case)
        if lacking:
            return _all_ways(Verdict.SKIPPED, lacking)
        judges = {"restored": _three_ways, "refused": _refusal, "own": _own}
        return judges[case.expects](inside, case)


def _lacking(inside: Inside, case: Case) -> str:
    """Why this environment cannot show the case, or nothing."""
    by = f" (Debian: {' '.join(case.packages)})" if case.packages else ""
    for program in case.programs:
        if inside.status(f"command -v {program}") != 0:
            return f"{program} is not installed{by}"
    if case.modules and not inside.python(case.modules):
        return f"python3 lacks {' or '.join(case.modules)}{by}"
    return ""


def _three_ways(inside: Inside, case: Case) -> dict[str, Outcome]:
    try:
        case.setup(inside)
        saved = case.observe(inside)
        snapshot = inside.subject.snapshot()
    except _FAILURES as error:
        return _all_ways(Verdict.FAILED, f"before the snapshot was there: {error}")
    # the original is perturbed last, by the way that restores it
    ways = {"fork": _fork_way, "generation": _generation_way, "restore": _restore_way}
    outcomes = {}
    for name, way in ways.items():
        try:
            way(inside, case, snapshot, saved)
            outcomes[name] = Outcome(Verdict.PASSED)
        except _FAILURES as error:
            outcomes[name] = Outcome(Verdict.FAILED, str(error))
    return {name: outcomes[name] for name in WAYS}


def _fork_way(inside: Inside, case: Case, snapshot: str, saved: str) -> None:
    with _forks(inside, 2, snapshot) as (one, other):
        _equal(case, one, saved, "the first fork")
        _equal(case, other, saved, "the second fork")
        case.perturb(one)
        _equal(case, other, saved, "after the first fork was changed, the second")
        _equal(case, inside, saved, "after the first fork was changed, the original")
        case.works(other)


def _generation_way(inside: Inside, case: Case, snapshot: str, saved: str) -> None:
    with _forks(inside, 1, snapshot) as (child,):
        _equal(case, child, saved, "the fork")
        again = child.subject.snapshot()
        case.perturb(child)
        with _forks(child, 1, again) as (grandchild,):
            _equal(case, grandchild, saved, "the fork of the fork")
            case.works(grandchild)


def _restore_way(inside: Inside, case: Case, snapshot: str, saved: str) -> None:
    _equal(case, inside, saved, "the live environment after its snapshot")
    case.perturb(inside)
    try:
        after: str | None = case.observe(inside)
    except CaseFailed:
        after = None  # the state is gone: a difference, too
    if after == saved:
        raise CaseFailed("the case sees no difference after its own perturb: it could not fail")
    inside.subject.restore(snapshot)
    _equal(case, inside, saved, "the restored environment")
    case.works(inside)


def _refusal(inside: Inside, case: Case) -> dict[str, Outcome]:
    """The snapshot is refused in words that help, and the environment goes on as if nobody had asked."""
    try:
        case.setup(inside)
        before = case.observe(inside)
        try:
            inside.subject.snapshot()
        except WaypointError as error:
            case.refusal(inside, error)
        else:
            raise CaseFailed("the snapshot was taken, though what it holds cannot be restored")
        _equal(case, inside, before, "after the refusal, the environment")
        case.works(inside)
        case.perturb(inside)
        snapshot = inside.subject.snapshot()
        inside.subject.restore(snapshot)
        inside.sh(":")
    except _FAILURES as error:
        return _all_ways(Verdict.FAILED, str(error))
    return _all_ways(Verdict.REFUSED)


def _own(inside: Inside, case: Case) -> dict[str, Outcome]:
    try:
        case.judge(inside)
    except _FAILURES as error:
        return _all_ways(Verdict.FAILED, str(error))
    return _all_ways(Verdict.PASSED)


def _equal(case: Case, inside: Inside, saved: str, who: str) -> None:
    found = case.observe(inside)
    if found != saved:
        raise CaseFailed(f"{who} has {found!r}, saved was {saved!r}")


def _all_ways(verdict: Verdict, message: str = "") -> dict[str, Outcome]:
    return {way: Outcome(verdict, message if way == WAYS[0] else "") for way in WAYS}


@contextlib.contextmanager
def _forks(inside: Inside, n: int, snapshot: str) -> Iterator[list[Inside]]:
    subjects = list(inside.subject.fork(n, from_snapshot=snapshot))
    with _destroyed(subjects):
        yield [Inside(subject, inside.patience) for subject in subjects]


_live: dict[int, Subject] = {}
"""Those that cases hold now, of all threads."""


@contextlib.contextmanager
def _destroyed(subjects: Sequence[Subject]) -> Iterator[None]:
    _live.update((id(subject), subject) for subject in subjects)
    try:
        yield
    finally:
        for subject in subjects:
            with contextlib.suppress(WaypointError):
                subject.destroy()
            _live.pop(id(subject), None)


def _destroy_live() -> None:
    for subject in list(_live.values()):
        with contextlib.suppress(WaypointError, OSError):
            subject.destroy()
