"""Work inside another network namespace, and what every session's own one gets: loopback, two settings, resolvers.

`setns` moves one thread. All work in a foreign namespace is therefore done in a thread of its own that ends with the
work: the caller's thread never leaves its namespace, not even when something is raised.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from waypoint.errors import KernelError
from waypoint.kernel.rtnetlink import Rtnetlink, raise_link

__all__ = ["in_netns", "loopback_up", "new_netns", "resolv_conf"]

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

_RESOLVERS = (
    Path("/etc/resolv.conf"),
    Path("/run/systemd/resolve/resolv.conf"),
    Path("/run/NetworkManager/no-stub-resolv.conf"),
    Path("/run/resolvconf/resolv.conf"),
)
"""Where hosts name their resolvers; the later ones name the upstreams of a local stub that the first one names."""


def _in_thread(work: Callable[[], T]) -> T:
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - carried over to the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="waypoint-netns")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def in_netns(netns: str | int, work: Callable[[], T]) -> T:
    """Do `work` in the network namespace at a path (`/proc/PID/ns/net`) or descriptor; its result or its exception."""

    try:
        descriptor = os.open(netns, os.O_RDONLY | os.O_CLOEXEC) if isinstance(netns, str) else os.dup(netns)
    except OSError as error:
        raise KernelError(f"no network namespace {netns}: {error.strerror}; the process has ended") from error

    def run() -> T:
        if _libc.setns(descriptor, _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise KernelError(
                f"cannot enter the network namespace {netns}: {os.strerror(code)}; run as root", errno=code
            )
        return work()

    try:
        return _in_thread(run)
    finally:
        os.close(descriptor)


def new_netns() -> int:
    """A descriptor of a fresh network namespace, which lives as long as the descriptor does."""

    def run() -> int:
        if _libc.unshare(_CLONE_NEWNET):
            code = ctypes.get_errno()
            raise KernelError(f"cannot make a network namespace: {os.strerror(code)}; run as root", errno=code)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_thread(run)


def loopback_up(netns: str | int) -> None:
    """Bring up `lo`, and allow what Docker allows: ping without privilege, any port without privilege.

    Both are settings of the namespace alone. A namespace that CRIU made fresh has neither.
    """
    in_netns(netns, set_up_here)


def set_up_here() -> None:
    """`loopback_up` for a thread that is in the namespace already."""
    with Rtnetlink() as link:
        link.batch([raise_link("lo")])
    settings = Path("/proc/sys/net/ipv4")
    (settings / "ping_group_range").write_text("0 2147483647")
    (settings / "ip_unprivileged_port_start").write_text("0")


def resolv_conf(fallback: Sequence[str] = (), *, sources: Iterable[Path] = _RESOLVERS) -> bytes:
    """The host's /etc/resolv.conf as a session behind `nat` can use it.

    A resolver on loopback (systemd-resolved, dnsmasq) is the host's loopback, so its upstreams are named instead;
    IPv6 resolvers are left out because `nat` has no IPv6. `fallback` is used if nothing is left.
    """
    servers: list[str] = []
    other: list[str] = []
    for number, source in enumerate(sources):
        try:
            lines = source.read_text(errors="replace").splitlines()
        except OSError:
            continue
        words = [line.split() for line in lines if line.strip() and line.strip()[0] not in "#;"]
        if number == 0:
            other = [" ".join(line) for line in words if line[0] in ("search", "domain", "options")]
        servers = [line[1] for line in words if line[0] == "nameserver" and len(line) > 1 and _reachable(line[1])]
        if servers:
            break
    lines = [f"nameserver {server}" for server in servers or fallback]
    if not lines:
        lines = ["# every resolver of the host is on its loopback or IPv6 only: none can be reached from here"]
    return "".join(f"{line}\n" for line in [*lines, *other]).encode()


def _reachable(server: str) -> bool:
    try:
        address = ipaddress.ip_address(server)
    except ValueError:
        return False
    return address.version == 4 and not address.is_loopback and not address.is_unspecified
