"""Locks on files: another process must not get one that is held."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import struct

from .probe import Probe

_F_OFD_GETLK, _F_OFD_SETLK = 36, 37


class _Locks(Probe):
    """A lock held by this process, tried by a child that waits for questions."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        self.path = f"{self.directory}/lock"
        with open(self.path, "wb") as out:
            out.write(bytes(100))
        self.file = os.open(self.path, os.O_RDWR)
        ask, self.ask = os.pipe()
        self.answer, answer = os.pipe()
        if os.fork() == 0:
            os.close(self.file)
            self.file = os.open(self.path, os.O_RDWR)
            while os.read(ask, 1):
                os.write(answer, self.attempt())
        self.lock()

    def lock(self) -> None:
        raise NotImplementedError

    def attempt(self) -> bytes:
        """In the child."""
        raise NotImplementedError

    def unlock(self) -> None:
        raise NotImplementedError

    def observe(self) -> object:
        os.write(self.ask, b"?")
        return os.read(self.answer, 20)

    def perturb(self) -> None:
        self.unlock()

    def works(self) -> None:
        self.unlock()
        os.write(self.ask, b"?")
        found = os.read(self.answer, 20)
        assert found == b"free", found


class Flock(_Locks):
    """flock."""

    def lock(self) -> None:
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def attempt(self) -> bytes:
        try:
            fcntl.flock(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return b"held"
        fcntl.flock(self.file, fcntl.LOCK_UN)
        return b"free"

    def unlock(self) -> None:
        fcntl.flock(self.file, fcntl.LOCK_UN)


class PosixLock(_Locks):
    """fcntl record locks, by range."""

    def lock(self) -> None:
        fcntl.lockf(self.file, fcntl.LOCK_EX, 10, 20)

    def attempt(self) -> bytes:
        fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 0)
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 29)
        except OSError:
            return b"held"
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN)
        return b"free"

    def unlock(self) -> None:
        fcntl.lockf(self.file, fcntl.LOCK_UN, 10, 20)


class OfdLock(_Locks):
    """Open file description locks."""

    def _ofd(self, kind: int) -> None:
        fcntl.fcntl(self.file, _F_OFD_SETLK, struct.pack("hhqqixxxx", kind, 0, 10, 10, 0))

    def lock(self) -> None:
        self._ofd(fcntl.F_WRLCK)

    def attempt(self) -> bytes:
        try:
            self._ofd(fcntl.F_RDLCK)
        except OSError:
            return b"held"
        self._ofd(fcntl.F_UNLCK)
        return b"free"

    def unlock(self) -> None:
        self._ofd(fcntl.F_UNLCK)


class FileLease(Probe):
    """A file lease, which tells its holder before another process opens the file."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        self.file = os.open(f"{self.directory}/leased", os.O_RDONLY | os.O_CREAT, 0o600)
        fcntl.fcntl(self.file, fcntl.F_SETLEASE, fcntl.F_RDLCK)

    def observe(self) -> object:
        return fcntl.fcntl(self.file, fcntl.F_GETLEASE)

    def perturb(self) -> None:
        fcntl.fcntl(self.file, fcntl.F_SETLEASE, fcntl.F_UNLCK)


class PosixLockOnMapping(PosixLock):
    """A record lock on a file that its owner has mapped, as SQLite's WAL has it."""

    def lock(self) -> None:
        self.map = mmap.mmap(self.file, 100)
        super().lock()
