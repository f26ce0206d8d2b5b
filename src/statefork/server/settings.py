"""How the daemon is run: what `statefork serve` and the tests set."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from statefork.server.guard.limits import Limits

__all__ = ["Settings"]


def _work_slots() -> int:
    """Snapshots and restores are CPU and disk: a few more than there are processors keep both busy."""
    return min(16, max(4, 2 * (os.cpu_count() or 1)))


@dataclass(frozen=True, slots=True)
class Settings:
    home: Path
    """StateFork's state directory; the daemon's own part is `<home>/server`."""
    unix_socket: bool = True
    limits: Limits = field(default_factory=Limits)
    otlp_endpoint: str | None = None
    dialects: tuple[str, ...] = ("e2b", "swe-rex")
    """Other wire formats that are served beside our own."""

    work_slots: int = field(default_factory=_work_slots)
    """How many of create, snapshot, restore, fork, pause, resume, delete go on at once."""
    work_queue: int = 256
    """How many more may wait; beyond that 429."""
    command_slots: int = 384
    """Commands and file transfers that go on at once: each waits on a thread."""
    command_queue: int = 128
    commands_per_environment: int = 64
    """Under way or waiting for the shell."""
    terminal_slots: int = 128

    tick_seconds: float = 1.0
    """How often times-to-live and idleness are looked at."""
    sample_seconds: float = 5.0
    """How often usage is read."""
    ttl_seconds: float | None = None
    idle_pause_seconds: float | None = None
    """For environments that are made without saying so themselves."""

    output_bytes: int = 1 << 20
    """Of each stream in the answer to exec, unless the caller asks for another."""
    most_output_bytes: int = 16 << 20
    file_bytes: int = 256 << 20
    """The largest file that is read in one answer; larger ones come as archives."""
    most_forks: int = 256
    open_host_root: int = 0
    """1: tokens without admin, too, may make environments over the host's own root, and so read what is on it."""
    remembered_seconds: float = 24 * 3600
    """How long an idempotency key is known."""
    history: int = 1000
    """Operations that an environment remembers."""

    @property
    def directory(self) -> Path:
        return self.home / "server"
