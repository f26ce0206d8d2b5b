"""What CRIU forgets without a word: given back after a restore, or named in what was not captured."""

from __future__ import annotations

import ctypes
import os
import sqlite3
import threading

from .probe import Probe

_libc = ctypes.CDLL(None, use_errno=True)
_IOPRIO_SET, _IOPRIO_GET = (251, 252) if os.uname().machine == "x86_64" else (30, 31)
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30


class CpuAffinity(Probe):
    """CPU affinity, of the process and of one thread."""

    def __init__(self) -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        self.pinned = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        self.pinned.wait()

    def run(self) -> None:
        os.sched_setaffinity(0, {max(range(os.cpu_count() or 1))})
        self.pinned.set()
        threading.Event().wait()

    def observe(self) -> object:
        return os.sched_getaffinity(0), os.sched_getaffinity(self.thread.native_id or 0)

    def perturb(self) -> None:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        os.sched_setaffinity(self.thread.native_id or 0, {0})


class IoPriority(Probe):
    """I/O priority."""

    def __init__(self) -> None:
        assert _libc.syscall(_IOPRIO_SET, 1, 0, 2 << 13 | 6) == 0

    def observe(self) -> object:
        return _libc.syscall(_IOPRIO_GET, 1, 0)

    def perturb(self) -> None:
        assert _libc.syscall(_IOPRIO_SET, 1, 0, 3 << 13) == 0


class TimerSlack(Probe):
    """Timer slack."""

    def __init__(self) -> None:
        assert _libc.prctl(_PR_SET_TIMERSLACK, 123_456, 0, 0, 0) == 0

    def observe(self) -> object:
        return _libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)

    def perturb(self) -> None:
        _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class CoredumpFilter(Probe):
    """Which memory a core dump holds."""

    def __init__(self) -> None:
        self._write("0x7")

    def _write(self, text: str) -> None:
        with open("/proc/self/coredump_filter", "w") as out:
            out.write(text)

    def observe(self) -> object:
        with open("/proc/self/coredump_filter") as text:
            return text.read()

    def perturb(self) -> None:
        self._write("0x33")


class _Named(Probe):
    """Not given back, but named."""

    names = ""
    seccomp = True

    def observe(self) -> object:
        return ""

    def perturb(self) -> None:
        return


class SemaphoreEventfd(_Named):
    """An eventfd in semaphore mode."""

    names = r"eventfd \d+ of process \d+ is a semaphore"

    def __init__(self) -> None:
        self.fd = _libc.eventfd(2, os.O_NONBLOCK | 1)
        assert self.fd >= 0


class OpenDatabase(_Named):
    """A writable connection to an SQLite database with a rollback journal."""

    names = r"SQLite database \S*/data\.db through the connection that process \d+ has open"

    def __init__(self) -> None:
        self.db = sqlite3.connect(f"{self.directory}/data.db", isolation_level=None, check_same_thread=False)
        self.db.execute("create table t (n integer)")


class Personality(_Named):
    """A personality, as `setarch` gives it."""

    names = r"the personality 00020000 of process \d+"

    def __init__(self) -> None:
        assert _libc.personality(ctypes.c_ulong(0x20000)) >= 0, os.strerror(ctypes.get_errno())


class MemorySeal(_Named):
    """A sealed mapping (mseal)."""

    names = r"memory seals \(mseal\) of process \d+"
    seccomp = False

    def __init__(self) -> None:
        _libc.mmap.restype = ctypes.c_void_p
        base = _libc.mmap(None, ctypes.c_size_t(4096), 1, 0x22, -1, ctypes.c_long(0))
        assert _libc.syscall(462, ctypes.c_void_p(base), ctypes.c_size_t(4096), 0) == 0, os.strerror(ctypes.get_errno())


class Keyring(_Named):
    """A session keyring, and Landlock rules: only a session without the system call filter can have them."""

    names = "keyrings and Landlock rules"
    seccomp = False

    def __init__(self) -> None:
        assert _libc.syscall(250, 1, None) >= 0, os.strerror(ctypes.get_errno())
