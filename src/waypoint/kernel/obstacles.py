"""Find what no snapshot can carry: which process holds it, what it is, and what to do about it.

CRIU says where in its code it gave up. A person wants to know which program to close. So after a dump has failed the
processes are looked at here, at leisure: the session is running again.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from dataclasses import dataclass

from waypoint.errors import NotCapturable
from waypoint.kernel.syscalls import pidfd_getfd

__all__ = ["Obstacle", "find_obstacles", "named_processes", "refuse_queues"]

MAX_PIPES = 1024
"""CRIU keeps the pipes of a tree in an array of this size."""
_O_DIRECT = 0o40000
_NAMESPACES = ("user", "pid", "time")
_SAVED_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET)
_FAMILY_NAMES = {40: "a vsock socket", 38: "an AF_ALG socket", 44: "an AF_XDP socket", 31: "a Bluetooth socket"}
_PROTOCOL_NAMES = {262: "an MPTCP socket", 132: "an SCTP socket", 136: "a UDP-Lite socket", 33: "a DCCP socket"}

_BY_LINK = (
    (r"anon_inode:\[io_uring\]", "an io_uring", "close it, or run the program without io_uring (Node: UV_USE_IO_URING=0)"),
    (r"anon_inode:\[perf_event\]", "a perf event counter", "stop the profiler"),
    (r"anon_inode:\[userfaultfd\]", "a userfaultfd", "close it"),
    (r"anon_inode:kvm-\w+|/dev/kvm", "a KVM device", "shut down the virtual machine"),
    (r"/dev/fuse", "an open /dev/fuse", "unmount the FUSE file system"),
    (r"anon_inode:bpf[-_]prog|anon_inode:bpf_link", "a loaded BPF program", "unload it"),
    (r"anon_inode:\[landlock-ruleset\]", "a Landlock ruleset", "close it"),
    (r"anon_inode:seccomp notify", "a seccomp listener", "close it"),
    (r"/dev/tty$", "an open /dev/tty", "let it use its terminal by name ($(tty)), or close it"),
    (r"/secretmem \(deleted\)", "secret memory (memfd_secret)", "close it, and keep the secret in plain memory"),
    (r"/dev/(?!null|zero|full|random|urandom|tty|pts/|ptmx|shm/|mqueue/|fd/)", "an open device", "close it"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Obstacle:
    """`process` reads `process 42 (gdb ./a.out)`, by its number inside."""

    process: str
    thing: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.process} {self.thing}: {self.remedy}"


def find_obstacles(init_pid: int) -> list[Obstacle]:
    """Of the tree under `init_pid`, nested namespaces included. Processes that end meanwhile are left out."""
    found: list[Obstacle] = []
    pipes: set[str] = set()
    queues = _queue_device(init_pid)
    level = len(_status(init_pid, "NSpid").split()) - 1
    tree = _descendants(init_pid)
    # sockets by abstract names reach as far as the network namespace does
    own = None if os.readlink(f"/proc/{init_pid}/ns/net") != os.readlink("/proc/self/ns/net") else frozenset(tree)
    for pid in tree:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            found += _of_process(pid, init_pid, level)
            found += _of_descriptors(pid, pipes, queues, level, own)
    if len(pipes) > MAX_PIPES:
        found.append(Obstacle("the session", f"has {len(pipes)} pipes", f"a snapshot carries at most {MAX_PIPES}; close some"))
    return found


def refuse_queues(init_pid: int) -> None:
    """CRIU would drop POSIX message queues without a word; NotCapturable names them."""
    try:
        queues = sorted(os.listdir(f"/proc/{init_pid}/root/dev/mqueue"))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    if queues:
        shown = ", ".join(f"/dev/mqueue/{name}" for name in queues[:5])
        raise NotCapturable(
            "the session has POSIX message queues, which a snapshot cannot carry; it goes on untouched. "
            f"Remove {shown}, or use System V message queues",
            queues=queues,
        )


def named_processes(text: str) -> list[str]:
    """The processes that CRIU's words name by their number on the host."""
    found = []
    for word in dict.fromkeys(re.findall(r"\bpid:? (\d+)", text)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append(_named(int(word)))
    return found


def _descendants(init_pid: int) -> list[int]:
    """By parents, not by namespace: a process in a nested pid namespace must be found too."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                with open(f"/proc/{entry.name}/stat", "rb") as stat:
                    text = stat.read()
                children.setdefault(int(text[text.rindex(b")") + 4 :].split()[0]), []).append(int(entry.name))
    found = [init_pid]
    for pid in found:
        found += sorted(children.get(pid, ()))
    return found


def _status(pid: int, key: str) -> str:
    with open(f"/proc/{pid}/status", errors="replace") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{key}:")), "")


def _named(pid: int, level: int = -1) -> str:
    """`level`: how deep the session's pid namespace is nested; in a namespace below it a process has one number more."""
    with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
        command = cmdline.read(160).replace(b"\0", b" ").decode(errors="replace").strip()
    numbers = _status(pid, "NSpid").split()
    name = command or _status(pid, "Name")
    if level >= len(numbers):
        return f"process {pid} of the host ({name})"
    return f"process {numbers[level]} ({name})"


def _of_process(pid: int, init_pid: int, level: int) -> list[Obstacle]:
    found = []
    tracer = _status(pid, "TracerPid")
    if tracer not in ("", "0"):
        by = _named(int(tracer), level)
        found.append(Obstacle(_named(pid, level), f"is being debugged by {by}", "detach the debugger, then try again"))
    for name in _NAMESPACES:
        if os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/{init_pid}/ns/{name}"):
            thing = f"is in a {name} namespace of its own"
            found.append(Obstacle(_named(pid, level), thing, "end it (nested containers and sandboxes cannot be carried)"))
            break
    with open(f"/proc/{pid}/maps", errors="replace") as lines:
        if any(line.endswith("/secretmem (deleted)\n") for line in lines):
            found.append(Obstacle(_named(pid, level), "has secret memory (memfd_secret)", "unmap it"))
    return found


def _of_descriptors(
    pid: int, pipes: set[str], queues: int, level: int, own: frozenset[int] | None
) -> list[Obstacle]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            link = os.readlink(f"/proc/{pid}/fd/{name}")
            reason = _of_link(pid, name, link, queues, own)
            if link.startswith("pipe:["):
                pipes.add(link)
            if reason is not None:
                thing, remedy = reason
                found.append(Obstacle(_named(pid, level), f"has {thing} (descriptor {name})", remedy))
    return found


def _of_link(pid: int, fd: str, link: str, queues: int, own: frozenset[int] | None) -> tuple[str, str] | None:
    if link.startswith("socket:["):
        return _of_socket(pid, int(fd), own)
    if link.startswith("pipe:["):
        with open(f"/proc/{pid}/fdinfo/{fd}") as info:
            flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags"))
        return ("a pipe in packet mode", "open it without O_DIRECT") if flags & _O_DIRECT else None
    if queues and link.startswith("/") and os.stat(f"/proc/{pid}/fd/{fd}").st_dev == queues:
        return f"the message queue {link}", "close it and remove it from /dev/mqueue"
    for pattern, thing, remedy in _BY_LINK:
        if re.match(pattern, link):
            return thing, remedy
    return None


def _of_socket(pid: int, fd: int, own: frozenset[int] | None) -> tuple[str, str] | None:
    try:
        with socket.socket(fileno=pidfd_getfd(pid, fd)) as sock:
            family = sock.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
            protocol = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
            if family == socket.AF_UNIX and own is not None:
                return _outside_peer(sock, own)
    except OSError:
        return None
    if family not in _SAVED_FAMILIES:
        return _FAMILY_NAMES.get(family, f"a socket of family {family}"), "close it"
    if family in (socket.AF_INET, socket.AF_INET6) and protocol in _PROTOCOL_NAMES:
        return _PROTOCOL_NAMES[protocol], "close it, and use TCP or UDP"
    return None


def _outside_peer(sock: socket.socket, own: frozenset[int]) -> tuple[str, str] | None:
    """The other end of a unix connection may be the host's: 0 where there is none, or none that can be seen from here."""
    peer = int(struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
    if peer == 0 or peer in own:
        return None
    who = f"process {peer} of the host"
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        who = f"{_named(peer, 0)} of the host"
    return f"a unix socket connected to {who}", "close it; a network of its own (`--network none` or `nat`) keeps sessions apart"


def _queue_device(init_pid: int) -> int:
    try:
        return os.stat(f"/proc/{init_pid}/root/dev/mqueue").st_dev
    except (FileNotFoundError, PermissionError):
        return 0
