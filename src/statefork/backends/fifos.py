"""A shell behind three FIFOs inside the environment, for backends that store processes.

The shell must be part of what is stored, so it cannot hang on the pipes of a tool outside. FIFOs lie in the
environment's own files: each copy of the environment has its own, and CRIU opens them again by their path. A loop
inside keeps all three open for reading and writing, so that a shell notices neither when we come nor when we go.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

from statefork.backends.persistent_shell import WRAPPER
from statefork.errors import SessionDead

__all__ = ["FIFO_DIRECTORY", "FifoChannel", "loop_argv", "make_fifos"]

FIFO_DIRECTORY = "/.statefork"
_OPEN_TIMEOUT = 30.0

_LOOP = r"""
exec 3<>"$1/in" 4<>"$1/out" 5<>"$1/err" || exit
trap "exit 0" TERM
while :; do sh -c "$0" <&3 >&4 2>&5 3<&- 4<&- 5<&-; done
"""


def loop_argv(directory: str = FIFO_DIRECTORY) -> list[str]:
    """What has to run inside: a shell behind the FIFOs, and another one whenever that ends."""
    return ["sh", "-c", _LOOP, WRAPPER, directory]


def make_fifos(directory: Path) -> None:
    """`directory` is the one inside, as seen from the host. Open to every user inside: the shell may not be root's."""
    directory.mkdir(exist_ok=True)
    directory.chmod(0o755)
    for name in ("in", "out", "err"):
        with contextlib.suppress(FileExistsError):
            os.mkfifo(directory / name)
        (directory / name).chmod(0o666)


class FifoChannel:
    """Our ends of the three. Reading ends when the last process inside is gone."""

    def __init__(self, directory: Path) -> None:
        deadline = time.monotonic() + _OPEN_TIMEOUT
        self._open: list[int] = []
        try:
            self._stdin = self._fifo(directory / "in", os.O_WRONLY, deadline)
            self._stdout = self._fifo(directory / "out", os.O_RDONLY, deadline)
            self._stderr = self._fifo(directory / "err", os.O_RDONLY, deadline)
        except BaseException:
            self.close()
            raise

    def _fifo(self, path: Path, flags: int, deadline: float) -> int:
        """A FIFO without a reader cannot be opened for writing: wait until the loop inside has come so far."""
        while True:
            try:
                descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                if error.errno != errno.ENXIO or time.monotonic() > deadline:
                    raise SessionDead(f"no shell listens behind {path}: {error.strerror}") from error
                time.sleep(0.005)
                continue
            self._open.append(descriptor)
            os.set_blocking(descriptor, True)
            return descriptor

    @property
    def stdout(self) -> int:
        return self._stdout

    @property
    def stderr(self) -> int:
        return self._stderr

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._stdin, view) :]

    def close(self) -> None:
        for descriptor in self._open:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._open.clear()
