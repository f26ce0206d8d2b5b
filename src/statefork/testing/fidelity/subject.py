"""What the suite asks of an environment, and what a case does inside one.

A `statefork.Environment` is a Subject; so is anything else with these methods. Terminal cases need `open_terminal` too,
from backends that claim the capability `terminal`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["CaseFailed", "Channel", "Inside", "Options", "Output", "Subject"]

DEADLINE_SECONDS = 30.0
"""Far above what any step needs on a busy machine: only a state that never comes meets it."""
_POLL_SECONDS = 0.01


class CaseFailed(Exception):
    """The state that came back is not the state that was saved; the message says in which way."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a case wants of the environment beside the backend's defaults."""

    network: str = "none"
    seccomp: bool = True
    capabilities: tuple[str, ...] = ()
    memory_bytes: int | None = None
    pids: int | None = None

    @property
    def plain(self) -> bool:
        return self == Options()


class Output(Protocol):
    """How a command ended."""

    @property
    def exit_code(self) -> int: ...
    @property
    def stdout(self) -> str: ...
    @property
    def stderr(self) -> str: ...


class Channel(Protocol):
    """A terminal attached to the environment's shell; it ends (`receive` gives None) when a snapshot is taken."""

    def send(self, data: bytes) -> None: ...
    def receive(self, timeout: float) -> bytes | None:
        """The next bytes; empty at the timeout; None when the channel has ended."""
        ...

    def resize(self, rows: int, columns: int) -> None: ...
    def close(self) -> None: ...


class Subject(Protocol):
    """A live environment that can be snapshotted, restored and forked."""

    def exec_command(
        self, command: str, *, timeout: float | None = None, stdin: bytes | str | None = None
    ) -> Output: ...
    def run(self, argv: Sequence[str], *, timeout: float | None = None) -> Output: ...
    def snapshot(self, name: str | None = None) -> str: ...
    def restore(self, snapshot: str) -> Any: ...
    def fork(self, n: int = 1, *, from_snapshot: str | None = None) -> Iterable[Subject]: ...
    def destroy(self) -> None: ...
    def not_captured(self, snapshot: str) -> Iterable[str]: ...
    def open_terminal(self, rows: int, columns: int) -> Channel: ...


class Inside:
    """The verbs of cases: short, and each failure is a CaseFailed that quotes what the environment said."""

    def __init__(self, subject: Subject, patience: float = 1) -> None:
        """`patience`: how many times longer than usual everything may take; an emulated machine is slow."""
        self.subject = subject
        self.patience = patience

    def sh(self, command: str, *, timeout: float = DEADLINE_SECONDS, stdin: bytes | None = None) -> str:
        """Evaluate in the persistent shell; its stdout without the last newline. A failing command fails the case."""
        result = self.subject.exec_command(command, timeout=timeout * self.patience, stdin=stdin)
        return _output(result, command)

    def status(self, command: str) -> int:
        return self.subject.exec_command(command, timeout=DEADLINE_SECONDS * self.patience).exit_code

    def run(self, *argv: str, timeout: float = DEADLINE_SECONDS) -> str:
        """Run a program beside the shell."""
        return _output(self.subject.run(argv, timeout=timeout * self.patience), " ".join(argv))

    def beside(self, script: str, timeout: float = DEADLINE_SECONDS) -> str:
        """A script beside the persistent shell: for when that is busy, or must not be touched."""
        return self.run("/bin/sh", "-c", script, timeout=timeout)

    def until(self, script: str, what: str, timeout: float = DEADLINE_SECONDS) -> None:
        """Wait until the script, run beside the shell, succeeds."""
        self.wait_for(
            lambda: self.subject.run(["/bin/sh", "-c", script], timeout=timeout * self.patience).exit_code == 0,
            what,
            timeout,
        )

    def wait_for(self, true: Callable[[], bool], what: str, timeout: float = DEADLINE_SECONDS) -> None:
        deadline = time.monotonic() + timeout * self.patience
        while not true():
            if time.monotonic() > deadline:
                raise CaseFailed(f"waited {timeout * self.patience:.0f} s in vain: {what}")
            time.sleep(_POLL_SECONDS)

    def python(self, modules: Sequence[str] = ()) -> str:
        """An interpreter that has the modules: the system's own before whatever else is on the PATH; empty if none has."""
        wanted = f"import {', '.join(modules)}" if modules else "pass"
        script = f"for p in /usr/bin/python3 python3; do $p -c '{wanted}' 2>/dev/null && echo $p && break; done"
        return self.subject.exec_command(script, timeout=DEADLINE_SECONDS * self.patience).stdout.strip()

    def put(self, path: str, content: bytes | str) -> None:
        data = content.encode() if isinstance(content, str) else content
        self.sh(f"cat >{path}", stdin=data)

    def equal(self, command: str, wanted: str) -> None:
        found = self.sh(command)
        if found != wanted:
            raise CaseFailed(f"`{command}` says {found!r}, not {wanted!r}")


def _output(result: Output, command: str) -> str:
    if result.exit_code != 0:
        said = (result.stderr or result.stdout).strip()[-600:]
        raise CaseFailed(f"`{_short(command)}` ended with {result.exit_code}: {said or 'no output'}")
    return result.stdout.removesuffix("\n")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 120 else line[:117] + "..."
