"""`run` for backends whose tool starts a program inside and passes its streams through: docker, podman, runsc.

The tool alone does not do: it cannot tell its own failure from the program's, it hangs on as long as a grandchild
keeps the output open, and when it is killed the program inside lives on. So a small `sh` goes in between; it says
that it has begun and its pid, and afterwards the exit code, as marks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import IO

from statefork.backends.output import Mark, MarkScanner, OutputRecord, new_token
from statefork.backends.programs import Child
from statefork.errors import ExecTimeout, SessionDead, WaypointError
from statefork.model import ExecResult, RunRequest, Stream

__all__ = ["run_in_guest"]

START_SECONDS = 30.0

# `exec` in a subshell runs programs only, never a builtin of this shell, and gives 127 for one that does not exist.
# `head` hands on as much as there is and then ends, so that the pipe stays open for the last line: podman drops
# what it has not yet read when the process that it started ends, so this one waits until we have said that we have all.
_SCRIPT = r"""
t=$1 n=$2; shift 2
printf '\0%s:%s\0' "$t" "$$"; printf '\0%s:\0' "$t" >&2
case $n in
none) ( exec "$@" ) </dev/null;;
all) ( exec "$@" );;
*) head -c "$n" | ( exec "$@" );;
esac
rc=$?
printf '\0%s:%s\0' "$t" "$rc"; printf '\0%s:\0' "$t" >&2
[ "$n" = all ] || while IFS= read -r line; do case $line in *"$t") break;; esac; done
"""


def run_in_guest(
    wrap: Callable[[RunRequest, Sequence[str]], list[str]],
    request: RunRequest,
    fail: Callable[[str], WaypointError],
    *,
    settle_seconds: float = 0.0,
) -> ExecResult:
    """`wrap` makes the host's command line for an argv inside; `fail` the error when the tool could not start it.

    `settle_seconds` is how long to wait at most until nothing of the tool is left inside.
    """
    token = new_token()
    size = _size(request.stdin)
    attempt = _Attempt(token, OutputRecord(request.output_limit_bytes, request.on_output))
    deadline = None if request.timeout is None else time.monotonic() + request.timeout
    child = Child(wrap(request, ["sh", "-c", _SCRIPT, "sh", token, size, *request.argv]))
    try:
        child.feed(request.stdin, end=size == "all")
        in_time = child.pump(attempt.take, deadline)
        if not in_time:
            attempt.end(wrap, child)
            partial = attempt.record.result(137, timed_out=True)
            raise ExecTimeout(f"`{request.argv[0]}` did not end within {request.timeout:g} s and was killed", partial)
        if attempt.record.failure is not None:
            raise attempt.record.failure
        if attempt.exit_code is None:
            code = child.wait(5)
            said = attempt.early.decode(errors="replace").strip()
            if attempt.pid is None:
                raise fail(said or f"ended in {code}")
            raise SessionDead(f"the environment went away while `{request.argv[0]}` ran: {said or f'exit code {code}'}")
        if size != "all":
            child.say(b"\n" + token.encode() + b"\n")
        if settle_seconds:
            child.wait(settle_seconds)
        return attempt.record.result(attempt.exit_code)
    finally:
        child.close()


def _size(source: bytes | IO[bytes] | None) -> str:
    """How many bytes the program may read: a number, none, or all there is if nobody can tell."""
    if source is None:
        return "none"
    if isinstance(source, bytes):
        return str(len(source))
    if not source.seekable():
        return "all"
    here = source.tell()
    size = source.seek(0, os.SEEK_END) - here
    source.seek(here)
    return str(size)


class _Attempt:
    """One program's streams: first what the tool says, then what the program says, then the end."""

    def __init__(self, token: str, record: OutputRecord) -> None:
        self.record = record
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.early = b""
        self._marks: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self._scanners: dict[Stream, MarkScanner] = {"stdout": MarkScanner(), "stderr": MarkScanner()}
        for scanner in self._scanners.values():
            scanner.watch(token)

    def take(self, stream: Stream, data: bytes) -> bool:
        for piece in self._scanners[stream].feed(data):
            if isinstance(piece, Mark):
                self._marks[stream] += 1
                if stream == "stdout" and self._marks[stream] == 1:
                    self.pid = int(piece.payload)
                elif stream == "stdout":
                    self.exit_code = int(piece.payload)
            elif self._marks[stream] == 1:
                self.record.add(stream, piece)
            else:
                self.early = (self.early + piece)[-4096:]
        return all(count >= 2 for count in self._marks.values())

    def end(self, wrap: Callable[[RunRequest, Sequence[str]], list[str]], child: Child) -> None:
        """Kill the process group inside (the tool made it a session of its own), and take what was under way.

        If the tool has not even started the program yet, it would do so now, and nobody would ever end it.
        """
        if self.pid is None:
            child.pump(
                lambda stream, data: self.take(stream, data) or self.pid is not None, time.monotonic() + START_SECONDS
            )
        if self.pid is not None:
            killer = Child(
                wrap(RunRequest(()), ["sh", "-c", 'kill -KILL "-$1" || kill -KILL "$1"', "sh", str(self.pid)])
            )
            try:
                killer.feed(None, end=True)
                killer.pump(lambda stream, data: False, time.monotonic() + 10)
            finally:
                killer.close()
        child.pump(self.take, time.monotonic() + 1)
