"""Every case of the fidelity suite on Waypoint. All that were collected run side by side; each test waits for its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from statefork.testing.fidelity import Backend, Case, Result, Verdict, all_cases, run_case
from statefork.testing.fidelity.waypoint import CAPABILITIES, opener

CASES = {f"{case.kind}/{case.name}": case for case in all_cases()}
NOT_CLAIMED = {"programs/sqlite-rollback", "files/inode-numbers", "shell/nested-job-control"}
"""What Waypoint does not promise; anything else that it does not claim is a mistake."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, home: Path) -> Iterator[dict[str, Future[Result]]]:
    backend = Backend("waypoint", opener(home), CAPABILITIES)
    wanted = [item.callspec.params["name"] for item in request.session.items if _is_ours(item)]
    with ThreadPoolExecutor(max(2, os.cpu_count() or 1), thread_name_prefix="fidelity") as pool:
        yield {name: pool.submit(run_case, backend, CASES[name]) for name in dict.fromkeys(wanted)}
        pool.shutdown(cancel_futures=True)


def _is_ours(item: pytest.Item) -> bool:
    return item.path == Path(__file__) and hasattr(item, "callspec") and "name" in item.callspec.params


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, running: dict[str, Future[Result]], home: Path, request: pytest.FixtureRequest) -> None:
    if getattr(request.node, "execution_count", 1) > 1:
        result = run_case(Backend("waypoint", opener(home), CAPABILITIES), CASES[name])
    else:
        result = running[name].result()
    if result.verdict is Verdict.SKIPPED:
        pytest.skip(result.message)
    if name in NOT_CLAIMED:
        assert result.verdict is Verdict.NOT_CLAIMED
        return
    case: Case = CASES[name]
    wanted = Verdict.REFUSED if case.expects == "refused" else Verdict.PASSED
    assert result.verdict is wanted, result.message
