"""The two records on the path of `waypoint exec`. Named tuples, since a dataclass costs an import of `inspect` and a
millisecond each, and that command is mostly its imports (docs/decisions/quick-exec.md). `waypoint.model` has the rest.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ExecResult", "Process"]


class ExecResult(NamedTuple):
    """What a command did. `stdout` and `stderr` hold head and tail when `truncated`; `output` is both as they came."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    output: bytes
    cwd: str
    duration_ms: float
    timed_out: bool = False
    truncated: bool = False
    command_id: int = 0
    shell_died: bool = False
    """The command ended the shell itself (`exit`, `exec`, `set -e`); a fresh one has taken its place."""
    shell_fresh: bool = False
    """The shell had died since the last command: its variables, functions, jobs and cwd were lost before this one."""
    lost_bytes: int = 0
    """Output that nobody read in time and that was dropped."""

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace")


class Process(NamedTuple):
    """A process by pid and start time, which together are unique for one boot."""

    pid: int
    start: int
