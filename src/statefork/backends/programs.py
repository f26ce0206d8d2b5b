"""Child processes that live on: three pipes, read until the caller has what it came for. For those that just run to
their end and say something there is `waypoint.kernel.programs.run_program`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from statefork.errors import HostUnsupported
from statefork.model import Stream

__all__ = ["PIECE_BYTES", "Child"]

PIECE_BYTES = 1 << 16


class Child:
    """A program with pipes on its three streams, in a session of its own: a Ctrl-C at our terminal is not for it."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        try:
            self._process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise HostUnsupported(f"{argv[0]} is not installed", program=argv[0]) from error
        self._closed = False
        self._feeder: threading.Thread | None = None

    @property
    def stdout(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def stderr(self) -> int:
        assert self._process.stderr is not None
        return self._process.stderr.fileno()

    def send(self, data: bytes) -> None:
        """Blocks while the pipe is full. BrokenPipeError if the program is gone."""
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def feed(self, source: bytes | IO[bytes] | None, *, end: bool) -> None:
        """Send all of it (and then the end of file), from a thread: a program may stop reading, or never begin to."""
        if source is None or source == b"":
            self._feed(None, end)
            return
        self._feeder = threading.Thread(target=self._feed, args=(source, end), name="statefork-stdin", daemon=True)
        self._feeder.start()

    def _feed(self, source: bytes | IO[bytes] | None, end: bool) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            if isinstance(source, bytes):
                self.send(source)
            elif source is not None:
                while piece := source.read(PIECE_BYTES):
                    self.send(piece)
        if end:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.close()

    def say(self, data: bytes) -> None:
        """A last word after what was fed, if the program still listens."""
        if self._feeder is None or not self._feeder.is_alive():
            with contextlib.suppress(OSError, ValueError):
                self.send(data)

    def pump(self, take: Callable[[Stream, bytes], bool], deadline: float | None) -> bool:
        """Hand over pieces until `take` returns True or both streams have ended (True), or it is too late (False)."""
        streams: dict[int, Stream] = {self.stdout: "stdout", self.stderr: "stderr"}
        with selectors.DefaultSelector() as selector:
            for descriptor in streams:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                for key, _ in selector.select(left):
                    data = os.read(key.fd, PIECE_BYTES)
                    if not data:
                        selector.unregister(key.fd)
                    elif take(streams[key.fd], data):
                        return True
        return True

    def wait(self, timeout: float) -> int | None:
        """Its exit code; None if it is still running then."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Kill it, with its process group, and free the pipes. Only call it when no other thread reads from them."""
        if self._closed:
            return
        self._closed = True
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
