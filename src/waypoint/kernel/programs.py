"""Start a helper program, with one deadline, and give back everything it said.

Programs that live on (a session's init, CRIU's worker) are not started here.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from waypoint.errors import HostUnsupported, KernelError

__all__ = ["Finished", "run_program"]

_TAIL_LINES = 12
_CHUNK = 1 << 16
_GRACE_AFTER_KILL = 10.0
"""Seconds that a killed tree gets to let go of its output. It holds on while the kernel takes its namespaces down."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A program that ended by itself; a non-zero exit is a result here, the caller judges it."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace").strip()

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines it printed, stderr after stdout: where programs put the reason."""
        said = (self.stdout + b"\n" + self.stderr).decode(errors="replace").split("\n")
        return "\n".join([line for line in said if line.strip()][-lines:])

    def check(self, what: str) -> Finished:
        """Raise KernelError, quoting the program's own words, unless it ended in 0."""
        if self.exit_code == 0:
            return self
        raise KernelError(
            f"{what}: `{shlex.join(self.argv)}` ended in {self.exit_code}:\n{self.tail()}",
            argv=list(self.argv),
            exit_code=self.exit_code,
        )


def run_program(
    argv: Sequence[str],
    *,
    timeout: float,
    stdin: bytes | Iterable[bytes] = b"",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    own_session: bool = True,
    on_output: Callable[[bytes], None] | None = None,
    keep_bytes: int = 64 << 20,
) -> Finished:
    """Run to the end. Past `timeout` the whole process group is killed and KernelError says what it had printed.

    `stdin` may be an iterable of chunks, taken only as fast as the program reads. `on_output` is called with what
    arrives on either stream while the program runs; an exception out of it kills the program. Of each stream the last
    `keep_bytes` are kept. A grandchild that keeps the output open does not delay the return.
    `own_session=False` keeps the child on the caller's terminal, so that Ctrl-C reaches it (apt-get, pip).
    """
    child = _start(argv, cwd, env, own_session)
    pump = _Pump(child, stdin, on_output, keep_bytes)
    try:
        pump.run(time.monotonic() + timeout)
    except BaseException:
        pump.quiet()
        raise
    finally:
        if not pump.ended:
            _kill(child, own_session)
            pump.drain(time.monotonic() + _GRACE_AFTER_KILL)
        exit_code = child.wait()
        pump.close()
    finished = Finished(tuple(argv), exit_code, bytes(pump.stdout[-keep_bytes:]), bytes(pump.stderr[-keep_bytes:]))
    if not pump.ended:
        raise KernelError(
            f"`{shlex.join(argv)}` did not end within {timeout:g} s; it had said:\n{finished.tail()}",
            argv=list(argv),
            timed_out=True,
        )
    return finished


def _start(
    argv: Sequence[str], cwd: Path | None, env: Mapping[str, str] | None, own_session: bool
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=cwd,
            env=env,
            start_new_session=own_session,
        )
    except (FileNotFoundError, NotADirectoryError) as error:
        if cwd is not None and not cwd.is_dir():
            raise KernelError(f"{argv[0]} cannot be started in {cwd}: no such directory") from error
        raise HostUnsupported(f"{argv[0]} is not installed", program=argv[0]) from error
    except PermissionError as error:
        raise HostUnsupported(f"{argv[0]} may not be executed: {error.strerror}", program=argv[0]) from error


def _kill(child: subprocess.Popen[bytes], own_session: bool) -> None:
    """Only before the child is reaped: afterwards the number may be somebody else's."""
    with contextlib.suppress(ProcessLookupError):
        if own_session:
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()


class _Pump:
    """Moves bytes between the caller and one child until the child itself is gone.

    The end is read from a pidfd and not from end-of-file: a daemon that the program left behind keeps the pipes open.
    """

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        stdin: bytes | Iterable[bytes],
        on_output: Callable[[bytes], None] | None,
        keep_bytes: int,
    ) -> None:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        self.stdout, self.stderr = bytearray(), bytearray()
        self.ended = False
        self._on_output = on_output
        self._keep = keep_bytes
        self._stdin: IO[bytes] = child.stdin
        self._outputs: dict[int, tuple[IO[bytes], bytearray]] = {
            child.stdout.fileno(): (child.stdout, self.stdout),
            child.stderr.fileno(): (child.stderr, self.stderr),
        }
        self._chunks: Iterator[bytes] = iter([stdin] if isinstance(stdin, bytes) else stdin)
        self._pending = memoryview(b"")
        self._pidfd = os.pidfd_open(child.pid)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pidfd, selectors.EVENT_READ)
        for number in self._outputs:
            os.set_blocking(number, False)
            self._selector.register(number, selectors.EVENT_READ)
        os.set_blocking(self._stdin.fileno(), False)
        self._selector.register(self._stdin.fileno(), selectors.EVENT_WRITE)

    def run(self, deadline: float) -> None:
        """Until the child ended (`ended` is then true) or the deadline passed."""
        while not self.ended:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            for key, _ in self._selector.select(left):
                if key.fd == self._pidfd:
                    self.ended = True
                elif key.fd in self._outputs:
                    self._read(key.fd)
                else:
                    self._write()
        # What is left in a pipe now is at most its capacity; more than that comes from someone the child left behind.
        for number in list(self._outputs):
            for _ in range(64):
                if not self._read(number):
                    break

    def drain(self, deadline: float) -> None:
        """After a kill: read until everyone has let go of the output."""
        self._close_stdin()
        while self._outputs and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fd in self._outputs:
                    self._read(key.fd)
                elif key.fd == self._pidfd:
                    self._selector.unregister(self._pidfd)

    def quiet(self) -> None:
        """The caller is being unwound by an exception: tell it nothing more."""
        self._on_output = None

    def close(self) -> None:
        self._close_stdin()
        for number in list(self._outputs):
            self._close_output(number)
        self._selector.close()
        os.close(self._pidfd)

    def _read(self, number: int) -> bool:
        """One read; False when there is nothing more to read now."""
        if number not in self._outputs:
            return False
        try:
            data = os.read(number, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._close_output(number)
            return False
        kept = self._outputs[number][1]
        kept += data
        if len(kept) > 2 * self._keep:
            del kept[: -self._keep]
        if self._on_output is not None:
            self._on_output(data)
        return True

    def _write(self) -> None:
        """One write, so that a program that reads without end cannot keep us from its output and the deadline."""
        while not self._pending:
            chunk = next(self._chunks, None)
            if chunk is None:
                self._close_stdin()
                return
            self._pending = memoryview(chunk)
        try:
            self._pending = self._pending[os.write(self._stdin.fileno(), self._pending) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it does not want the rest; its exit code says whether that is an error
            self._close_stdin()

    def _close_stdin(self) -> None:
        if not self._stdin.closed:
            self._selector.unregister(self._stdin.fileno())
            self._stdin.close()

    def _close_output(self, number: int) -> None:
        self._selector.unregister(number)
        self._outputs.pop(number)[0].close()
