"""The host's half of `nat`: one nftables table per address pool, and IPv4 forwarding.

Everything is in tables of our own; no rule of anybody else is read for a decision or changed. A table is the same for
all sessions and all stores on the host (its name is made from its text), so it can be made by whoever comes first and
removed by whoever finds that no link is left. The rules know our links by the prefix of their names.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2s
from pathlib import Path

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel.nftables import run_nft
from waypoint.kernel.rtnetlink import Rtnetlink

__all__ = ["LINK_PREFIX", "blocking_chains", "nat_lock", "prepare_host", "release_host", "step", "uplink_mtu"]

LINK_PREFIX = "wypt"
"""Not `wp`: `wpan0` is somebody else's."""

_TABLE_PREFIX = "waypoint_nat_"
_FORWARDING_MARK = "waypoint_forwarding_was_off"
"""An empty table: the kernel remembers, as long as it runs and no longer, that it was Waypoint who switched it on."""

_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
_LOCK = Path("/run/waypoint-nat.lock")
_SIOCGIFMTU = 0x8921
_log = logging.getLogger(__name__)

_RULES = """
create table inet {table}
table inet {table} {{
  chain prerouting {{
    type filter hook prerouting priority raw; policy accept;
    iifname "{links}*" meta nfproto != ipv4 drop comment "no IPv6: a session could send router advertisements"
    iifname "{links}*" fib saddr . iif oif missing drop comment "no source address but its own"
  }}
  chain input {{
    type filter hook input priority filter - 5; policy accept;
    iifname "{links}*" ct state established,related accept
    iifname "{links}*" icmp type echo-request accept
    iifname "{links}*" meta l4proto {{ tcp, udp }} th dport 53 accept comment "the host may be the resolver"
    iifname "{links}*" drop comment "the host's own services"
  }}
  chain forward {{
    type filter hook forward priority filter - 5; policy accept;
    iifname "{links}*" oifname "{links}*" drop comment "sessions do not see each other"
    iifname "{links}*" ip daddr 169.254.0.0/16 meta l4proto != {{ tcp, udp }} drop
    iifname "{links}*" ip daddr 169.254.0.0/16 th dport != 53 drop comment "cloud metadata, except as resolver"
    iifname "{links}*" tcp flags syn tcp option maxseg size set rt mtu
    iifname "{links}*" accept
    oifname "{links}*" ct state established,related accept
    oifname "{links}*" drop comment "nothing comes in unasked"
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {pool} oifname != "{links}*" masquerade
  }}
}}
"""


@contextmanager
def nat_lock(*, exclusive: bool) -> Iterator[None]:
    """Shared by everyone who adds a link; exclusive for who takes the table away, lest it go under a new link."""
    descriptor = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def step(name: str) -> None:
    """The points between which a crash may fall; the fault tests replace this function. No work is done here."""


def _tables() -> set[str]:
    return set(re.findall(r"^table inet (\S+)$", run_nft("list tables inet"), re.MULTILINE))


def prepare_host(pool: str) -> bool:
    """Make the table and switch forwarding on, as far as they are not; True if forwarding was off.

    Only with `nat_lock` held.
    """
    rules = _RULES.format(table="{table}", links=LINK_PREFIX, pool=pool)
    table = _TABLE_PREFIX + blake2s(rules.encode(), digest_size=4).hexdigest()
    there = _tables()
    if table not in there:
        _create_table(table, rules)
        step("table")
    return _forward(_FORWARDING_MARK in there)


def _create_table(table: str, rules: str) -> None:
    try:
        run_nft(rules.replace("{table}", table))
    except KernelError:
        if table not in _tables():  # else another process came first, which `create table` makes certain
            raise


def _forward(marked: bool) -> bool:
    if _FORWARDING.read_text().strip() != "0":
        return False
    if not marked:
        run_nft(f"add table inet {_FORWARDING_MARK}")
        step("mark")
    try:
        _FORWARDING.write_text("1")
    except OSError as error:
        raise HostUnsupported(
            f"network nat needs IPv4 forwarding and cannot switch it on: {error.strerror}; "
            "run `sysctl -w net.ipv4.ip_forward=1` on the host",
            fix="sysctl -w net.ipv4.ip_forward=1",
            feature="ip_forward",
        ) from error
    _log.warning("switched net.ipv4.ip_forward on for network nat; it goes off with the last session that uses it")
    return True


def release_host() -> bool:
    """Remove our tables if no link of ours is left; forwarding goes back off if it was Waypoint who switched it on.

    It stays on if anybody else filters forwarded packets or translates addresses by now: they rely on it.
    False if there are links.
    """
    with nat_lock(exclusive=True):
        with Rtnetlink() as host:
            if any(link.name.startswith(LINK_PREFIX) for link in host.links()):
                return False
        there = _tables()
        if _FORWARDING_MARK in there and not _others_forward():
            _FORWARDING.write_text("0")
            step("unforward")
        ours = sorted(name for name in there if name.startswith(_TABLE_PREFIX) or name == _FORWARDING_MARK)
        if ours:
            run_nft("".join(f"delete table inet {name}\n" for name in ours))
        return True


def _chains() -> Iterator[tuple[str, str, str]]:
    """(family and table, chain, its `type ... hook ... policy` line) of every base chain that is not ours."""
    table = chain = ""
    for line in run_nft("list chains").splitlines():
        words = line.split()
        if words[:1] == ["table"]:
            table = f"{words[1]} {words[2]}"
        elif words[:1] == ["chain"]:
            chain = words[1]
        elif words[:1] == ["type"] and not table.startswith(f"inet {_TABLE_PREFIX}"):
            yield table, chain, line.strip()


def _legacy_tables() -> set[str]:
    try:
        return set(Path("/proc/thread-self/net/ip_tables_names").read_text().split())
    except OSError:
        return set()


def _others_forward() -> bool:
    """Whether somebody else has set up forwarding or address translation."""
    return bool(_legacy_tables()) or any(
        "hook forward" in kind or kind.startswith("type nat") for _, _, kind in _chains()
    )


def blocking_chains() -> list[str]:
    """Others' chains that drop what they do not know on its way through the host (Docker's, firewalld's, ufw's).

    An accept of ours cannot overrule them: a packet has to pass every chain at the hook.
    """
    found = [f"{table} {chain}" for table, chain, kind in _chains() if "hook forward" in kind and "policy drop" in kind]
    if "filter" in _legacy_tables():
        found.append("iptables-legacy filter FORWARD")
    return found


def uplink_mtu() -> int:
    """MTU of the link that the host's default route uses, so that a session need not discover it packet by packet."""
    routes = [line.split() for line in Path("/proc/thread-self/net/route").read_text().splitlines()[1:]]
    defaults = [(int(fields[6]), fields[0]) for fields in routes if fields[1] == fields[7] == "00000000"]
    if not defaults:
        return 1500
    request = struct.pack("16si", min(defaults)[1].encode(), 0)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            mtu: int = struct.unpack("16si", fcntl.ioctl(any_socket, _SIOCGIFMTU, request))[1]
    except OSError:
        return 1500
    return min(max(mtu, 576), 9000)
