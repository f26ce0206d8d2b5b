"""The values that cross StateFork's interface: immutable, the same for every backend, times by one clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import IO, Literal

from statefork.counted import Counted

__all__ = [
    "OUTPUT_LIMIT_BYTES",
    "Capabilities",
    "Capability",
    "Diff",
    "ExecRequest",
    "ExecResult",
    "FileInfo",
    "FileKind",
    "ForkFailure",
    "Mode",
    "OnOutput",
    "RestoreResult",
    "RunRequest",
    "Snapshot",
    "Stream",
    "Usage",
]

Stream = Literal["stdout", "stderr"]
OnOutput = Callable[[Stream, bytes], None]
"""Called with each piece of output as it arrives, on the thread that reads it; it must not block for long."""

Mode = Literal["auto", "full", "files"]
"""What a snapshot has to hold: all that the backend can, files and processes and memory or an error, or only files."""

FileKind = Literal["file", "directory", "symlink", "other"]


OUTPUT_LIMIT_BYTES = 16 * 1024 * 1024
"""How much of one stream a result keeps, half from its head and half from its tail."""


class Capability(StrEnum):
    """One thing that `restore` brings back."""

    FILES = "files"
    PROCESSES = "processes"
    MEMORY = "memory"
    SHELL = "shell"
    """Variables, functions, cwd, jobs of the persistent shell that `exec_command` talks to."""
    TERMINAL = "terminal"
    """A pseudo-terminal and what is on its screen."""
    MACHINE = "machine"
    """The kernel itself: mounts, routes, timers, everything."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend was found to do on this host; made by a probe that tried it, never from a version number."""

    backend: str
    restores: frozenset[Capability]
    pause_releases_memory: bool
    """False: `pause` stops the processes where they are (no CPU time, but their memory stays in use)."""
    snapshot_during_exec: bool
    """True: a snapshot may be taken while a command runs in the shell; False: it waits for the command."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why a capability is not in `restores`, where the reason is this host and not the backend's nature."""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        return {Capability.FILES, Capability.PROCESSES, Capability.MEMORY} <= self.restores


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. A non-zero `exit_code` is a result; that the backend failed is always an exception."""

    exit_code: int
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    output_bytes: bytes = b""
    """Both streams in the order in which they arrived."""
    cwd: str = ""
    """The shell's directory afterwards."""
    duration_ms: float = 0.0
    timed_out: bool = False
    truncated: bool = False
    """The output was longer than the limit: its head and its tail are kept, with a line between them that says so."""
    shell_restarted: bool = False
    """This shell knows nothing of earlier commands: it began anew since the last one, or died under this one."""

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode(errors="replace")

    @property
    def output(self) -> str:
        return self.output_bytes.decode(errors="replace")

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class ExecRequest:
    """A command for the persistent shell. It is evaluated in that shell itself, so `cd` and `export` stay."""

    command: bytes
    """Any bytes but NUL, several lines included. Never passed through a second quoting."""
    timeout: float | None = None
    stdin: bytes | IO[bytes] | None = None
    """None: the command reads from /dev/null. A file is read to its end, while the command runs where the backend can."""
    on_output: OnOutput | None = None
    output_limit_bytes: int = OUTPUT_LIMIT_BYTES
    on_start: Callable[[int], None] | None = None
    """Told the number by which `Live.follow` and `Live.signal` know the command; never called where they do not work."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A program beside the shell, no shell in between; it starts in `cwd`, or where the environment's shell starts."""

    argv: tuple[str, ...]
    timeout: float | None = None
    stdin: bytes | IO[bytes] | None = None
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Set on top of the environment's own variables."""
    on_output: OnOutput | None = None
    output_limit_bytes: int = OUTPUT_LIMIT_BYTES
    on_start: Callable[[int], None] | None = None
    """As in ExecRequest."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a live environment has used since it came up (CPU), and holds at this moment (memory)."""

    cpu_seconds: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """An immutable record of an environment at one instant."""

    id: str
    name: str | None
    parent: str | None
    environment: str
    """The environment it was taken of."""
    created_at: datetime
    duration_ms: float
    paused_ms: float
    """How long the environment stood still for it; equal to `duration_ms` where the backend cannot tell."""
    files_bytes: Counted = Counted()
    """Storage that this snapshot added for files, over its parent. Thousands of files are counted a moment later: to read it waits."""
    memory_bytes: int
    captured: tuple[str, ...]
    not_captured: tuple[str, ...]
    processes: tuple[str, ...] = ()
    """Command lines of the captured processes, where processes were captured."""


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What a restore brought back. `shell_restarted` is True where the backend has no memory: variables, cwd and jobs
    of the shell are those of a new one, whatever they were when the snapshot was taken."""

    environment: str
    snapshot: str
    duration_ms: float
    restored: tuple[str, ...]
    shell_restarted: bool


@dataclass(frozen=True, slots=True)
class FileInfo:
    name: str
    kind: FileKind
    size_bytes: int
    mode: int
    """Permission bits, as `0o644`."""
    modified_at: float


@dataclass(frozen=True, slots=True)
class Diff:
    """What differs from `a` to `b`: paths are absolute inside the environment, sorted."""

    a: str
    b: str
    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    processes_added: tuple[str, ...] = ()
    processes_removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed or self.processes_added or self.processes_removed)


@dataclass(frozen=True, slots=True)
class ForkFailure:
    """Stands in a fork's place when `fork(..., return_errors=True)` could not make it."""

    error: Exception
