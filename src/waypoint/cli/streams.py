"""The caller's streams around one command: stdin in, stdout and stderr out as they come, Ctrl-C to the command."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO, cast

from waypoint.cli.output import note, print_json, text_fields, write_all
from waypoint.errors import ExecTimeout
from waypoint.guest import commands, frames
from waypoint.kernel import signals

if TYPE_CHECKING:
    from waypoint.guest.commands import Link
    from waypoint.outcomes import ExecResult

__all__ = ["Streams", "carry", "result_document"]

INTERRUPTED = 130
READER_GONE = 141


class Streams:
    """What a command is connected to. With `as_json` its output is collected and not passed on."""

    def __init__(self, link: Link, *, as_json: bool = False, stdin: bool | None = None) -> None:
        """`stdin`: None passes on a pipe, file or socket and leaves a terminal alone."""
        self._link = link
        self._interrupts = 0
        self.as_json = as_json
        self.command = 0
        self.stdin = _caller_input(stdin)
        self.on_stdout = None if as_json else (lambda data: write_all(1, data))
        self.on_stderr = None if as_json else (lambda data: write_all(2, data))
        self.limit = commands.DEFAULT_LIMIT if as_json else 1 << 12

    def on_start(self, command: int) -> None:
        self.command = command

    def interrupt(self) -> None:
        """Ctrl-C: once for the command, twice to leave it alone; before it has begun, to give up."""
        self._interrupts += 1
        if not self.command or self._interrupts > 1:
            raise KeyboardInterrupt
        commands.tell(self._link, frames.SIGNAL, self.command, bytes([signals.INTERRUPT]))

    def end(self) -> None:
        if self.command:
            commands.tell(self._link, frames.END, self.command)


def carry(streams: Streams, session: str, start: Callable[[], ExecResult]) -> int:
    """Run `start` to its end with the caller's streams; prints the result's document or notes; returns the exit code."""
    try:
        with signals.handled(signals.INTERRUPT, streams.interrupt):
            result = start()
    except ExecTimeout as error:
        result = error.result
    except KeyboardInterrupt:
        if streams.command:
            note(f"detached: the command goes on; `waypoint wait {session} {streams.command}` waits for it")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has left, as in `waypoint exec S yes | head`
        streams.end()
        return READER_GONE
    if streams.as_json:
        print_json(result_document(result))
    else:
        _tell_notes(result)
    return 124 if result.timed_out else result.exit_code


def result_document(result: ExecResult) -> dict[str, object]:
    """The contract's keys always; `shell_died`, `shell_fresh` and `lost_bytes` only when there is something to say."""
    cwd = result.cwd.encode(errors="surrogateescape")
    document: dict[str, object] = {
        "exit_code": result.exit_code,
        **text_fields(stdout=result.stdout, stderr=result.stderr, cwd=cwd),
        "duration_ms": round(result.duration_ms, 3),
        "timed_out": result.timed_out,
        "truncated": result.truncated,
    }
    for name in ("shell_died", "shell_fresh", "lost_bytes"):
        if value := getattr(result, name):
            document[name] = value
    return document


def _tell_notes(result: ExecResult) -> None:
    if result.shell_fresh:
        note("the shell had died: this ran in a fresh one, without the variables, functions, jobs and directory of before")
    if result.timed_out:
        note(f"timed out after {result.duration_ms / 1000:.1f} s; the command was ended")
    if result.shell_died:
        note("the command ended the shell: the next one gets a fresh shell, without this one's variables, functions and jobs")
    if result.lost_bytes:
        note(f"{result.lost_bytes} bytes of its output are lost: nobody read them in time")


def _caller_input(choice: bool | None) -> BinaryIO | None:
    """Our stdin if the command is to have it. A terminal only if asked: the shell has its own."""
    if choice is False or sys.stdin is None:
        return None
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return None
    wanted = choice or stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
    return cast(BinaryIO, sys.stdin.buffer) if wanted else None
