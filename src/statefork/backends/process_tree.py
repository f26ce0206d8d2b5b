"""What the host's /proc says of a process and all below it: who they are, and whom they are connected to."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Connections", "command_lines", "connections_of", "inside_pid", "signal_each", "tree_pids"]

_ESTABLISHED = "01"


def tree_pids(root: int) -> list[int]:
    """The process itself first. What ends or begins while we look may or may not be in it."""
    found = [root]
    for pid in found:
        for task in _listed(Path(f"/proc/{pid}/task")):
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def command_lines(pids: Iterable[int]) -> tuple[str, ...]:
    return tuple(line for pid in pids if (line := _command_line(pid)))


def _command_line(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words)[:200]


def inside_pid(pid: int) -> int:
    """A process's number in its own pid namespace; -1 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return -1
    return next(int(line.split()[-1]) for line in status.splitlines() if line.startswith("NSpid:"))


def signal_each(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@dataclass(frozen=True, slots=True)
class Connections:
    """Established TCP connections of a process tree."""

    inside: int
    """Ends whose other end is in the tree too."""
    outside: tuple[str, ...]
    """In words, those that lead out of it."""


def connections_of(pids: Iterable[int]) -> Connections:
    """Only sockets that these processes hold: a network namespace may have others in it."""
    pids = list(pids)
    held = {inode for pid in pids for inode in _socket_inodes(pid)}
    ends: dict[tuple[str, str], str] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pids[0]}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED and fields[9] in held:
                    ends[_end(fields[1]), _end(fields[2])] = _end(fields[2])
    outside = tuple(f"tcp connection to {peer}" for (ours, theirs), peer in ends.items() if (theirs, ours) not in ends)
    return Connections(len(ends) - len(outside), outside)


def _socket_inodes(pid: int) -> list[str]:
    found = []
    for descriptor in _listed(Path(f"/proc/{pid}/fd")):
        with contextlib.suppress(OSError):
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                found.append(target[len("socket:[") : -1])
    return found


def _end(field: str) -> str:
    """The kernel prints addresses as 32-bit words in the host's byte order."""
    address, port = field.split(":")
    raw = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
    found = ipaddress.ip_address(raw)
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return f"{found} port {int(port, 16)}"


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []
