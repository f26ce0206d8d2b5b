"""What a session's processes are and hold, read from /proc: for manifests, diffs, and to find what no dump can carry."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from waypoint.kernel.processes import namespace_pids, read_proc
from waypoint.kernel.sockets import LISTENING, inet_sockets

__all__ = ["describe", "descriptors", "held_files", "listening_ports", "mapped_files"]

_NAMELESS = " (deleted)"


def describe(init_pid: int, idmap: int, held: dict[int, dict[str, int]] | None = None) -> dict[str, Any]:
    """Processes, ports, mounts and mapped files of the tree under `init_pid`. Processes that end meanwhile are left out.

    `held`: what `descriptors` found a moment ago, of a tree that CRIU is at work on by now.
    """
    processes = []
    mapped: dict[str, list[int]] = {}
    for pid in namespace_pids(init_pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            found = _process(pid, idmap, None if held is None else held.get(pid, {}))
            if found is not None:
                processes.append(found)
                mapped.update(mapped_files(pid))
    return {
        "processes": processes,
        "listening": listening_ports(init_pid),
        "mounts": _mounts(init_pid),
        "mapped": mapped,
    }


def _process(pid: int, idmap: int, held: dict[str, int] | None) -> dict[str, Any] | None:
    status = {}
    with open(f"/proc/{pid}/status", errors="surrogateescape") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            status[key] = value.strip()
    if status["State"].startswith("X"):
        return None
    inside = int(status["NSpid"].split()[-1])
    parent = status["PPid"]
    ppid = 0
    if inside != 1:
        with open(f"/proc/{parent}/status") as lines:
            ppid = next(int(line.split()[-1]) for line in lines if line.startswith("NSpid"))
    with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
        argv = cmdline.read().split(b"\0")[:-1]
    zombie = status["State"].startswith("Z")
    return {
        "pid": inside,
        "ppid": ppid,
        "name": status["Name"],
        "argv": [word.decode(errors="surrogateescape") for word in argv],
        "state": "zombie" if zombie else "alive",
        "uid": int(status["Uid"].split()[0]) - idmap,
        "pgid": int(status["NSpgid"].split()[-1]),
        "sid": int(status["NSsid"].split()[-1]),
        "threads": int(status.get("Threads", "0")),
        "cwd": "" if zombie else os.readlink(f"/proc/{pid}/cwd"),
        "exe": "" if zombie else os.readlink(f"/proc/{pid}/exe"),
        "descriptors": {} if zombie else _descriptors(pid) if held is None else held,
        "memory_kib": int(status.get("VmRSS", "0 kB").split()[0]),
    }


def descriptors(init_pid: int, nameless: list[int] | None = None) -> dict[int, dict[str, int]]:
    """How many descriptors of each kind each process has, by its pid on the host; whose file has lost its name is added to `nameless`.

    CRIU opens some of its own inside the processes that it dumps: this is asked before it does.
    """
    found = {}
    for pid in namespace_pids(init_pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            found[pid] = _descriptors(pid, nameless)
    return found


def _descriptors(pid: int, nameless: list[int] | None = None) -> dict[str, int]:
    """How many descriptors of each kind: `socket`, `pipe`, `anon_inode:[eventfd]`, `file`."""
    kinds: Counter[str] = Counter()
    base = f"/proc/{pid}/fd"
    for name in os.listdir(base):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"{base}/{name}")
            kinds["file" if target.startswith("/") else target.split(":[")[0]] += 1
            if nameless is not None and target.endswith(_NAMELESS):
                nameless.append(pid)
    return dict(kinds)


def mapped_files(pid: int) -> dict[str, list[int]]:
    """Programs and libraries that the process has mapped: path -> [size, mtime_ns] as seen in the session.

    Without those that have no name any more: CRIU saves them whole.
    """
    found: dict[str, list[int]] = {}
    with open(f"/proc/{pid}/maps", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) < 6 or not fields[5].startswith("/") or fields[5] in found or fields[4] == "0":
                continue
            path = fields[5]
            if path.endswith(" (deleted)") or path.startswith(("/dev/", "/SYSV", "/memfd:")):
                continue
            with contextlib.suppress(OSError):
                st = os.lstat(f"/proc/{pid}/root{path}")
                if st.st_nlink:
                    found[path] = [st.st_size, st.st_mtime_ns]
    return found


def held_files(pids: Iterable[int]) -> tuple[bool, bool]:
    """Of what these processes hold: whether a file is mapped shared and writable, which can change without its times
    changing; and whether one has lost its name, for which CRIU may make another while it dumps."""
    shared = nameless = False
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            text = read_proc(f"/proc/{pid}/maps")
            nameless = nameless or f"{_NAMELESS}\n".encode() in text or os.readlink(f"/proc/{pid}/exe").endswith(_NAMELESS)
            for kind in (b" rw-s ", b" rwxs "):
                if kind in text and any(kind in line and b" /" in line for line in text.splitlines()):
                    shared = True
    return shared, nameless


def listening_ports(init_pid: int) -> list[str]:
    """`tcp 0.0.0.0:8000`: where the session's processes can be reached."""
    found = set()
    for one in inet_sockets(init_pid):
        bound = not one.local.endswith(":0")
        if one.state == LISTENING if one.kind.startswith("tcp") else bound:
            found.add(f"{one.kind} {one.local}")
    return sorted(found)


def _mounts(init_pid: int) -> list[str]:
    found = []
    with open(f"/proc/{init_pid}/mountinfo", errors="surrogateescape") as lines:
        for line in lines:
            fields, _, rest = line.partition(" - ")
            found.append(f"{fields.split()[4]} {rest.split()[0]}")
    return found
