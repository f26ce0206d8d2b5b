"""A session's network as the engine sees it: loopback, `nat`, and the resolvers that a session can reach.

The work is done in `netns`, `nat` and `nat_host`; none of them is heavy to import.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from waypoint.kernel.nat import NatLink, attach_nat, detach_nat, nat_keys, sweep_nat
from waypoint.kernel.netns import in_netns, loopback_up, new_netns

__all__ = [
    "NatLink",
    "attach_nat",
    "detach_nat",
    "in_netns",
    "loopback_up",
    "nat_keys",
    "new_netns",
    "resolv_conf",
    "sweep_nat",
]

_RESOLVERS = (
    Path("/etc/resolv.conf"),
    Path("/run/systemd/resolve/resolv.conf"),
    Path("/run/NetworkManager/no-stub-resolv.conf"),
    Path("/run/resolvconf/resolv.conf"),
)
"""Where hosts name their resolvers; the later ones name the upstreams of a local stub that the first one names."""


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
        first = socket.inet_pton(socket.AF_INET, server)[0]
    except OSError:
        return False
    return first not in (0, 127)
