"""The host's side of the agent: programs in the machine, each with its streams, over one connection.

A thread reads and never waits for anybody else: what it reads goes into a queue per program, and the guest may only send
as much as has been taken out of that queue (a window per program), so a caller that is slow to read holds up its own
program and no other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from statefork.backends.microvm import wire
from statefork.backends.microvm.wire import Kind
from statefork.errors import KernelError, NotFound, SessionDead, UsageError
from statefork.model import Stream

__all__ = ["PATH", "Agent", "Ended", "Output", "Program"]

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""For programs, unless the image says otherwise."""

_ANSWER_TIMEOUT = 30.0
_GRANT_BYTES = wire.WINDOW // 4
"""Windows are opened again in steps: not a frame for every piece."""


@dataclass(frozen=True, slots=True)
class Output:
    stream: Stream
    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a program. `exit_code` is None if the machine went away, or the program was let go of."""

    exit_code: int | None


class Program:
    """One program in the machine. Its events are for one thread; the other methods may be called from any."""

    def __init__(self, agent: Agent, channel: int) -> None:
        self.channel = channel
        self.pid = 0
        self._agent = agent
        self._events: SimpleQueue[Output | Ended] = SimpleQueue()
        self._taken = 0
        self._credit = wire.STDIN_WINDOW
        self._over = False
        self._changed = threading.Condition()
        self._refusal: tuple[int, str] | None = None

    # -- for the caller -----------------------------------------------------------------------------------------------

    def next(self, deadline: float | None) -> Output | Ended | None:
        """What comes next; None if nothing came until the deadline (by the monotonic clock)."""
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        try:
            event = self._events.get(timeout=left)
        except Empty:
            return None
        if isinstance(event, Output):
            self._taken += len(event.data)
            if self._taken >= _GRANT_BYTES:
                self._tell(Kind.GRANT, struct.pack("<I", self._taken))
                self._taken = 0
        return event

    def send(self, data: bytes) -> None:
        """Into its stdin; waits while the program does not read. BrokenPipeError if it is over."""
        view = memoryview(data)
        while view:
            with self._changed:
                self._changed.wait_for(lambda: self._credit > 0 or self._over)
                if self._over:
                    raise BrokenPipeError(errno.EPIPE, "the program has ended")
                piece = view[: min(self._credit, wire.MAX_PAYLOAD)]
                self._credit -= len(piece)
            self._agent.send(wire.frame(Kind.STDIN, self.channel, bytes(piece)))
            view = view[len(piece) :]

    def end_stdin(self) -> None:
        self._tell(Kind.STDIN_END)

    def signal(self, number: int) -> None:
        """To its process group."""
        self._tell(Kind.SIGNAL, bytes([number]))

    def let_go(self) -> None:
        """Listen no more; it goes on, and its stdin is at its end."""
        self._tell(Kind.FORGET)
        self._agent.drop(self)
        self.over(None)

    def _tell(self, kind: Kind, payload: bytes = b"") -> None:
        """For what may be said to a program that has ended, or a machine that is gone."""
        with contextlib.suppress(OSError):
            self._agent.send(wire.frame(kind, self.channel, payload))

    # -- for the reader -----------------------------------------------------------------------------------------------

    def take(self, kind: int, payload: bytes) -> None:
        if kind == Kind.STDOUT:
            self._events.put(Output("stdout", payload))
        elif kind == Kind.STDERR:
            self._events.put(Output("stderr", payload))
        elif kind == Kind.EXIT:
            self._agent.drop(self)
            self.over(struct.unpack("<I", payload)[0])
        else:
            with self._changed:
                if kind == Kind.STARTED:
                    self.pid = struct.unpack("<I", payload)[0]
                elif kind == Kind.FAILED:
                    self._refusal = (struct.unpack("<I", payload[:4])[0], payload[4:].decode(errors="replace"))
                    self._agent.drop(self)
                elif kind == Kind.GRANT:
                    self._credit += struct.unpack("<I", payload)[0]
                self._changed.notify_all()

    def over(self, exit_code: int | None) -> None:
        with self._changed:
            if self._over:
                return
            self._over = True
            self._changed.notify_all()
        self._events.put(Ended(exit_code))

    def renewed(self) -> None:
        """The windows are wide open again on both sides."""
        with self._changed:
            self._credit, self._taken = wire.STDIN_WINDOW, 0
            self._changed.notify_all()

    def started(self) -> None:
        """Wait until it runs. Raises: UsageError, NotFound, KernelError, SessionDead."""
        with self._changed:
            ready = self._changed.wait_for(lambda: self.pid or self._refusal or self._over, _ANSWER_TIMEOUT)
        if self._refusal is not None:
            code, what = self._refusal
            if what.startswith("/"):
                raise UsageError(f"cannot start a program in {what}: {os.strerror(code)}")
            if code == errno.ENOENT:
                raise NotFound(f"there is no user {what!r} in the machine")
            raise KernelError(f"the machine cannot start a program: {what}: {os.strerror(code)}")
        if not ready:
            raise KernelError(f"the machine did not start a program within {_ANSWER_TIMEOUT:g} s")
        if not self.pid and self._agent.over.is_set():
            raise SessionDead("the machine went away")


class Agent:
    """A connection to the agent, made by `greet`; `over` is set when it has ended."""

    def __init__(self, connection: socket.socket) -> None:
        self.over = threading.Event()
        self._connection = connection
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._programs: dict[int, Program] = {}
        self._next = 0
        self._answers: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self._asking = threading.Lock()
        self._reader: threading.Thread | None = None
        self._replaced = False

    def greet(self, timeout: float, keep: int = 0) -> Program | None:
        """Bring both sides in step, set the machine's clock, and mix something new into its random state.

        `keep` is the channel of a program to go on with; gives it back if it still runs. Raises SessionDead.
        """
        rest, kept = self._say_hello(timeout, keep)
        program = None
        if kept:
            program = self._programs[keep] = Program(self, keep)
            self._next = keep
        self._start_reader(rest)
        return program

    def reconnect(self, connection: socket.socket, timeout: float, keep: int) -> None:
        """Go on over another connection, where the VMM cut the first one. Only the program of `keep` goes on being heard.

        Nothing else may be going on. Raises SessionDead.
        """
        assert self._reader is not None
        self._replaced = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._replaced = False
        self._connection.close()
        self._connection = connection
        rest, kept = self._say_hello(timeout, keep)
        with self._lock:
            programs = list(self._programs.values())
        for program in programs:
            if kept and program.channel == keep:
                program.renewed()
            else:
                self.drop(program)
                program.over(None)
        self._start_reader(rest)

    def _say_hello(self, timeout: float, keep: int) -> tuple[bytes, bool]:
        nonce = secrets.token_bytes(16)
        deadline = time.monotonic() + timeout
        self._connection.settimeout(timeout)
        try:
            self._connection.sendall(wire.PADDING + wire.hello(nonce, time.time_ns(), secrets.token_bytes(32), keep))
            found = self._find(wire.hello_answer(nonce), deadline)
        except OSError as error:
            raise SessionDead(f"the machine's agent does not answer: {error.strerror or error}") from error
        self._connection.settimeout(None)
        return found

    def _start_reader(self, rest: bytes) -> None:
        self._reader = threading.Thread(target=self._read, args=(rest,), name="statefork-agent", daemon=True)
        self._reader.start()

    def _find(self, answer: bytes, deadline: float) -> tuple[bytes, bool]:
        """Skip what an earlier client was sent; what follows the answer, and whether the channel was kept."""
        seen = b""
        while True:
            at = seen.find(answer)
            if at >= 0 and len(seen) > at + len(answer):
                end = at + len(answer)
                return seen[end + 1 :], seen[end] != 0
            seen = seen[-len(answer) :] if at < 0 else seen[at:]
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(errno.ETIMEDOUT, "no answer in time")
            self._connection.settimeout(left)
            piece = self._connection.recv(1 << 16)
            if not piece:
                raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
            seen += piece

    def start(self, argv: Sequence[str], env: Mapping[str, str], user: str, cwd: str) -> Program:
        """Start a program. 127 and 126 are its exit codes if there is no such program, or it cannot be executed."""
        words = [_bytes(word) for word in argv]
        variables = [_bytes(f"{name}={value}") for name, value in env.items()]
        if any(b"\0" in word for word in (*words, *variables, _bytes(cwd))):
            raise UsageError("a program's arguments and variables cannot hold a NUL byte")
        with self._lock:
            channel = self._free_channel()
            program = self._programs[channel] = Program(self, channel)
        try:
            self.send(wire.spawn(channel, words, variables, _bytes(user), _bytes(cwd)))
        except OSError as error:
            self.drop(program)
            raise SessionDead(f"the machine went away: {error.strerror or error}") from error
        if self.over.is_set():  # the reader may have ended before it knew of this program
            program.over(None)
        program.started()
        return program

    def processes(self, timeout: float = _ANSWER_TIMEOUT) -> tuple[str, ...]:
        """The command lines of all but the kernel's own."""
        listed = self._ask(Kind.LIST, b"", timeout)
        return tuple(line.decode(errors="replace") for line in listed.split(b"\0") if line)

    def sync(self, timeout: float) -> None:
        """Write all files to the disk; the machine goes on meanwhile."""
        self._ask(Kind.SYNC, b"", timeout)

    def freeze(self, wanted: bool) -> None:
        """All files to the disk, and no change any more; or go on."""
        code = struct.unpack("<I", self._ask(Kind.FREEZE, bytes([wanted]), 4 * _ANSWER_TIMEOUT))[0]
        if code:
            raise KernelError(f"the machine cannot hold its file system still: {os.strerror(code)}")

    def set_clock(self) -> None:
        """After the machine stood still; it is no error if it is gone."""
        with contextlib.suppress(OSError):
            self.send(wire.frame(Kind.CLOCK, 0, struct.pack("<Q", time.time_ns())))

    def send(self, data: bytes) -> None:
        with self._sending:
            self._connection.sendall(data)

    def drop(self, program: Program) -> None:
        with self._lock:
            if self._programs.get(program.channel) is program:
                del self._programs[program.channel]

    def close(self) -> None:
        """Programs in the machine go on; whoever waits for one here hears that it is over."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        self._connection.close()

    def _free_channel(self) -> int:
        for _ in range(1 << 16):
            self._next = self._next % 0xFFFF + 1
            if self._next not in self._programs:
                return self._next
        raise KernelError("too many programs run in the machine at once")

    def _ask(self, kind: Kind, payload: bytes, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        with self._asking:
            self._clear_answers()
            try:
                self.send(wire.frame(kind, 0, payload))
                while True:
                    answered, answer = self._answers.get(timeout=max(deadline - time.monotonic(), 0))
                    if answered == kind:
                        return answer
                    if answered == 0:
                        break
            except Empty:
                raise KernelError(f"the machine's agent did not answer within {timeout:g} s") from None
            except OSError as error:
                raise SessionDead(f"the machine went away: {error.strerror or error}") from error
        raise SessionDead("the machine went away")

    def _clear_answers(self) -> None:
        """Those that came when nobody waited for them any more."""
        while not self._answers.empty():
            self._answers.get_nowait()
        if self.over.is_set():
            raise SessionDead("the machine went away")

    # -- the reader's thread ------------------------------------------------------------------------------------------

    def _read(self, rest: bytes) -> None:
        buffer = bytearray(rest)
        try:
            while True:
                self._take_frames(buffer)
                piece = self._connection.recv(1 << 18)
                if not piece:
                    break
                buffer += piece
        except OSError:
            pass
        if self._replaced:
            return
        self.over.set()
        with self._lock:
            programs = list(self._programs.values())
        for program in programs:
            program.over(None)
        self._answers.put((0, b""))

    def _take_frames(self, buffer: bytearray) -> None:
        at = 0
        while len(buffer) - at >= wire.HEADER.size:
            kind, _, channel, length = wire.HEADER.unpack_from(buffer, at)
            end = at + wire.HEADER.size + length
            if len(buffer) < end:
                break
            payload = bytes(buffer[at + wire.HEADER.size : end])
            at = end
            if channel == 0:
                self._answers.put((kind, payload))
                continue
            with self._lock:
                program = self._programs.get(channel)
            if program is not None:
                program.take(kind, payload)
        del buffer[:at]


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
