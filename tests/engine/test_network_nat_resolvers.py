"""What a session's /etc/resolv.conf and its loopback look like."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from waypoint.errors import KernelError
from waypoint.kernel.network import in_netns, loopback_up, new_netns, resolv_conf


def files(folder: Path, *texts: str | None) -> list[Path]:
    paths = [folder / str(number) for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        if text is not None:
            path.write_text(text)
    return paths


def test_a_plain_file_keeps_its_servers_search_and_options(tmp_path: Path) -> None:
    sources = files(
        tmp_path,
        "# by hand\nnameserver 192.0.2.53\nnameserver 192.0.2.54\nsearch a.example b.example\noptions ndots:2\n",
    )
    expected = b"nameserver 192.0.2.53\nnameserver 192.0.2.54\nsearch a.example b.example\noptions ndots:2\n"
    assert resolv_conf(sources=sources) == expected


@pytest.mark.parametrize("stub", ["127.0.0.53", "127.0.0.1", "::1", "0.0.0.0"])
def test_a_stub_on_loopback_is_replaced_by_its_upstreams(stub: str, tmp_path: Path) -> None:
    first = f"nameserver {stub}\noptions edns0\nsearch home.example\n"
    sources = files(tmp_path, first, None, "nameserver 198.51.100.1\nsearch other.example\n")
    expected = b"nameserver 198.51.100.1\noptions edns0\nsearch home.example\n"
    assert resolv_conf(sources=sources) == expected


def test_loopback_and_ipv6_servers_are_left_out_beside_usable_ones(tmp_path: Path) -> None:
    sources = files(tmp_path, "nameserver 127.0.0.1\nnameserver 2001:db8::53\nnameserver 192.0.2.53\nnameserver\n")
    assert resolv_conf(sources=sources) == b"nameserver 192.0.2.53\n"


def test_the_fallback_is_used_only_when_nothing_is_left(tmp_path: Path) -> None:
    empty = files(tmp_path, "nameserver 127.0.0.1\n")
    assert resolv_conf(["192.0.2.1"], sources=empty) == b"nameserver 192.0.2.1\n"
    said = resolv_conf(sources=empty)
    assert said.startswith(b"#") and b"nameserver" not in said
    full = files(tmp_path, "nameserver 192.0.2.53\n")
    assert resolv_conf(["192.0.2.1"], sources=full) == b"nameserver 192.0.2.53\n"


def test_this_hosts_own_file_names_no_loopback_resolver() -> None:
    lines = [line.split() for line in resolv_conf().decode().splitlines() if line.startswith("nameserver")]
    assert all(not server.startswith("127.") for _, server in lines)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_loopback_up_in_a_fresh_namespace() -> None:
    netns = new_netns()
    here = Path("/proc/thread-self/ns/net").readlink()

    def echo() -> bytes:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.settimeout(3)
            one.bind(("127.0.0.1", 0))
            one.sendto(b"ping", one.getsockname())
            return one.recv(9)

    try:
        with pytest.raises(OSError):
            in_netns(netns, echo)
        loopback_up(netns)
        loopback_up(netns)
        assert in_netns(netns, echo) == b"ping"
        settings = Path("/proc/sys/net/ipv4")
        assert in_netns(netns, (settings / "ip_unprivileged_port_start").read_text).strip() == "0"
        assert Path("/proc/thread-self/ns/net").readlink() == here
        with pytest.raises(KernelError, match="ended"):
            loopback_up("/proc/4194305/ns/net")
    finally:
        os.close(netns)
