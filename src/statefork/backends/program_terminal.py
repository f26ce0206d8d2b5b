"""A program of this host on a pseudo-terminal of its own, for somebody elsewhere: `docker exec -it` is one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Sequence

from statefork.errors import HostUnsupported

__all__ = ["ProgramTerminal"]


class ProgramTerminal:
    """By the protocol `statefork.driver.Terminal`. Closing it hangs up, and the program ends."""

    def __init__(self, argv: Sequence[str], rows: int, columns: int) -> None:
        self._master, slave = pty.openpty()
        self._wake_read, self._wake_write = os.pipe()
        self._set_size(rows, columns)
        try:
            self._process = subprocess.Popen(
                list(argv), stdin=slave, stdout=slave, stderr=slave, start_new_session=True, close_fds=True
            )
        except FileNotFoundError as error:
            for fd in (self._master, self._wake_read, self._wake_write):
                os.close(fd)
            raise HostUnsupported(f"{argv[0]} is not installed", program=argv[0]) from error
        finally:
            os.close(slave)

    def run(self, draw: Callable[[bytes], None]) -> str:
        try:
            while True:
                readable = select.select([self._master, self._wake_read], [], [])[0]
                if self._wake_read in readable:
                    return "detached"
                try:
                    data = os.read(self._master, 1 << 16)
                except OSError:  # EIO: the last one who had the other end open has left
                    return "ended"
                if not data:
                    return "ended"
                draw(data)
        finally:
            self._end()

    def _end(self) -> None:
        master, self._master = self._master, -1
        os.close(master)
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)
        self._wake_write = -1

    def type(self, keys: bytes) -> None:
        view = memoryview(keys)
        with contextlib.suppress(OSError):  # it has ended meanwhile: `run` says so
            while view and self._master >= 0:
                view = view[os.write(self._master, view) :]

    def resize(self, rows: int, columns: int) -> None:
        """The program is not told by the kernel: the terminal is not its controlling one."""
        if self._master >= 0:
            self._set_size(rows, columns)
            self._process.send_signal(signal.SIGWINCH)

    def close(self) -> None:
        if self._wake_write >= 0:
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"x")

    def _set_size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
