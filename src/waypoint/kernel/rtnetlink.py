"""The few rtnetlink messages that a session's network needs, packed by hand.

`ip -batch` costs a process per namespace and pyroute2 0.2 s of import, both on the path of every restore
(docs/decisions/network-nat.md). Here all messages of one namespace go out in one `sendmsg`: the kernel works through
them in that one system call, so a process that is killed leaves either none or all of them done.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from waypoint.errors import KernelError

__all__ = [
    "Link",
    "Message",
    "Rtnetlink",
    "add_address",
    "add_default_route",
    "add_host_route",
    "add_neighbour",
    "add_veth",
    "delete_link",
    "delete_marked",
    "link_without_ipv6",
    "mark_link",
    "raise_link",
]

_HEADER = struct.Struct("=IHHII")
_IFINFO = struct.Struct("=BxHiII")

_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_EXCL, _CREATE = 0x200, 0x400
_NESTED = 0x8000
_ERROR, _DONE = 2, 3
_NEWLINK, _DELLINK, _GETLINK, _NEWADDR, _NEWROUTE, _NEWNEIGH = 16, 17, 18, 20, 24, 28
_IFF_UP = 1
_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
_OPERATIONAL = b"\x06"
_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Message:
    """One request. `what` is said in the error; with `optional` a refusal is no error."""

    what: str
    kind: int
    flags: int
    body: bytes
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    index: int
    name: str
    alias: str


def _attr(kind: int, value: bytes) -> bytes:
    size = 4 + len(value)
    return struct.pack("=HH", size, kind) + value + b"\0" * (-size % 4)


def _nest(kind: int, *attrs: bytes) -> bytes:
    return _attr(kind | _NESTED, b"".join(attrs))


def _text(value: str) -> bytes:
    return value.encode() + b"\0"


def _mac(value: str) -> bytes:
    return bytes.fromhex(value.replace(":", ""))


def _ip(value: str) -> bytes:
    return socket.inet_pton(socket.AF_INET, value)


def _link(index: int = 0, flags: int = 0, change: int = 0) -> bytes:
    return _IFINFO.pack(socket.AF_UNSPEC, 0, index, flags, change)


def add_veth(name: str, mac: str, *, peer: str, peer_mac: str, peer_netns: int, mtu: int, alias: str) -> list[Message]:
    """A pair with one end here and one born in the namespace `peer_netns` (a descriptor); both down.

    The alias is a second message because the kernel ignores it at creation; one `sendmsg` carries both.
    """
    end = _link() + _attr(3, _text(peer)) + _attr(1, _mac(peer_mac)) + _attr(4, struct.pack("=I", mtu))
    end += _attr(28, struct.pack("=I", peer_netns))
    info = _nest(18, _attr(1, b"veth"), _nest(2, _attr(1, end)))
    body = _link() + _attr(3, _text(name)) + _attr(1, _mac(mac)) + _attr(4, struct.pack("=I", mtu)) + info
    return [
        Message(f"create the link {name}", _NEWLINK, _CREATE | _EXCL, body),
        Message(f"label the link {name}", _NEWLINK, 0, _link() + _attr(3, _text(name)) + _attr(20, alias.encode())),
    ]


def link_without_ipv6(name: str) -> Message:
    """No link-local address when the link comes up. Optional: the kernel may have no IPv6 at all."""
    ipv6 = _nest(26, _nest(socket.AF_INET6, _attr(8, b"\x01")))
    return Message(f"keep IPv6 off {name}", _NEWLINK, 0, _link() + _attr(3, _text(name)) + ipv6, optional=True)


def raise_link(name: str) -> Message:
    return Message(f"bring up {name}", _NEWLINK, 0, _link(0, _IFF_UP, _IFF_UP) + _attr(3, _text(name)))


def delete_link(name: str) -> Message:
    return Message(f"delete the link {name}", _DELLINK, 0, _link() + _attr(3, _text(name)))


def mark_link(name: str, group: int) -> Message:
    """Put a link into a group. Optional: it may have gone by itself."""
    body = _link() + _attr(3, _text(name)) + _attr(27, struct.pack("=I", group))
    return Message(f"mark the link {name}", _NEWLINK, 0, body, optional=True)


def delete_marked(group: int) -> Message:
    """All links of a group at once, which costs the kernel hardly more than one. Optional: there may be none left."""
    body = _link() + _attr(27, struct.pack("=I", group))
    return Message(f"delete the links of group {group}", _DELLINK, 0, body, optional=True)


def add_address(index: int, address: str, prefix: int) -> Message:
    """A /32 gets no connected route."""
    no_prefix_route = 0x200 if prefix == 32 else 0
    body = struct.pack("=BBBBI", socket.AF_INET, prefix, 0, 0, index)
    body += _attr(2, _ip(address)) + _attr(1, _ip(address)) + _attr(8, struct.pack("=I", no_prefix_route))
    return Message(f"give the address {address}", _NEWADDR, _CREATE | _EXCL, body)


def _route(prefix: int, scope: int, *attrs: bytes) -> bytes:
    main_table, static, unicast = 254, 4, 1
    head = struct.pack("=BBBBBBBBI", socket.AF_INET, prefix, 0, 0, main_table, static, scope, unicast, 0)
    return head + b"".join(attrs)


def add_host_route(index: int, address: str, source: str) -> Message:
    """A route to one address; refused with EEXIST if any route to it exists, whatever its device."""
    link_scope = 253
    attrs = (_attr(1, _ip(address)), _attr(4, struct.pack("=i", index)), _attr(7, _ip(source)))
    return Message(f"route {address}", _NEWROUTE, _CREATE | _EXCL, _route(32, link_scope, *attrs))


def add_default_route(index: int, gateway: str) -> Message:
    attrs = (_attr(5, _ip(gateway)), _attr(4, struct.pack("=i", index)))
    return Message(f"route by {gateway}", _NEWROUTE, _CREATE | _EXCL, _route(0, 0, *attrs))


def add_neighbour(index: int, address: str, mac: str) -> Message:
    """A permanent entry: no ARP, so nothing that a strict rp_filter could leave unanswered."""
    permanent = 0x80
    body = struct.pack("=BxxxiHBB", socket.AF_INET, index, permanent, 0, 0)
    body += _attr(1, _ip(address)) + _attr(2, _mac(mac))
    return Message(f"name the neighbour {address}", _NEWNEIGH, _CREATE | _EXCL, body)


class Rtnetlink:
    """A netlink socket of the namespace in which it was opened, whichever thread uses it later."""

    def __init__(self) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._socket = socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)
        for option in (_CAP_ACK, _EXT_ACK):
            self._socket.setsockopt(_SOL_NETLINK, option, 1)
        self._socket.settimeout(_DEADLINE_S)

    def __enter__(self) -> Rtnetlink:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def batch(self, messages: Sequence[Message]) -> None:
        """Do all of them in order; KernelError (with `details["errno"]`) for the first that was refused."""
        packed = b"".join(
            _HEADER.pack(_HEADER.size + len(m.body), m.kind, m.flags | _REQUEST | _ACK, number, 0) + m.body
            for number, m in enumerate(messages)
        )
        self._socket.send(packed)
        refused: dict[int, tuple[int, str]] = {}
        answered = 0
        while answered < len(messages):
            for kind, sequence, body in self._receive():
                if kind != _ERROR:
                    continue
                answered += 1
                code = -struct.unpack_from("=i", body)[0]
                if code and not messages[sequence].optional:
                    refused[sequence] = (code, _words(body))
        if refused:
            first = min(refused)
            code, words = refused[first]
            raise KernelError(
                f"cannot {messages[first].what}: {words or os.strerror(code)} ({errno.errorcode.get(code, code)})",
                errno=code,
            )

    def wait_until_up(self, name: str) -> None:
        """Until the link really sends. Before, what is sent is dropped without a word.

        The end of a pair that came up first starts to send only when the kernel's link watch has seen the other end;
        since Linux 6.8 the question itself makes it look.
        """
        body = _link() + _attr(3, _text(name))
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            self._socket.send(_HEADER.pack(_HEADER.size + len(body), _GETLINK, _REQUEST, 0, 0) + body)
            for kind, _, answer in self._receive():
                if kind == _NEWLINK and dict(_attrs(answer[_IFINFO.size :])).get(16) == _OPERATIONAL:
                    return
                if kind == _ERROR:
                    code = -struct.unpack_from("=i", answer)[0]
                    raise KernelError(f"the link {name} is gone: {os.strerror(code)}", errno=code)
            if time.monotonic() > deadline:
                raise KernelError(f"the link {name} does not come up within {_DEADLINE_S:.0f} s")
            time.sleep(0.0002)

    def links(self) -> list[Link]:
        """All veth links of the namespace."""
        body = _link() + _nest(18, _attr(1, b"veth"))
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), _GETLINK, _REQUEST | _DUMP, 0, 0) + body)
        found: list[Link] = []
        while True:
            for kind, _, body in self._receive():
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    code = -struct.unpack_from("=i", body)[0]
                    raise KernelError(f"cannot list the links: {os.strerror(code)}", errno=code)
                index = _IFINFO.unpack_from(body)[2]
                attrs = dict(_attrs(body[_IFINFO.size :]))
                name = attrs.get(3, b"").rstrip(b"\0").decode()
                alias = attrs.get(20, b"").rstrip(b"\0").decode(errors="replace")
                found.append(Link(index, name, alias))

    def _receive(self) -> Iterator[tuple[int, int, bytes]]:
        data = self._socket.recv(1 << 18)
        while len(data) >= _HEADER.size:
            size, kind, _, sequence, _ = _HEADER.unpack_from(data)
            yield kind, sequence, data[_HEADER.size : size]
            data = data[(size + 3) & ~3 :]


def _attrs(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        size, kind = struct.unpack_from("=HH", data)
        yield kind & 0x3FFF, data[4:size]
        data = data[(size + 3) & ~3 :]


def _words(body: bytes) -> str:
    """The kernel's own explanation, which follows the (capped) echo of the request's header."""
    return dict(_attrs(body[4 + _HEADER.size :])).get(1, b"").rstrip(b"\0").decode(errors="replace")
