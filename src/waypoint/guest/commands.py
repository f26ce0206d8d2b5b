"""The host side of a command: start it in a session, stream it, end it, and find it again after a snapshot.

A snapshot drops every connection. Commands are known to init by number and their output by offset, so a caller whose connection
ended simply connects again and goes on where it was; it never notices.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, Protocol

from waypoint.errors import Busy, DiskFull, ExecTimeout, KernelError, NotFound, SessionDead, UsageError, WrongState
from waypoint.guest import frames
from waypoint.guest.connection import Connection
from waypoint.guest.feed import Feed
from waypoint.guest.frames import Frame
from waypoint.guest.output import Collector
from waypoint.outcomes import ExecResult

__all__ = ["Link", "Request", "exec_request", "execute", "follow", "run_request"]

BASIC_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "TERM": "xterm-256color",
    "LANG": "C.UTF-8",
}
"""What a session's programs begin with, unless its base says otherwise."""
DEFAULT_LIMIT = 4 << 20
_END_SECONDS = 15.0
"""init needs at most about 2 s to end a command by every means; beyond this something is wrong with the session."""

Sink = Callable[[bytes], None]


class Link(Protocol):
    """How to reach a session that may be snapshotted, re-homed or restored meanwhile."""

    session: str

    def connect(self) -> tuple[Connection, int]:
        """A connection and the session's epoch, which changes when another state takes the session's place."""
        ...

    def leave(self, connection: Connection, epoch: int) -> None:
        """What was had by `connect` and is of no more use here, for whoever comes next; it says nothing unasked."""
        ...


class Request:
    """What to start, and what to do with what it prints. Plain classes here: outcomes.py says why."""

    __slots__ = ("kind", "limit", "log", "meanwhile", "on_start", "on_stderr", "on_stdout", "payload", "stdin", "timeout")

    def __init__(
        self, kind: bytes, payload: bytes, stdin: bytes | BinaryIO | None = None, timeout: float | None = None
    ) -> None:
        self.kind = kind
        self.payload = payload
        self.stdin = stdin
        self.timeout = timeout
        self.on_stdout: Sink | None = None
        self.on_stderr: Sink | None = None
        self.on_start: Callable[[int], None] | None = None
        self.meanwhile: Callable[[], None] | None = None
        """Called when init has been asked, before it has answered."""
        self.log: BinaryIO | None = None
        self.limit = DEFAULT_LIMIT


class _Progress:
    """How far a caller has got with one command."""

    __slots__ = ("both", "ending_at", "epoch", "err", "fresh", "id", "offsets", "out")

    def __init__(self, limit: int, command_id: int = 0) -> None:
        self.out, self.err, self.both = Collector(limit), Collector(limit), Collector(limit)
        self.id = command_id
        self.epoch = -1
        self.fresh = False
        self.offsets = [0, 0]
        self.ending_at: float | None = None


def _flags(stdin: bytes | BinaryIO | None, no_wait: bool, merge: bool) -> int:
    flags = frames.EXEC_INPUT if stdin is not None else 0
    flags |= frames.EXEC_NO_WAIT if no_wait else 0
    return flags | (frames.EXEC_MERGE if merge else 0)


def exec_request(
    text: str | bytes,
    *,
    stdin: bytes | BinaryIO | None = None,
    no_wait: bool = False,
    merge: bool = False,
    ours: bool = False,
) -> Request:
    """A command for the persistent shell. `ours`: nobody asked for it, so nobody waits for it as the last command."""
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    if b"\0" in data:
        raise UsageError("a shell command cannot contain a NUL byte; send such data on stdin")
    if len(data) > frames.MAX_TEXT:
        raise UsageError(
            f"a command of {len(data)} bytes is over the limit of {frames.MAX_TEXT}; send the data on stdin"
        )
    flags = _flags(stdin, no_wait, merge) | (frames.EXEC_OURS if ours else 0)
    return Request(frames.EXEC, bytes([flags]) + data, stdin)


def run_request(
    argv: Sequence[str | bytes],
    *,
    env: Sequence[tuple[str, str]],
    user: str = "",
    cwd: str = "",
    stdin: bytes | BinaryIO | None = None,
    merge: bool = False,
) -> Request:
    """A program of its own beside the shell."""
    if not argv:
        raise UsageError("run needs a program: waypoint run S -- PROGRAM [ARG...]")
    words = [os.fsencode(word) for word in (user, cwd, str(len(argv)), *argv)]
    words += [os.fsencode(f"{key}={value}") for key, value in env]
    if any(b"\0" in word for word in words):
        raise UsageError("an argument cannot contain a NUL byte")
    payload = bytes([_flags(stdin, False, merge)]) + b"".join(word + b"\0" for word in words)
    if len(payload) > frames.MAX_TEXT:
        raise UsageError(f"arguments of {len(payload)} bytes are over the limit of {frames.MAX_TEXT}")
    return Request(frames.RUN, payload, stdin)


def execute(link: Link, request: Request) -> ExecResult:
    """Run to the end. ExecTimeout past `request.timeout` (the command is ended), Busy, SessionDead, WrongState."""
    return _drive(link, request, _Progress(request.limit))


def follow(link: Link, command_id: int, request: Request, seen: tuple[int, int] = (0, 0)) -> ExecResult:
    """Wait for a command that somebody else started, or that was running when this session was forked.

    `seen` bytes of stdout and stderr are known to the caller, and not sent again.
    """
    progress = _Progress(request.limit, command_id)
    progress.offsets = list(seen)
    return _drive(link, request, progress)


def tell(link: Link, kind: bytes, command_id: int, payload: bytes = b"", *, answered: bool = True) -> None:
    """Send one frame about a command over a connection of its own. One without an answer is followed by one with."""
    connection, _ = link.connect()
    with connection:
        connection.send(kind, command_id, payload)
        if not answered:
            connection.send(frames.HELLO)
        connection.receive(time.monotonic() + 10)


def _drive(link: Link, request: Request, progress: _Progress) -> ExecResult:
    began = time.monotonic()
    deadline = None if request.timeout is None else began + request.timeout
    feed = Feed(request.stdin)
    if progress.id:
        feed.joining()
    while True:
        connection, epoch = link.connect()
        done = None
        try:
            if progress.id and progress.epoch not in (-1, epoch):
                raise WrongState(
                    f"session {link.session}: another snapshot was restored while command {progress.id} ran; "
                    "its outcome is unknown in the state that is live now",
                    session=link.session,
                )
            progress.epoch = epoch
            if progress.id:
                connection.send(frames.FOLLOW, progress.id, frames.OFFSETS.pack(*progress.offsets))
            else:
                connection.send(request.kind, 0, request.payload)
                if request.meanwhile is not None:
                    since = time.monotonic()
                    request.meanwhile()
                    if deadline is not None:  # nobody has looked for an answer
                        deadline += time.monotonic() - since
            done = _stream(link, connection, request, progress, feed, deadline)
        finally:
            if done is None:
                connection.close()
        if done is not None:
            link.leave(connection, epoch)
            return _result(done, progress, began)
        if progress.id:
            feed.disconnected()


def _stream(
    link: Link, connection: Connection, request: Request, progress: _Progress, feed: Feed, deadline: float | None
) -> Frame | None:
    """Handle frames until the command is done; None when the connection ended first."""
    while True:
        frame = connection.pending()
        if frame is not None:
            if frame.type == frames.DONE:
                return frame
            if frame.type == frames.TAKEN:
                feed.taken(frame.payload)
            else:
                _handle(link, frame, request, progress)
            continue
        if deadline is not None and progress.ending_at is None and time.monotonic() >= deadline:
            if not progress.id:
                raise Busy(f"session {link.session}: the shell was busy for the whole timeout", session=link.session)
            progress.ending_at = time.monotonic()
            tell(link, frames.END, progress.id)
        if progress.ending_at is not None and time.monotonic() > progress.ending_at + _END_SECONDS:
            raise SessionDead(f"session {link.session}: command {progress.id} cannot be ended", session=link.session)
        wait = 1.0 if progress.ending_at is not None else None
        if wait is None and deadline is not None:
            wait = max(0.0, deadline - time.monotonic())
        watched = [connection.fileno()] + ([feed.fileno] if progress.id and feed.fileno >= 0 else [])
        if progress.id and feed.ready:
            wait = 0.0
        readable = select.select(watched, [], [], wait)[0]
        if connection.fileno() in readable and not connection.fill():
            return None
        if progress.id and (feed.ready or feed.fileno in readable):
            feed.step(connection, progress.id, feed.fileno in readable)


def _handle(link: Link, frame: Frame, request: Request, progress: _Progress) -> None:
    if frame.type == frames.STARTED:
        progress.id = frame.id
        progress.fresh = bool(frame.payload[0])
        if request.on_start is not None:
            request.on_start(frame.id)
    elif frame.type in (frames.STDOUT, frames.STDERR):
        stream = 0 if frame.type == frames.STDOUT else 1
        data = frame.payload[frames.OFFSET.size :]
        progress.offsets[stream] = frames.OFFSET.unpack_from(frame.payload)[0] + len(data)
        (progress.err if stream else progress.out).add(data)
        progress.both.add(data)
        sink = request.on_stderr if stream else request.on_stdout
        if sink is not None:
            sink(data)
        if request.log is not None:
            request.log.write(data)
    elif frame.type == frames.BUSY:
        raise Busy(f"session {link.session}: the shell is running another command", session=link.session)
    elif frame.type == frames.ERROR:
        message = frame.payload.decode(errors="replace")
        if message.startswith("no command"):
            raise NotFound(f"session {link.session}: {message}: it ended long ago, or never was", session=link.session)
        if message.startswith("no user"):
            raise UsageError(f"session {link.session}: {message}", session=link.session)
        if message.endswith(os.strerror(errno.ENOSPC)):
            raise DiskFull(f"session {link.session}: {message}; the session goes on", session=link.session)
        raise KernelError(f"session {link.session}: {message}", session=link.session)


def _result(done: Frame, progress: _Progress, began: float) -> ExecResult:
    status, died, lost_out, lost_err = frames.DONE_HEAD.unpack_from(done.payload)
    timed_out = progress.ending_at is not None
    result = ExecResult(
        exit_code=124 if timed_out else status,
        stdout=progress.out.value(),
        stderr=progress.err.value(),
        output=progress.both.value(),
        cwd=done.payload[frames.DONE_HEAD.size :].decode(errors="surrogateescape"),
        duration_ms=(time.monotonic() - began) * 1000,
        timed_out=timed_out,
        truncated=progress.out.truncated or progress.err.truncated or lost_out + lost_err > 0,
        command_id=progress.id,
        shell_died=bool(died),
        shell_fresh=progress.fresh,
        lost_bytes=lost_out + lost_err,
    )
    if timed_out:
        raise ExecTimeout("the command outlived its timeout and was ended", result)
    return result
