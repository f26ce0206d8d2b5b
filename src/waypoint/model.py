"""The nouns as frozen dataclasses. Nothing here touches the kernel, the store or the clock."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

from waypoint.outcomes import ExecResult, Process

__all__ = [
    "BaseRecord",
    "Capture",
    "ExecResult",
    "Limits",
    "Process",
    "SessionRecord",
    "SnapshotRecord",
    "Spec",
    "StartState",
    "new_id",
]

State = Literal["creating", "live", "paused", "dead"]
Network = Literal["none", "host", "nat"]


def new_id(kind: str) -> str:
    """`s` for a session, `p` for a snapshot. Random, so that two processes cannot meet."""
    return kind + secrets.token_hex(4)


@dataclass(frozen=True, slots=True)
class Limits:
    memory_bytes: int | None = None
    cpus: float | None = None
    pids: int | None = None

    @property
    def any(self) -> bool:
        return self.memory_bytes is not None or self.cpus is not None or self.pids is not None


@dataclass(frozen=True, slots=True)
class StartState:
    """How the shell begins: an image's ENV, WORKDIR, USER, and ENTRYPOINT + CMD."""

    env: tuple[tuple[str, str], ...] = ()
    workdir: str = "/"
    user: str = "root"
    """As an image has it: a name or number, maybe with `:group`. It is resolved inside the session's root."""
    argv: tuple[str, ...] = ()
    """ENTRYPOINT followed by CMD."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a session was asked to be; a fork inherits it."""

    network: Network = "none"
    limits: Limits = field(default_factory=Limits)
    capabilities: tuple[str, ...] = ()
    seccomp: bool = True
    start: StartState = field(default_factory=StartState)
    shell: str = "/bin/bash"
    hostname: str = "waypoint"
    idmap: int = 0
    files_only: bool = False
    auto_snapshot: bool = False
    on_fork: str = ""
    """A command run in each fork right after it comes up (reseed, new token)."""
    merge: bool = False
    """Equal pages of its memory may be shared with other sessions that allow it too."""


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """The lowest layers of sessions. `flat`: the store lies inside the base, so sealed layers cannot be stacked over it."""

    id: str
    kind: str
    source: str
    layers: tuple[str, ...]
    start: StartState
    digest: str
    flat: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionRecord:
    id: str
    name: str | None
    state: State
    tree: str
    base: str
    spec: Spec
    snapshot: str | None
    """The snapshot that the session's state grew out of: the parent of the next one."""
    layers: tuple[int, ...]
    """Its lower layers, top-most first; the base's own come below."""
    upper: int | None
    init_pid: int
    init_start: int
    boot: str
    created: float
    epoch: int = 0
    """Grows when another state takes the session's place: a command that ran before is then unknown."""
    undo: str | None = None
    """With auto-snapshot: the snapshot taken before the last exec."""
    pause: str | None = None
    """While paused: the snapshot that holds all of it."""


@dataclass(frozen=True, slots=True)
class Capture:
    """What a snapshot holds, and what it could not hold, each with a reason."""

    captured: tuple[str, ...]
    not_captured: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    id: str
    name: str | None
    parent: str | None
    tree: str
    session: str
    base: str
    spec: Spec
    layers: tuple[int, ...]
    """Layers, top-most first, over the base's own."""
    full: bool
    """Processes and memory are in it; otherwise files only."""
    created: float
    duration_ms: float
    paused_ms: float
    files_bytes: int
    memory_bytes: int
    capture: Capture
    manifest: dict[str, Any]
    pinned: bool = False
    """Hidden from people: it belongs to a paused session."""
    shares: str | None = None
    """Nothing had changed since this earlier snapshot: its image is this one's too."""

    @property
    def image(self) -> str:
        return self.shares or self.id
