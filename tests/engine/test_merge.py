"""Sessions that allow it share equal pages, and never see each other through them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from waypoint.engine import Engine
from waypoint.errors import HostUnsupported
from waypoint.kernel.processes import namespace_pids
from waypoint.model import BaseRecord

KSM = Path("/sys/kernel/mm/ksm")
pytestmark = [
    pytest.mark.alone,  # it turns a setting of the whole host on, and off again
    pytest.mark.skipif(not KSM.exists(), reason="the kernel has no KSM"),
]


@pytest.fixture
def merging() -> Iterator[None]:
    before = {name: (KSM / name).read_text().strip() for name in ("pages_to_scan", "sleep_millisecs", "run")}
    (KSM / "pages_to_scan").write_text("20000")
    (KSM / "sleep_millisecs").write_text("10")
    (KSM / "run").write_text("1")
    yield
    (KSM / "run").write_text("2")  # every page is given back to its owners
    for name, value in before.items():
        (KSM / name).write_text(value)


def merged_pages(init_pid: int) -> int:
    found = 0
    for pid in namespace_pids(init_pid):
        lines = Path(f"/proc/{pid}/ksm_stat").read_text().splitlines()
        found += sum(int(line.split()[1]) for line in lines if line.startswith("ksm_merging_pages"))
    return found


def test_forks_share_what_is_equal_and_nothing_else(engine: Engine, small_base: BaseRecord, merging: None) -> None:
    session = engine.new(base=small_base, merge=True)
    session.exec("BIG=$(seq 1 600000); N=1")  # some megabytes of a shell's memory
    first, second = session.fork(2)
    assert first.record.spec.merge
    deadline = time.monotonic() + 60
    while merged_pages(first.record.init_pid) < 500 or merged_pages(second.record.init_pid) < 500:
        assert time.monotonic() < deadline, "nothing was merged"
        time.sleep(0.1)
    first.exec("BIG=${BIG/1/x}; N=2")
    assert second.exec("echo ${BIG:0:3}; echo $N").stdout.split() == [b"1", b"2", b"1"]
    again = second.snapshot()
    second.restore(again.id, verify=True)
    assert second.exec("echo ${#BIG} $N").stdout == session.exec("echo ${#BIG} $N").stdout
    for one in (first, second, session):
        one.remove()


def test_without_the_hosts_merging_it_is_refused(engine: Engine, small_base: BaseRecord) -> None:
    if (KSM / "run").read_text().strip() == "1":
        pytest.skip("this host merges")
    with pytest.raises(HostUnsupported, match="echo 1 >"):
        engine.new(base=small_base, merge=True)
