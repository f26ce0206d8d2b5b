"""Keep two programs that work side by side off each other's processor.

Where there are few processors the kernel wakes whoever gets a message on the processor of its sender, and leaves the sender waiting
behind it though another one is idle: CRIU asks a question, and then stands still for as long as we work beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

from waypoint.kernel.processes import read_proc, state

__all__ = ["allowed", "apart", "let_go", "spread", "woken_elsewhere"]

_libc = ctypes.CDLL(None)
_ALL = range(1024)
_before = threading.local()


@contextlib.contextmanager
def apart(pid: int) -> Iterator[bool]:
    """The calling thread stays where it is meanwhile, and process `pid` elsewhere; whether that is so.

    Only while a processor is idle: on a busy machine each would have to wait for its own. What the thread starts meanwhile, programs
    and threads, stays with it: so it must start none that outlives this.
    """
    ours = os.sched_getaffinity(0)
    here = _libc.sched_getcpu()
    if here not in ours or len(ours) < 2 or not _idle(ours, pid):
        yield False
        return
    try:
        kept = _kept(pid, ours - {here}, here)
        _before.processors = ours
        yield kept
    finally:
        _before.processors = None
        with contextlib.suppress(OSError):  # all of them were taken away meanwhile: the kernel has given it others
            os.sched_setaffinity(0, ours)


def allowed() -> set[int]:
    """Where the calling thread may be when it is not kept apart."""
    return getattr(_before, "processors", None) or os.sched_getaffinity(0)


def spread(where: set[int]) -> None:
    """For a thread that helps one that is kept apart: it need not stay there."""
    with contextlib.suppress(OSError):  # those were taken away meanwhile
        os.sched_setaffinity(0, where)


def let_go(pid: int) -> None:
    """What a thread that is kept apart has started may be where that could be before."""
    if getattr(_before, "processors", None):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(pid, allowed())


@contextlib.contextmanager
def woken_elsewhere(pid: int, *, beside: int = 0) -> Iterator[None]:
    """Process `pid`, which sleeps, is not put on the processor of the calling thread when it is woken meanwhile, if one is idle.

    `beside`: or has so many at work for the caller.

    Afterwards it may go where it could before, and so may what it starts.
    """
    ours = os.sched_getaffinity(0)
    here = _libc.sched_getcpu()
    if here not in ours or len(ours) < 2 or not _idle(ours, pid, beside):
        yield
        return
    with contextlib.suppress(OSError):  # see below
        os.sched_setaffinity(pid, ours - {here})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(pid, _ALL)  # what a process has that was never kept to any, however many there will be
            if os.sched_getaffinity(pid) != ours:
                os.sched_setaffinity(pid, ours)


def _kept(pid: int, others: set[int], here: int) -> bool:
    try:
        os.sched_setaffinity(pid, others)
        os.sched_setaffinity(0, {here})
    except OSError:  # it has ended, which is for others to find out; or the processor has been taken away
        return False
    return True


def _idle(ours: set[int], pid: int, beside: int = 0) -> bool:
    """One of these is, or has only process `pid` to work on, and what is at work for the caller."""
    running = _running() - beside
    if running >= len(ours) and state(pid) == "R":
        running -= 1
    return running < len(ours)


def _running() -> int:
    """How many tasks of the machine want a processor at this instant, this one among them."""
    return int(read_proc("/proc/loadavg").split()[3].partition(b"/")[0])
