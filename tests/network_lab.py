"""A host, an internet behind it and sessions, all of them network namespaces of this machine's kernel.

The "host" is a fresh network namespace that the calling thread enters, so that tests may switch its forwarding, give it
a firewall and look at all of its rules, and the machine's own network never changes.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from waypoint.kernel.netns import in_netns, loopback_up, new_netns
from waypoint.kernel.nftables import run_nft
from waypoint.kernel.rtnetlink import Rtnetlink

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
        return in_netns(self.netns, lambda: bound(socket.SOCK_DGRAM, "0.0.0.0", port))

    def tcp(self, port: int = 0) -> socket.socket:
        return in_netns(self.netns, lambda: bound(socket.SOCK_STREAM, "0.0.0.0", port))

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", "-t", str(self.process.pid), "-U", "-n", "--preserve-credentials"]
        return subprocess.run([*enter, *argv], capture_output=True, text=True, timeout=30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def bound(kind: int, address: str, port: int) -> socket.socket:
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


@contextmanager
def some_sessions() -> Iterator[Callable[[], Session]]:
    """A function that makes one more; all end with the context."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(a_session())


@contextmanager
def a_host() -> Iterator[None]:
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
        return in_netns(self.netns, lambda: bound(socket.SOCK_DGRAM, address, port))

    def tcp(self, port: int = 0, address: str = INTERNET) -> socket.socket:
        return in_netns(self.netns, lambda: bound(socket.SOCK_STREAM, address, port))

    def run(self, *argv: str) -> str:
        enter = ["nsenter", f"--net=/proc/self/fd/{self.netns}", *argv]
        return subprocess.run(enter, check=True, capture_output=True, text=True, pass_fds=[self.netns]).stdout


@contextmanager
def an_internet() -> Iterator[Internet]:
    """One hop behind the host that this thread is in."""
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
        with Rtnetlink() as link:
            link.wait_until_up("uplink")
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
