"""Network nat between real namespaces: a host, an internet behind it, and sessions that all have one address.

The "host" of every test is a fresh network namespace that the test's thread enters, so that the tests may switch its
forwarding, give it a firewall and look at all of its rules, and the machine's own network never changes.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import waypoint
from waypoint.errors import Exists, HostUnsupported, KernelError, UsageError
from waypoint.kernel import nat, nat_host
from waypoint.kernel.nat import attach_nat, detach_nat, nat_keys, sweep_nat
from waypoint.kernel.nat_probe import probe_nat
from waypoint.kernel.netns import in_netns, loopback_up, new_netns
from waypoint.kernel.nftables import run_nft

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

CLONE_NEWNET = 0x40000000
HOST, INTERNET = "203.0.113.1", "203.0.113.2"
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
SHORT_S = 0.4
"""How long nothing must come before it counts as refused; what does come takes well under a millisecond."""

libc = ctypes.CDLL(None, use_errno=True)


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def until(holds: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.01)
    return holds()


@dataclass
class Session:
    """What `waypoint new` makes, as far as the network goes: a process in a user and a network namespace of its own."""

    process: subprocess.Popen[bytes]

    @property
    def netns(self) -> str:
        return f"/proc/{self.process.pid}/ns/net"

    def udp(self, port: int = 0) -> socket.socket:
        return in_netns(self.netns, lambda: _bound(socket.SOCK_DGRAM, "0.0.0.0", port))

    def tcp(self, port: int = 0) -> socket.socket:
        return in_netns(self.netns, lambda: _bound(socket.SOCK_STREAM, "0.0.0.0", port))

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", "-t", str(self.process.pid), "-U", "-n", "--preserve-credentials"]
        return subprocess.run([*enter, *argv], capture_output=True, text=True, timeout=30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _bound(kind: int, address: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, kind)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((address, port))
    made.settimeout(5)
    return made


@contextmanager
def a_session() -> Iterator[Session]:
    argv = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", "echo up; exec sleep infinity"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        yield Session(process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


@pytest.fixture
def sessions() -> Iterator[Callable[[], Session]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(a_session())


@pytest.fixture
def host() -> Iterator[None]:
    """Put this thread into a fresh namespace for the time of a test."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    assert libc.unshare(CLONE_NEWNET) == 0
    try:
        ip("link", "set", "lo", "up")
        FORWARDING.write_text("0")
        yield
    finally:
        assert libc.setns(home, CLONE_NEWNET) == 0
        os.close(home)


class Internet:
    """A namespace one hop behind the host, with services that tell the asker how it looks from there."""

    def __init__(self, netns: int) -> None:
        self.netns = netns

    def udp(self, port: int = 0, address: str = INTERNET) -> socket.socket:
        return in_netns(self.netns, lambda: _bound(socket.SOCK_DGRAM, address, port))

    def tcp(self, port: int = 0, address: str = INTERNET) -> socket.socket:
        return in_netns(self.netns, lambda: _bound(socket.SOCK_STREAM, address, port))

    def run(self, *argv: str) -> str:
        enter = ["nsenter", f"--net=/proc/self/fd/{self.netns}", *argv]
        return subprocess.run(enter, check=True, capture_output=True, text=True, pass_fds=[self.netns]).stdout


@pytest.fixture
def internet(host: None) -> Iterator[Internet]:
    netns = new_netns()
    try:
        loopback_up(netns)
        ip("link", "add", "uplink", "mtu", "1400", "type", "veth", "peer", "name", "wan")
        subprocess.run(["ip", "link", "set", "wan", "netns", f"/proc/{os.getpid()}/fd/{netns}"], check=True)
        ip("addr", "add", f"{HOST}/24", "dev", "uplink")
        ip("link", "set", "uplink", "up")
        there = Internet(netns)
        there.run("ip", "addr", "add", f"{INTERNET}/24", "dev", "wan")
        there.run("ip", "link", "set", "wan", "up")
        ip("route", "add", "default", "via", INTERNET)
        yield there
    finally:
        os.close(netns)


def ours() -> dict[str, object]:
    """Everything of ours that the host's namespace holds."""
    return {
        "links": re.findall(r"wy[^@:]+", ip("-o", "link", "show", "type", "veth")),
        "routes": [line for line in ip("route", "show", "table", "all").splitlines() if "198.18." in line],
        "neighbours": [line for line in ip("neigh", "show", "nud", "all").splitlines() if "198.18." in line],
        "tables": re.findall(r"waypoint\S*", run_nft("list tables")),
        "forwarding": FORWARDING.read_text().strip(),
    }


NOTHING: dict[str, object] = {"links": [], "routes": [], "neighbours": [], "tables": [], "forwarding": "0"}


def answers(session: Session, internet: Internet) -> bool:
    """Whether a datagram of the session reaches the internet and the answer comes back."""
    with internet.udp() as there, session.udp() as here:
        there.settimeout(SHORT_S)
        here.settimeout(SHORT_S)
        try:
            here.sendto(b"?", there.getsockname())
            there.sendto(b"!", there.recvfrom(9)[1])
            return here.recv(9) == b"!"
        except OSError:
            return False


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
    with internet.udp() as there, in_netns(a.netns, lambda: _bound(socket.SOCK_DGRAM, stolen, 0)) as thief:
        thief.sendto(b"from the thief", there.getsockname())
        there.settimeout(SHORT_S)
        with pytest.raises(TimeoutError):
            there.recv(32)
    assert answers(a, internet) and answers(b, internet)


def test_the_hosts_services_are_out_of_reach_but_for_dns(internet: Internet, sessions: Callable[[], Session]) -> None:
    session = sessions()
    attach_nat(session.netns, "s/a")
    for address in (HOST, nat.GATEWAY):
        with _bound(socket.SOCK_STREAM, "0.0.0.0", 9000) as service, session.tcp() as client:
            service.listen()
            client.settimeout(SHORT_S)
            with pytest.raises(TimeoutError):
                client.connect((address, 9000))
            with internet.tcp() as control:
                control.connect((HOST, 9000))
        with _bound(socket.SOCK_DGRAM, "0.0.0.0", 53) as resolver, session.udp() as asks:
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
    assert threading.active_count() == 1


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
