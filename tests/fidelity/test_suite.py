"""The suite itself: it sees what differs, and says no more than it has seen."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from statefork.errors import UsageError
from statefork.testing.fidelity import Backend, Options, ShellCase, Verdict, all_cases, run_case, run_cases, select
from statefork.testing.fidelity.report import as_document, as_page
from statefork.testing.fidelity.subject import Inside
from statefork.testing.fidelity.waypoint import CAPABILITIES, SessionSubject, opener

CASE = ShellCase(
    "variable", "a variable and a file", kind="shell", make="X=1; echo 1 >/tmp/x", same="echo $X; cat /tmp/x", spoil="X=2; echo 2 >/tmp/x"
)


class Forgetful(SessionSubject):
    """Restores, and loses something on the way; its forks are as they should be."""

    def restore(self, snapshot: str) -> None:
        super().restore(snapshot)
        self.session.exec("unset X")


class Leaky(SessionSubject):
    """Forks are not forks: both are the original."""

    def fork(self, n: int = 1, *, from_snapshot: str | None = None) -> list[SessionSubject]:
        return [Shared(self._engine, self.session) for _ in range(n)]


class Shared(SessionSubject):
    def destroy(self) -> None:
        return


def backend(home: Path, kind: type[SessionSubject] = SessionSubject) -> Backend:
    make = opener(home)
    opened: Callable[[Options], SessionSubject] = lambda options: kind(*_parts(make(options)))  # noqa: E731
    return Backend("waypoint", opened, CAPABILITIES)


def _parts(subject: SessionSubject) -> tuple[object, object]:
    return subject._engine, subject.session


def test_a_good_backend_passes_all_ways(home: Path) -> None:
    assert run_case(backend(home), CASE).verdict is Verdict.PASSED


def test_a_lossy_restore_fails_that_way_only(home: Path) -> None:
    result = run_case(backend(home, Forgetful), CASE)
    assert {way: one.verdict for way, one in result.outcomes.items()} == {
        "restore": Verdict.FAILED,
        "fork": Verdict.PASSED,
        "generation": Verdict.PASSED,
    }
    assert r"the restored environment has '\n1', saved was '1\n1'" in result.message


def test_forks_that_share_state_fail(home: Path) -> None:
    result = run_case(backend(home, Leaky), CASE)
    assert result.outcomes["fork"].verdict is Verdict.FAILED
    assert "after the first fork was changed" in result.outcomes["fork"].message


def test_a_case_that_sees_nothing_fails(home: Path) -> None:
    blind = ShellCase("blind", "sees nothing", kind="shell", make=":", same="echo always", spoil=":")
    result = run_case(backend(home), blind)
    assert result.verdict is Verdict.FAILED
    assert "it could not fail" in result.message


def test_what_is_not_claimed_is_not_judged(home: Path) -> None:
    files_only = Backend("files", opener(home), frozenset({"files"}))
    result = run_case(files_only, CASE)
    assert result.verdict is Verdict.NOT_CLAIMED
    assert "does not claim shell" in result.message


def test_a_missing_program_skips_with_its_package(home: Path) -> None:
    case = ShellCase("x", "x", kind="shell", make=":", same=":", spoil=":", programs=("no-such",), packages=("no-such-package",))
    result = run_case(backend(home), case)
    assert result.verdict is Verdict.SKIPPED
    assert "no-such is not installed (Debian: no-such-package)" in result.message


def test_one_broken_case_does_not_stop_the_others(home: Path) -> None:
    broken = ShellCase("broken", "broken", kind="shell", make="exit_with_nonsense", same=":", spoil=":")
    verdicts = [result.verdict for result in run_cases(backend(home), [broken, CASE], jobs=2)]
    assert verdicts == [Verdict.FAILED, Verdict.PASSED]


class Interrupting(ShellCase):
    """The run is told to end while a command of this case runs, which would go on for five minutes."""

    def setup(self, inside: Inside) -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGUSR1)
        inside.sh("sleep 300", timeout=300)


@pytest.mark.timeout(120)
def test_an_interrupted_run_leaves_no_environment(home: Path) -> None:
    made: list[SessionSubject] = []
    make = opener(home)

    def opened(options: Options) -> SessionSubject:
        made.append(make(options))
        return made[-1]

    case = Interrupting("interrupting", "x", kind="shell", make=":", same=":", spoil=":")
    before = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit):
            run_cases(Backend("waypoint", opened, CAPABILITIES), [case, CASE], jobs=1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    left = {record.id for record in made[0]._engine.sessions()}
    assert [one.session.id for one in made if one.session.id in left] == []


def test_names_are_unique_and_can_be_chosen_by_pattern() -> None:
    names = [f"{case.kind}/{case.name}" for case in all_cases()]
    assert len(names) == len(set(names))
    assert {case.kind for case in select(["network"])} == {"network"}
    assert [case.name for case in select(["shell/cwd"])] == ["cwd"]
    with pytest.raises(UsageError, match="no case fits"):
        select(["no-such-case"])


def test_the_page_has_a_row_for_each_case(home: Path) -> None:
    result = run_case(backend(home), CASE)
    document = as_document("waypoint", [result])
    assert document["counts"] == {"passed": 1}
    assert "| variable | a variable and a file | ok |" in as_page([document])


def test_what_a_backend_was_not_asked_is_not_left_blank(home: Path) -> None:
    document = as_document("waypoint", [run_case(backend(home), CASE)])
    assert "| variable | a variable and a file | ok | not run |" in as_page([document, as_document("other", [])])
