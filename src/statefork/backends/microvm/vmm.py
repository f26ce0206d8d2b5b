"""What a virtual machine monitor has to do for the driver, and the values that pass between the two.

A *Machine* is one running virtual machine in a directory of its own. A *Saved* is what a VMM keeps of one instant: the
disk, and unless only files were asked for, the memory and the devices, all taken while the machine stood still.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from statefork.errors import HostUnsupported

__all__ = [
    "Machine",
    "Network",
    "Process",
    "Saved",
    "Spec",
    "Vmm",
    "bound_socket",
    "connected_socket",
    "kill_machine",
    "machine_processes",
]

Network = Literal["none", "user", "tap"]

_LOG_TAIL = 2000
_KILL_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Spec:
    """What a machine is made of. All machines of a snapshot tree have the same."""

    memory_mib: int
    vcpus: int
    network: Network
    kernel: Path
    initrd: Path
    accelerator: str = "kvm"
    counter_khz: int = 0
    """How fast the host's time stamp counter runs, for an emulated processor; 0: the guest finds out itself."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib << 20

    def row(self) -> dict[str, Any]:
        names = ("memory_mib", "vcpus", "network", "accelerator", "counter_khz")
        return {name: getattr(self, name) for name in names} | {
            "kernel": str(self.kernel),
            "initrd": str(self.initrd),
        }

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Spec:
        return cls(**{**row, "kernel": Path(row["kernel"]), "initrd": Path(row["initrd"])})


@dataclass(frozen=True, slots=True)
class Saved:
    """One instant of a machine. The paths are the VMM's own; `state` holds what else it has to know."""

    spec: Spec
    disks: tuple[Path, ...]
    """Top-most first: what lies over what."""
    memory: Path | None
    """None: only the files were kept, and a revival is a boot."""
    state: Mapping[str, Any]
    files_bytes: int
    memory_bytes: int
    paused_ms: float


class Machine(ABC):
    directory: Path
    keeps_connection: bool = True
    """False: the connection to the agent does not outlive a `save`, and has to be made anew."""

    @abstractmethod
    def connect(self, timeout: float) -> socket.socket:
        """A stream to the agent; nobody else has one. Raises SessionDead."""

    @abstractmethod
    def save(self, into: Path, *, memory: bool) -> Saved:
        """Stand still, store, go on. `into` is empty and stays the snapshot's own.

        Raises: DiskFull, SessionDead, KernelError; the machine then goes on as it was.
        """

    @abstractmethod
    def stand_still(self) -> None: ...

    @abstractmethod
    def go_on(self) -> None: ...

    @abstractmethod
    def end(self) -> None:
        """At once. A machine that was attached to is only let go of."""

    @abstractmethod
    def last_words(self) -> str:
        """What it or its VMM said last, for an error."""


class Vmm(ABC):
    name: str
    program: str
    transport: Literal["serial", "vsock"]

    @abstractmethod
    def boot(self, spec: Spec, disks: Sequence[Path], directory: Path) -> Machine:
        """Start a machine over read-only disks; it may still be booting when this returns."""

    @abstractmethod
    def revive(self, saved: Saved, directory: Path) -> Machine: ...

    @abstractmethod
    def attach(self, directory: Path) -> Machine:
        """A machine that runs in that directory. Raises NotFound, Busy."""


class Process:
    """A VMM as a child in a session of its own, its words in a file; or one that somebody else started."""

    def __init__(self, pid: int, log: Path, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._log = log
        self._child = child
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()

    @classmethod
    def start(cls, argv: Sequence[str], directory: Path, log: Path, descriptors: Sequence[int] = ()) -> Process:
        with open(log, "ab") as words:
            try:
                child = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=words,
                    stderr=words,
                    cwd=directory,
                    pass_fds=descriptors,
                    start_new_session=True,
                )
            except FileNotFoundError as error:
                raise HostUnsupported(f"{argv[0]} is not installed", program=argv[0]) from error
        return cls(child.pid, log, child)

    @property
    def alive(self) -> bool:
        return not select.select([self._pidfd], [], [], 0)[0]

    def kill(self) -> None:
        """Returns when it is gone, and its memory with it."""
        with self._lock:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            if self._child is not None:
                self._child.wait()

    def close(self) -> None:
        with self._lock:
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1

    def said(self) -> str:
        try:
            return self._log.read_bytes()[-_LOG_TAIL:].decode(errors="replace").strip()
        except OSError:
            return ""


def machine_processes(program: str, below: Path) -> Iterator[tuple[int, str]]:
    """Every process of a VMM that works somewhere below a directory: its pid, and in which part of that directory."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="surrogateescape").split("\0")
            directory = (entry / "cwd").readlink()
        except OSError:
            continue
        if Path(words[0]).name == program and directory != below and directory.is_relative_to(below):
            yield int(entry.name), directory.relative_to(below).parts[0]


def kill_machine(pid: int) -> None:
    """One that nobody owns any more. Returns when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], _KILL_TIMEOUT)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _short(directory: Path) -> Iterator[Callable[[str], str]]:
    """Names of sockets in a directory whose own path may be longer than the 107 bytes that an address can hold."""
    opened = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield lambda name: f"/proc/self/fd/{opened}/{name}"
    finally:
        os.close(opened)


def bound_socket(directory: Path, name: str) -> socket.socket:
    """A listening socket in the file system. Whoever connects before the VMM takes it over waits for that."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(directory) as short:
        listening.bind(short(name))
    listening.listen(1)
    return listening


def connected_socket(directory: Path, name: str) -> socket.socket:
    """Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(directory) as short:
            connection.connect(short(name))
    except OSError:
        connection.close()
        raise
    return connection
