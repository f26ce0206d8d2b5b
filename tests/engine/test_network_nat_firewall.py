"""Network nat on hosts with a firewall of their own, and the probe that tells whether it works."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from network_lab import (
    NOTHING,
    Internet,
    Session,
    a_host,
    an_internet,
    answers,
    ours,
    some_sessions,
)
from waypoint.errors import HostUnsupported
from waypoint.kernel.nat import attach_nat, sweep_nat
from waypoint.kernel.nat_probe import probe_nat
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


# -- hosts with a firewall of their own -------------------------------------------------------------------------------


def test_probe_passes_on_a_plain_host_and_leaves_nothing(internet: Internet) -> None:
    probe_nat()
    assert ours() == NOTHING


@pytest.mark.parametrize("chain", ["ip filter FORWARD", "inet firewall passing"])
def test_probe_names_the_chain_that_drops_and_a_fix_that_works(
    chain: str, internet: Internet, sessions: Callable[[], Session]
) -> None:
    family, table, name = chain.split()
    run_nft(f"table {family} {table} {{ chain {name} {{ type filter hook forward priority 0; policy drop; }}; }}")
    theirs = run_nft(f"list table {family} {table}")
    with pytest.raises(HostUnsupported, match=chain) as refused:
        probe_nat()
    session = sessions()
    attach_nat(session.netns, "s/a")
    assert not answers(session, internet)
    assert run_nft(f"list table {family} {table}") == theirs
    fix = refused.value.details["fix"]
    if "iptables" in fix and shutil.which("iptables") is None:
        pytest.skip("no iptables on this host")
    subprocess.run(["sh", "-ec", fix], check=True)
    assert answers(session, internet)
    probe_nat()


def test_works_under_strict_reverse_path_filtering(internet: Internet, sessions: Callable[[], Session]) -> None:
    for setting in ("all", "default"):
        Path(f"/proc/sys/net/ipv4/conf/{setting}/rp_filter").write_text("1")
    session = sessions()
    attach_nat(session.netns, "s/a")
    assert answers(session, internet)


def test_sweep_mends_what_a_reload_of_the_hosts_firewall_took(
    internet: Internet, sessions: Callable[[], Session]
) -> None:
    session = sessions()
    attach_nat(session.netns, "s/a")
    run_nft("flush ruleset")
    assert not answers(session, internet)
    assert sweep_nat({"s/a"}) == []
    assert answers(session, internet)
