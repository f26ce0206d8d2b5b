"""The TCP and UDP sockets that a session's processes hold, asked one by one.

/proc/net/tcp and the kernel's socket diagnosis walk the hash tables of the whole host, whoever asks: 4 ms for each question on a
host with many buckets. A session holds few sockets, and each answers for itself in microseconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from waypoint.kernel.processes import namespace_pids
from waypoint.kernel.syscalls import pidfd_getfd

__all__ = ["CLOSED", "LISTENING", "TIME_WAIT", "InetSocket", "inet_sockets"]

TIME_WAIT, CLOSED, LISTENING = 6, 7, 10
_STATE_BYTE = 0
_NAMES = {
    (socket.AF_INET, socket.IPPROTO_TCP): "tcp",
    (socket.AF_INET6, socket.IPPROTO_TCP): "tcp6",
    (socket.AF_INET, socket.IPPROTO_UDP): "udp",
    (socket.AF_INET6, socket.IPPROTO_UDP): "udp6",
}


@dataclass(frozen=True, slots=True)
class InetSocket:
    """`local` and `remote` read `127.0.0.1:8080`; `remote` is None when it is not connected. `state` is TCP's own."""

    kind: str
    state: int
    local: str
    remote: str | None
    inode: int


def inet_sockets(init_pid: int) -> list[InetSocket]:
    """Each socket once, whoever shares it. Sockets of processes that end meanwhile are left out."""
    seen: set[str] = set()
    found = []
    for pid in namespace_pids(init_pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for fd, link in _held(pid):
                if link not in seen:
                    seen.add(link)
                    with contextlib.suppress(OSError):
                        one = _inspect(pid, fd, int(link[8:-1]))
                        if one is not None:
                            found.append(one)
    return found


def _held(pid: int) -> Iterator[tuple[int, str]]:
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            link = os.readlink(f"/proc/{pid}/fd/{name}")
            if link.startswith("socket:["):
                yield int(name), link


def _inspect(pid: int, fd: int, inode: int) -> InetSocket | None:
    with socket.socket(fileno=pidfd_getfd(pid, fd)) as sock:
        kind = _NAMES.get((sock.family, sock.proto))
        if kind is None:
            return None
        state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[_STATE_BYTE] if kind.startswith("tcp") else 0
        try:
            remote: str | None = _shown(sock.getpeername())
        except OSError:
            remote = None
        return InetSocket(kind, state, _shown(sock.getsockname()), remote, inode)


def _shown(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    host, port = address[0].partition("%")[0], address[1]
    if ":" not in host:
        return f"{host}:{port}"
    words = socket.inet_pton(socket.AF_INET6, host).hex()
    return f"[{':'.join(words[i : i + 4] for i in range(0, 32, 4))}]:{port}"
