"""Network `nat`: a session has its own address behind the host, the same in every session and every fork.

Inside, `eth0` is always 10.77.0.2/24 by 10.77.0.1, with the same MAC address, so that a restored process finds what it
knew. The session's own network namespace translates that address to one of a pool that is unique on the host, with its
own connection table; the host sees plain unique addresses, routes them, and masquerades them on the way out
(docs/decisions/network-nat.md). The route on the host *is* the claim on an address: the kernel refuses a second one.

All that belongs to one session hangs on its network namespace: the veth pair, the route, the neighbours and the
session's rules go when the last process of the session goes. `sweep_nat` is for links whose session never came to life.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2s
from typing import TYPE_CHECKING

from waypoint.errors import Exists, KernelError, UsageError
from waypoint.kernel import nat_host
from waypoint.kernel.nat_host import LINK_PREFIX, nat_lock, prepare_host, release_host, uplink_mtu
from waypoint.kernel.netns import in_netns, set_up_here
from waypoint.kernel.nftables import run_nft
from waypoint.kernel.rtnetlink import (
    Rtnetlink,
    add_address,
    add_default_route,
    add_host_route,
    add_neighbour,
    add_veth,
    delete_link,
    delete_marked,
    link_without_ipv6,
    mark_link,
    raise_link,
)

if TYPE_CHECKING:
    from ipaddress import IPv4Network

__all__ = [
    "DEFAULT_POOL",
    "GATEWAY",
    "INSIDE_ADDRESS",
    "INSIDE_INTERFACE",
    "NatLink",
    "attach_nat",
    "detach_nat",
    "nat_keys",
    "sweep_nat",
]

INSIDE_INTERFACE = "eth0"
INSIDE_ADDRESS = "10.77.0.2"
INSIDE_PREFIX = 24
INSIDE_MAC = "02:57:50:00:00:02"
GATEWAY = "10.77.0.1"
GATEWAY_MAC = "02:57:50:00:00:01"
DEFAULT_POOL = "198.18.0.0/16"
"""Set aside for benchmarks of routers (RFC 2544), so hardly ever a network that somebody wants to reach."""

_ALIAS = "waypoint nat "
_ALIAS_MAX = 255
_DOOMED = int.from_bytes(b"wypt", "big")
"""The group of links (see `ip link help`) into which `sweep_nat` puts what it deletes."""
_AT_ONCE = 64
"""Answers to more messages than this might not fit the socket's buffer."""

_INSIDE_RULES = """
create table ip waypoint
table ip waypoint {{
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "{interface}" ip saddr {inside} snat to {address}
  }}
  chain output {{
    type nat hook output priority -100; policy accept;
    ip daddr {gateway} dnat to {host}
  }}
  chain prerouting {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname "{interface}" ip saddr {host} ip daddr {address} dnat to {inside}
  }}
}}
"""
"""Only the host itself is let in: an answer that comes late, to a session that had the pool address before, is not.
"""


@dataclass(frozen=True, slots=True)
class NatLink:
    key: str
    interface: str
    """The host's end of the pair."""
    address: str
    """Where the host (and only the host) reaches the session; unique on the host while the session lives."""
    forwarding_switched_on: bool
    """net.ipv4.ip_forward was off and is now on: the user should be told."""


def link_name(key: str) -> str:
    return LINK_PREFIX + blake2s(key.encode(), digest_size=5).hexdigest()


def attach_nat(netns_path: str, key: str, *, pool: str = DEFAULT_POOL) -> NatLink:
    """Give the network namespace its `eth0`; it works when this returns.

    `key` names this very namespace, not the session through its life: while a restore brings up the new one the old
    one still has its link. Exists if the key or the namespace has a link already.
    """
    if len((_ALIAS + key).encode()) > _ALIAS_MAX or not key.isprintable():
        raise UsageError(f"nat key {key!r}: at most {_ALIAS_MAX - len(_ALIAS)} printable characters")
    network = _network(pool)
    with nat_lock(exclusive=False):
        switched_on = prepare_host(str(network))
        nat_host.step("host")
        name = link_name(key)
        with Rtnetlink() as host:
            _create_pair(host, netns_path, key, name)
            try:
                nat_host.step("link")
                address = _claim_address(host, name, network)
                nat_host.step("address")
                in_netns(netns_path, lambda: _set_up_inside(address, str(network[1])))
                host.wait_until_up(name)
                nat_host.step("inside")
            except BaseException:
                with suppress(KernelError):
                    host.batch([delete_link(name)])
                raise
    return NatLink(key, name, address, switched_on)


def _network(pool: str) -> IPv4Network:
    from ipaddress import IPv4Network

    try:
        network = IPv4Network(pool)
    except ValueError as error:
        raise UsageError(f"nat pool {pool!r}: {error}; give an IPv4 network such as {DEFAULT_POOL}") from error
    if network.prefixlen > 29 or network.overlaps(IPv4Network(f"{GATEWAY}/{INSIDE_PREFIX}", strict=False)):
        raise UsageError(f"nat pool {pool}: needs at least 8 addresses, none of them of the sessions' own network")
    return network


def _create_pair(host: Rtnetlink, netns_path: str, key: str, name: str) -> None:
    try:
        netns = os.open(netns_path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise KernelError(
            f"nat {key}: no network namespace {netns_path}: {error.strerror}; did the session die?"
        ) from error
    try:
        pair = add_veth(
            name,
            GATEWAY_MAC,
            peer=INSIDE_INTERFACE,
            peer_mac=INSIDE_MAC,
            peer_netns=netns,
            mtu=uplink_mtu(),
            alias=_ALIAS + key,
        )
        host.batch([*pair, link_without_ipv6(name), raise_link(name)])
    except KernelError as error:
        if error.details.get("errno") in (errno.EEXIST, errno.EBUSY):
            raise Exists(
                f"nat {key}: the key or the namespace {netns_path} has a link already; detach it first"
            ) from error
        raise
    finally:
        os.close(netns)


def _claim_address(host: Rtnetlink, name: str, network: IPv4Network) -> str:
    """The first free address of the pool, from a place that the name decides, so that a freed one is not taken next."""
    index = socket.if_nametoindex(name)
    router = str(network[1])
    host.batch([add_address(index, router, 32)])
    usable = network.num_addresses - 3  # not the network's own, the router's and the broadcast address
    start = int(name.removeprefix(LINK_PREFIX), 16)
    for offset in range(usable):
        address = str(network[2 + (start + offset) % usable])
        try:
            host.batch([add_host_route(index, address, router)])
        except KernelError as error:
            if error.details.get("errno") != errno.EEXIST:
                raise
            continue
        host.batch([add_neighbour(index, address, INSIDE_MAC)])
        return address
    raise KernelError(f"all {usable} addresses of the nat pool {network} are taken; configure a larger pool")


def _set_up_inside(address: str, router: str) -> None:
    set_up_here()
    index = socket.if_nametoindex(INSIDE_INTERFACE)
    with Rtnetlink() as inside:
        inside.batch(
            [
                link_without_ipv6(INSIDE_INTERFACE),
                raise_link(INSIDE_INTERFACE),
                add_address(index, INSIDE_ADDRESS, INSIDE_PREFIX),
                add_neighbour(index, GATEWAY, GATEWAY_MAC),
                add_default_route(index, GATEWAY),
            ]
        )
    rules = _INSIDE_RULES.format(
        interface=INSIDE_INTERFACE, inside=INSIDE_ADDRESS, gateway=GATEWAY, address=address, host=router
    )
    if "table ip waypoint" in run_nft("list tables ip"):  # a second attach; deleting costs 10 ms, so only then
        rules = "delete table ip waypoint\n" + rules
    run_nft(rules)


def detach_nat(key: str) -> None:
    """Remove the link, whether or not its session lives; the host's table goes with the last one.

    The kernel takes some 16 ms to unregister a link. Where that matters let the session's end take it away, and sweep.
    """
    with Rtnetlink() as host:
        _delete(host, link_name(key))
    release_host()


def _delete(host: Rtnetlink, name: str) -> None:
    try:
        host.batch([delete_link(name)])
    except KernelError as error:
        if error.details.get("errno") != errno.ENODEV:
            raise


def nat_keys() -> set[str]:
    """Keys of all links on this host, those of other stores too."""
    with Rtnetlink() as host:
        return {key for _, key in _our_links(host)}


def _our_links(host: Rtnetlink) -> list[tuple[str, str]]:
    return [
        (link.name, link.alias.removeprefix(_ALIAS))
        for link in host.links()
        if link.name.startswith(LINK_PREFIX) and link.alias.startswith(_ALIAS)
    ]


def sweep_nat(live: Set[str], *, scope: str = "", pool: str = DEFAULT_POOL) -> list[str]:
    """After a crash: remove every link whose key starts with `scope` and is not live; the keys that went.

    `scope` keeps one store's sweep off another store's sessions: let keys begin with the store's id. If links are left,
    the host's table is made again in case a reload of its firewall took it.
    """
    with Rtnetlink() as host:
        doomed = [(name, key) for name, key in _our_links(host) if key.startswith(scope) and key not in live]
        for first in range(0, len(doomed), _AT_ONCE):
            host.batch([mark_link(name, _DOOMED) for name, _ in doomed[first : first + _AT_ONCE]])
        if doomed:
            nat_host.step("unlink")
            host.batch([delete_marked(_DOOMED)])
    if not release_host():
        with nat_lock(exclusive=False):
            prepare_host(str(_network(pool)))
    return [key for _, key in doomed]
