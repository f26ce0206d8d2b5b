"""Try network `nat` on this host, for `waypoint doctor`: send a packet from a session to a stranger and back.

Both are namespaces that only this process holds, so nothing is left of them whatever happens to it.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from contextlib import suppress

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel.nat import DEFAULT_POOL, attach_nat, detach_nat
from waypoint.kernel.nat_host import LINK_PREFIX, blocking_chains
from waypoint.kernel.netns import in_netns, new_netns
from waypoint.kernel.rtnetlink import (
    Message,
    Rtnetlink,
    add_address,
    add_default_route,
    add_host_route,
    add_neighbour,
    add_veth,
    delete_link,
    raise_link,
)

__all__ = ["probe_nat"]

_HERE_MAC, _STRANGER_MAC = "02:57:50:00:01:01", "02:57:50:00:01:02"
_ANSWER_DEADLINE_S = 3.0


def probe_nat(pool: str = DEFAULT_POOL) -> None:
    """Returns if a session's packet leaves this host and its answer comes back; HostUnsupported with the fix if not."""
    key = f"probe/{secrets.token_hex(6)}"
    link = f"wyp{secrets.token_hex(5)}"
    session = new_netns()
    stranger = new_netns()
    try:
        address = _add_stranger(stranger, link, ipaddress.IPv4Network(pool))
        attach_nat(f"/proc/self/fd/{session}", key, pool=pool)
        if not _echo(session, stranger, address):
            raise _refusal()
    finally:
        os.close(session)
        os.close(stranger)
        with suppress(KernelError), Rtnetlink() as host:
            host.batch([delete_link(link)])
        detach_nat(key)


def _add_stranger(netns: int, name: str, pool: ipaddress.IPv4Network) -> str:
    """Link a namespace that is no session, with two addresses of the pool that are free by all odds; its own one."""
    first = 2 + secrets.randbelow(pool.num_addresses - 4)
    here, there = str(pool[first]), str(pool[first + 1])
    with Rtnetlink() as host:
        pair = add_veth(
            name, _HERE_MAC, peer="peer", peer_mac=_STRANGER_MAC, peer_netns=netns, mtu=1500, alias="waypoint probe"
        )
        host.batch([*pair, raise_link(name)])
        host.batch(_towards(socket.if_nametoindex(name), here, there, _STRANGER_MAC))

    def inside() -> None:
        index = socket.if_nametoindex("peer")
        with Rtnetlink() as link:
            link.batch([raise_link("peer"), *_towards(index, there, here, _HERE_MAC), add_default_route(index, here)])

    in_netns(netns, inside)
    with Rtnetlink() as host:
        host.wait_until_up(name)
    return there


def _towards(index: int, own: str, other: str, mac: str) -> list[Message]:
    return [add_address(index, own, 32), add_host_route(index, other, own), add_neighbour(index, other, mac)]


def _echo(session: int, stranger: int, address: str) -> bool:
    def datagram() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.settimeout(_ANSWER_DEADLINE_S)
        return made

    with in_netns(session, datagram) as asks, in_netns(stranger, datagram) as answers:
        answers.bind((address, 0))
        asks.connect(answers.getsockname())
        try:
            asks.send(b"question")
            question, sender = answers.recvfrom(64)
            answers.sendto(b"answer to " + question, sender)
            return asks.recv(64) == b"answer to question"
        except OSError:
            return False


def _refusal() -> HostUnsupported:
    chains = blocking_chains()
    if not chains:
        return HostUnsupported(
            "network nat: a session's packets do not get through this host, and no chain that drops them was found; "
            "compare `nft list ruleset` and docs/network.md",
            feature="nat",
        )
    fix = "; ".join(_opening(chain) for chain in chains)
    return HostUnsupported(
        f"network nat: this host's firewall drops what it forwards ({', '.join(chains)}), which no rule of Waypoint's "
        f"own can overrule; let its links through with `{fix}`, see docs/network.md",
        fix=fix,
        feature="nat",
    )


def _opening(chain: str) -> str:
    """The command that lets sessions through somebody else's chain, in the tool that owns the chain."""
    iptables = {"ip filter FORWARD": "iptables", "iptables-legacy filter FORWARD": "iptables-legacy"}.get(chain)
    if iptables:
        return (
            f"{iptables} -I FORWARD -i {LINK_PREFIX}+ -j ACCEPT; "
            f"{iptables} -I FORWARD -o {LINK_PREFIX}+ -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
        )
    return (
        f"nft insert rule {chain} iifname '{LINK_PREFIX}*' accept; "
        f"nft insert rule {chain} oifname '{LINK_PREFIX}*' ct state related,established accept"
    )
