"""What a person has typed into the session's terminal and no program has read yet.

While the terminal works by lines, unread input lies in the line buffer of the kernel. CRIU loses an unfinished line, and
echoes whole lines a second time. So while the tree is frozen the buffer is emptied, and afterwards (in the live session, and
in each restored one) the same bytes are typed again with the echo off. Input in raw mode is left to CRIU, which carries it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import termios
from collections.abc import Iterator

from waypoint.kernel.syscalls import pidfd_getfd

__all__ = ["take_typed", "type_again"]

_OPEN_PEER = 0x5441
_IFLAG, _LFLAG, _CC = 0, 3, 6
_VERBATIM = ~(termios.INLCR | termios.IGNCR | termios.ICRNL | termios.ISTRIP | termios.IXON)
_SILENT = ~(termios.ECHO | termios.ECHONL | termios.ISIG)


def take_typed(init_pid: int) -> bytes:
    """To be called while nothing runs: a program that waits for a line would be given half of it."""
    with contextlib.suppress(OSError, termios.error), _terminal(init_pid) as (_, slave):
        before = termios.tcgetattr(slave)
        if not before[_LFLAG] & termios.ICANON:
            return b""
        raw = termios.tcgetattr(slave)
        raw[_LFLAG] &= ~termios.ICANON
        raw[_CC][termios.VMIN] = raw[_CC][termios.VTIME] = 0
        found = b""
        termios.tcsetattr(slave, termios.TCSANOW, raw)
        try:
            while data := os.read(slave, 4096):
                found += data
        except BlockingIOError:
            pass
        finally:
            termios.tcsetattr(slave, termios.TCSANOW, before)
        return found
    return b""


def type_again(init_pid: int, typed: bytes) -> None:
    """The terminal's settings are as they were when this returns; a program that waits for a line gets it."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError), _terminal(init_pid) as (master, slave):
        before = termios.tcgetattr(slave)
        quiet = termios.tcgetattr(slave)
        quiet[_IFLAG] &= _VERBATIM
        quiet[_LFLAG] &= _SILENT
        termios.tcsetattr(slave, termios.TCSANOW, quiet)
        try:
            os.write(master, typed)
            poller = select.poll()
            poller.register(slave, select.POLLIN)
            poller.poll(0)  # the kernel moves what was written on its own time; asked for input it does so now
        finally:
            termios.tcsetattr(slave, termios.TCSANOW, before)


@contextlib.contextmanager
def _terminal(init_pid: int) -> Iterator[tuple[int, int]]:
    """Both ends of the terminal that PID 1 holds for the session's shell."""
    for name in os.listdir(f"/proc/{init_pid}/fd"):
        if os.readlink(f"/proc/{init_pid}/fd/{name}").endswith("/ptmx"):
            master = pidfd_getfd(init_pid, int(name))
            break
    else:
        raise FileNotFoundError(f"process {init_pid} holds no terminal")
    try:
        slave = fcntl.ioctl(master, _OPEN_PEER, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield master, slave
        finally:
            os.close(slave)
    finally:
        os.close(master)
