"""What is left of nat: nothing, after an orderly end, after kill -9 at every step, and after a failure."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import waypoint
from network_lab import (
    FORWARDING,
    NOTHING,
    Internet,
    Session,
    a_host,
    an_internet,
    answers,
    ours,
    some_sessions,
    until,
)
from waypoint.errors import Exists, KernelError, UsageError
from waypoint.kernel import nat, nat_host
from waypoint.kernel.nat import attach_nat, detach_nat, nat_keys, sweep_nat
from waypoint.kernel.netns import in_netns, new_netns
from waypoint.kernel.nftables import run_nft

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def internet() -> Iterator[Internet]:
    with a_host(), an_internet() as there:
        yield there


@pytest.fixture
def sessions() -> Iterator[Callable[[], Session]]:
    with some_sessions() as another:
        yield another


# -- what is left -----------------------------------------------------------------------------------------------------


def test_detach_leaves_nothing(internet: Internet, sessions: Callable[[], Session]) -> None:
    before = run_nft("list ruleset")
    a, b = sessions(), sessions()
    assert attach_nat(a.netns, "s/a").forwarding_switched_on
    assert not attach_nat(b.netns, "s/b").forwarding_switched_on
    assert FORWARDING.read_text().strip() == "1"
    detach_nat("s/a")
    assert answers(b, internet) and not answers(a, internet)
    detach_nat("s/b")
    detach_nat("s/b")
    assert ours() == NOTHING
    assert run_nft("list ruleset") == before


def test_the_link_goes_with_the_sessions_last_process(internet: Internet, sessions: Callable[[], Session]) -> None:
    session = sessions()
    attach_nat(session.netns, "s/a")
    session.kill()
    assert until(lambda: nat_keys() == set())
    assert ours()["routes"] == []
    assert sweep_nat(set()) == []
    assert ours() == NOTHING


def test_forwarding_stays_on_for_those_who_came_to_rely_on_it(
    internet: Internet, sessions: Callable[[], Session]
) -> None:
    session = sessions()
    attach_nat(session.netns, "s/a")
    run_nft("table ip other { chain post { type nat hook postrouting priority 100; policy accept; }; }")
    detach_nat("s/a")
    assert ours() == NOTHING | {"forwarding": "1"}


def test_forwarding_that_was_on_is_left_on(internet: Internet, sessions: Callable[[], Session]) -> None:
    FORWARDING.write_text("1")
    session = sessions()
    assert not attach_nat(session.netns, "s/a").forwarding_switched_on
    detach_nat("s/a")
    assert ours() == NOTHING | {"forwarding": "1"}


def test_sweep_spares_the_living_and_other_stores(internet: Internet, sessions: Callable[[], Session]) -> None:
    keys = ["mine/1", "mine/2", "other/1"]
    for key in keys:
        attach_nat(sessions().netns, key)
    assert sweep_nat({"mine/1"}, scope="mine/") == ["mine/2"]
    assert nat_keys() == {"mine/1", "other/1"}
    assert sorted(sweep_nat(set())) == ["mine/1", "other/1"]
    assert ours() == NOTHING


def test_sweep_takes_any_number(internet: Internet) -> None:
    netns = [new_netns() for _ in range(150)]
    try:
        for number, descriptor in enumerate(netns):
            attach_nat(f"/proc/self/fd/{descriptor}", f"s/{number}")
        assert len(sweep_nat({"s/7"})) == 149
        assert nat_keys() == {"s/7"}
    finally:
        for descriptor in netns:
            os.close(descriptor)


CRASH = """
import os, signal, sys
from waypoint.kernel import nat, nat_host
def step(name):
    if name == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)
nat_host.step = step
if sys.argv[2] == "sweep":
    nat.sweep_nat(set())
else:
    nat.attach_nat(sys.argv[2], "s/crash")
"""
ATTACH_STEPS = ["table", "mark", "host", "link", "address", "inside"]
SWEEP_STEPS = ["unlink", "unforward"]


def test_the_steps_are_all_named_here() -> None:
    source = "".join(Path(module.__file__ or "").read_text() for module in (nat, nat_host))
    assert set(re.findall(r"\bstep\(\"(\w+)\"\)", source)) == set(ATTACH_STEPS + SWEEP_STEPS)


def crash(step: str, work: str) -> None:
    path = {"PYTHONPATH": str(Path(waypoint.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", CRASH, step, work], timeout=60, env=os.environ | path)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("step", ATTACH_STEPS)
def test_killed_while_attaching(step: str, internet: Internet, sessions: Callable[[], Session]) -> None:
    session = sessions()
    crash(step, session.netns)
    expected = ["s/crash"] if step in ("link", "address", "inside") else []
    assert sweep_nat(set()) == expected
    assert ours() == NOTHING
    assert attach_nat(session.netns, "s/again").forwarding_switched_on
    assert answers(session, internet)


@pytest.mark.parametrize("step", ATTACH_STEPS[2:])  # the first two are passed only by the first session
def test_killed_while_attaching_and_another_session_goes_on(
    step: str, internet: Internet, sessions: Callable[[], Session]
) -> None:
    alive, session = sessions(), sessions()
    attach_nat(alive.netns, "s/alive")
    crash(step, session.netns)
    sweep_nat({"s/alive"})
    assert nat_keys() == {"s/alive"}
    assert answers(alive, internet)


@pytest.mark.parametrize("step", SWEEP_STEPS)
def test_killed_while_sweeping(step: str, internet: Internet, sessions: Callable[[], Session]) -> None:
    for n in range(2):
        attach_nat(sessions().netns, f"s/{n}")
    crash(step, "sweep")
    sweep_nat(set())
    assert ours() == NOTHING


def _threads_in(namespace: Path) -> list[str]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "ns/net").readlink() == namespace:
                found.append(task.name)
    return found


def test_a_failed_attach_leaves_nothing_and_the_thread_at_home(
    internet: Internet, sessions: Callable[[], Session]
) -> None:
    session = sessions()
    session.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "other").check_returncode()
    home = Path("/proc/thread-self/ns/net").readlink()
    with pytest.raises(Exists):
        attach_nat(session.netns, "s/a")
    with pytest.raises(KernelError, match="did the session die"):
        attach_nat("/proc/4194305/ns/net", "s/a")
    with pytest.raises(ZeroDivisionError):
        in_netns(session.netns, lambda: 1 / 0)
    assert Path("/proc/thread-self/ns/net").readlink() == home
    sweep_nat(set())
    assert ours() == NOTHING
    deadline = time.monotonic() + 10  # one that has ended is seen for an instant more
    while abroad := _threads_in(Path(session.netns).readlink()):
        assert time.monotonic() < deadline, f"threads stayed there: {abroad}"


def test_one_link_per_key_and_per_session(internet: Internet, sessions: Callable[[], Session]) -> None:
    a, b = sessions(), sessions()
    attach_nat(a.netns, "s/a")
    with pytest.raises(Exists):
        attach_nat(b.netns, "s/a")
    with pytest.raises(Exists):
        attach_nat(a.netns, "s/b")
    assert nat_keys() == {"s/a"}
    assert answers(a, internet)


def test_a_full_pool_says_so(internet: Internet, sessions: Callable[[], Session]) -> None:
    addresses = {attach_nat(sessions().netns, f"s/{n}", pool="198.18.7.0/29").address for n in range(5)}
    assert addresses == {f"198.18.7.{n}" for n in range(2, 7)}
    with pytest.raises(KernelError, match="all 5 addresses"):
        attach_nat(sessions().netns, "s/late", pool="198.18.7.0/29")
    assert "s/late" not in nat_keys()


@pytest.mark.parametrize("pool", ["198.18.0.0/30", "10.0.0.0/8", "nonsense", "fd00::/64", "198.18.0.1/16"])
def test_a_pool_that_cannot_work_is_refused(pool: str) -> None:
    with pytest.raises(UsageError):
        attach_nat("/proc/self/ns/net", "s/a", pool=pool)


def test_a_key_that_no_link_can_carry_is_refused() -> None:
    for key in ("x" * 250, "line\nbreak"):
        with pytest.raises(UsageError):
            attach_nat("/proc/self/ns/net", key)
