"""What a session behind nat can reach and what it cannot: sessions that all have one address, a host, an internet."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from network_lab import (
    HOST,
    INTERNET,
    SHORT_S,
    Internet,
    Session,
    a_host,
    an_internet,
    answers,
    bound,
    ip,
    ours,
    some_sessions,
)
from waypoint.kernel import nat
from waypoint.kernel.nat import attach_nat, detach_nat, nat_keys
from waypoint.kernel.netns import in_netns
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


# -- what a session can do --------------------------------------------------------------------------------------------


def test_two_sessions_with_one_address_and_one_port_talk_out_at_once(
    internet: Internet, sessions: Callable[[], Session]
) -> None:
    a, b = sessions(), sessions()
    attach_nat(a.netns, "s/a")
    attach_nat(b.netns, "s/b")
    with internet.tcp(80) as server, a.tcp(40000) as from_a, b.tcp(40000) as from_b:
        server.listen()
        from_a.connect((INTERNET, 80))
        for_a, a_seen = server.accept()
        from_b.connect((INTERNET, 80))
        for_b, b_seen = server.accept()
        with for_a, for_b:
            assert from_a.getsockname() == from_b.getsockname() == (nat.INSIDE_ADDRESS, 40000)
            assert a_seen[0] == b_seen[0] == HOST
            assert a_seen[1] != b_seen[1]
            from_b.send(b"from b")
            from_a.send(b"from a")
            assert (for_a.recv(9), for_b.recv(9)) == (b"from a", b"from b")
            for_b.send(b"to b")
            for_a.send(b"to a")
            assert (from_a.recv(9), from_b.recv(9)) == (b"to a", b"to b")
    with internet.udp(53) as server, a.udp(40000) as from_a, b.udp(40000) as from_b:
        from_a.sendto(b"a", (INTERNET, 53))
        from_b.sendto(b"b", (INTERNET, 53))
        for _ in range(2):
            question, asker = server.recvfrom(9)
            assert asker[0] == HOST
            server.sendto(b"for " + question, asker)
        assert (from_a.recv(9), from_b.recv(9)) == (b"for a", b"for b")


def test_ping_out_and_the_gateway(internet: Internet, sessions: Callable[[], Session]) -> None:
    session = sessions()
    attach_nat(session.netns, "s/a")
    for target in (INTERNET, nat.GATEWAY, nat.INSIDE_ADDRESS, "127.0.0.1"):
        done = session.run("ping", "-n", "-c", "1", "-W", "3", target)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_session_sees_the_same_network(internet: Internet, sessions: Callable[[], Session]) -> None:
    def view(session: Session) -> str:
        shown = [session.run("ip", *words).stdout for words in (["addr"], ["route"], ["neigh"])]
        return re.sub(r"@if\d+|link-netnsid \d+", "", "".join(shown))

    a, b = sessions(), sessions()
    first, second = attach_nat(a.netns, "s/a"), attach_nat(b.netns, "s/b")
    assert first.address != second.address and first.interface != second.interface
    assert view(a) == view(b)
    for word in ("10.77.0.2/24", "default via 10.77.0.1 dev eth0", "link/ether 02:57:50:00:00:02", "mtu 1400"):
        assert word in view(a)
    assert "inet6 fe80" not in view(a)


def test_the_host_reaches_each_session_at_its_own_address(internet: Internet, sessions: Callable[[], Session]) -> None:
    a, b = sessions(), sessions()
    links = {"a": attach_nat(a.netns, "s/a"), "b": attach_nat(b.netns, "s/b")}
    with a.tcp(8080) as at_a, b.tcp(8080) as at_b:
        for listener in (at_a, at_b):
            listener.listen()
        for name, listener in (("a", at_a), ("b", at_b)):
            with socket.create_connection((links[name].address, 8080), timeout=5) as client:
                served, _ = listener.accept()
                with served:
                    served.send(name.encode())
                assert client.recv(9) == name.encode()


def test_twenty_sessions_attached_from_threads(internet: Internet, sessions: Callable[[], Session]) -> None:
    many = [sessions() for _ in range(20)]
    with ThreadPoolExecutor(10) as pool:
        links = list(pool.map(lambda n: attach_nat(many[n].netns, f"s/{n}"), range(20)))
    assert len({link.address for link in links}) == 20
    assert nat_keys() == {f"s/{n}" for n in range(20)}
    assert len(ours()["tables"]) == 2  # type: ignore[arg-type]
    assert all(answers(session, internet) for session in many)


def test_a_narrower_link_behind_the_host_narrows_the_segments(
    internet: Internet, sessions: Callable[[], Session]
) -> None:
    session = sessions()
    attach_nat(session.netns, "s/a")
    ip("link", "set", "uplink", "mtu", "1000")
    with internet.tcp(80) as server, session.tcp() as client:
        server.listen()
        client.connect((INTERNET, 80))
        served, _ = server.accept()
        with served:
            assert served.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= 960


# -- what it cannot do ------------------------------------------------------------------------------------------------


def open_up(session: Session, address: str) -> None:
    """What a session with CAP_NET_ADMIN could do to itself: drop its own rules and answer to its pool address."""
    session.run("nft", "delete", "table", "ip", "waypoint").check_returncode()
    session.run("ip", "addr", "add", f"{address}/32", "dev", "eth0").check_returncode()


@pytest.mark.parametrize("willing", [False, True])
def test_sessions_cannot_reach_each_other(willing: bool, internet: Internet, sessions: Callable[[], Session]) -> None:
    a, b = sessions(), sessions()
    attach_nat(a.netns, "s/a")
    target = attach_nat(b.netns, "s/b").address
    if willing:
        open_up(b, target)
    with b.tcp(8080) as listener, a.tcp() as client, b.udp(9000) as box, a.udp() as sender:
        listener.listen()
        client.settimeout(SHORT_S)
        with pytest.raises(TimeoutError):
            client.connect((target, 8080))
        sender.sendto(b"hello", (target, 9000))
        box.settimeout(SHORT_S)
        with pytest.raises(TimeoutError):
            box.recv(9)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as of_the_host:
            of_the_host.sendto(b"control", (target, 9000))
        assert box.recv(9) == b"control"


def test_a_session_cannot_use_another_sessions_address(internet: Internet, sessions: Callable[[], Session]) -> None:
    a, b = sessions(), sessions()
    attach_nat(a.netns, "s/a")
    stolen = attach_nat(b.netns, "s/b").address
    assert a.run("ip", "addr", "add", f"{stolen}/32", "dev", "eth0").returncode == 0
    with internet.udp() as there, in_netns(a.netns, lambda: bound(socket.SOCK_DGRAM, stolen, 0)) as thief:
        thief.sendto(b"from the thief", there.getsockname())
        there.settimeout(SHORT_S)
        with pytest.raises(TimeoutError):
            there.recv(32)
    assert answers(a, internet) and answers(b, internet)


def test_the_hosts_services_are_out_of_reach_but_for_dns(internet: Internet, sessions: Callable[[], Session]) -> None:
    session = sessions()
    attach_nat(session.netns, "s/a")
    for address in (HOST, nat.GATEWAY):
        with bound(socket.SOCK_STREAM, "0.0.0.0", 9000) as service, session.tcp() as client:
            service.listen()
            client.settimeout(SHORT_S)
            with pytest.raises(TimeoutError):
                client.connect((address, 9000))
            with internet.tcp() as control:
                control.connect((HOST, 9000))
        with bound(socket.SOCK_DGRAM, "0.0.0.0", 53) as resolver, session.udp() as asks:
            asks.sendto(b"?", (address, 53))
            assert resolver.recv(9) == b"?"


@pytest.mark.parametrize("willing", [False, True])
def test_nothing_comes_in_unasked(willing: bool, internet: Internet, sessions: Callable[[], Session]) -> None:
    session = sessions()
    address = attach_nat(session.netns, "s/a").address
    if willing:
        open_up(session, address)
    internet.run("ip", "route", "add", "198.18.0.0/16", "via", HOST)
    with session.udp(9000) as box, internet.udp() as stranger:
        stranger.sendto(b"hello", (address, 9000))
        box.settimeout(SHORT_S)
        with pytest.raises(TimeoutError):
            box.recv(9)


def test_no_ipv6_reaches_the_host(internet: Internet, sessions: Callable[[], Session]) -> None:
    """The kernel gives neither end an address; these are given by hand, as a session with CAP_NET_ADMIN might."""
    session = sessions()
    link = attach_nat(session.netns, "s/a").interface
    assert "inet6" not in ip("addr", "show", "dev", link)
    ip("addr", "add", "fe80::1/64", "dev", link, "nodad")
    session.run("ip", "addr", "add", "fe80::2/64", "dev", "eth0", "nodad").check_returncode()
    session.run("ip", "neigh", "add", "fe80::1", "lladdr", nat.GATEWAY_MAC, "dev", "eth0").check_returncode()

    def six() -> socket.socket:
        made = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        made.settimeout(SHORT_S)
        return made

    inside = in_netns(session.netns, lambda: socket.if_nametoindex("eth0"))
    with six() as service, in_netns(session.netns, six) as client:
        service.bind(("::", 53))
        client.sendto(b"?", ("fe80::1", 53, 0, inside))
        with pytest.raises(TimeoutError):
            service.recv(9)
        run_nft("flush ruleset")
        client.sendto(b"control", ("fe80::1", 53, 0, inside))
        assert service.recv(9) == b"control"


def test_an_answer_to_the_addresss_last_owner_does_not_reach_the_next(
    internet: Internet, sessions: Callable[[], Session]
) -> None:
    """The host's connection table outlives a session; a pool of five makes the next one get the same address."""
    old, new = sessions(), sessions()
    first = attach_nat(old.netns, "s/old", pool="198.18.9.0/29")
    with internet.udp() as there:
        with old.udp(40000) as asks:
            asks.sendto(b"?", there.getsockname())
            asker = there.recvfrom(9)[1]
        detach_nat("s/old")
        for n in range(99):
            if attach_nat(new.netns, f"s/{n}", pool="198.18.9.0/29").address == first.address:
                break
            detach_nat(f"s/{n}")
        else:
            pytest.fail("no key leads to the same address")
        with new.udp(40000) as box:
            there.sendto(b"late", asker)
            box.settimeout(SHORT_S)
            with pytest.raises(TimeoutError):
                box.recv(9)


def test_cloud_metadata_is_out_of_reach_but_for_dns(internet: Internet, sessions: Callable[[], Session]) -> None:
    session = sessions()
    attach_nat(session.netns, "s/a")
    metadata = "169.254.169.254"
    internet.run("ip", "addr", "add", f"{metadata}/32", "dev", "wan")
    ip("route", "add", metadata, "via", INTERNET)
    with internet.tcp(80, metadata) as service, session.tcp() as client:
        service.listen()
        client.settimeout(SHORT_S)
        with pytest.raises(TimeoutError):
            client.connect((metadata, 80))
        with socket.create_connection((metadata, 80), timeout=5):
            pass
    with internet.udp(53, metadata) as resolver, session.udp() as asks:
        asks.sendto(b"?", (metadata, 53))
        assert resolver.recv(9) == b"?"
