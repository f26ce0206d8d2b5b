"""Work inside another network namespace, and what every session's own one gets: loopback and two settings.

`setns` moves one thread. All work in a foreign namespace is therefore done in a thread of its own that ends with the
work: the caller's thread never leaves its namespace, not even when something is raised.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from waypoint.errors import KernelError
from waypoint.kernel.rtnetlink import Rtnetlink, raise_link

__all__ = ["in_netns", "loopback_up", "new_netns", "set_up_here"]

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def _in_thread(work: Callable[[], T]) -> T:
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - carried over to the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="waypoint-netns")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def in_netns(netns: str | int, work: Callable[[], T]) -> T:
    """Do `work` in the network namespace at a path (`/proc/PID/ns/net`) or descriptor; its result or its exception."""

    try:
        descriptor = os.open(netns, os.O_RDONLY | os.O_CLOEXEC) if isinstance(netns, str) else os.dup(netns)
    except OSError as error:
        raise KernelError(f"no network namespace {netns}: {error.strerror}; the process has ended") from error

    def run() -> T:
        if _libc.setns(descriptor, _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise KernelError(
                f"cannot enter the network namespace {netns}: {os.strerror(code)}; run as root", errno=code
            )
        return work()

    try:
        return _in_thread(run)
    finally:
        os.close(descriptor)


def new_netns() -> int:
    """A descriptor of a fresh network namespace, which lives as long as the descriptor does."""

    def run() -> int:
        if _libc.unshare(_CLONE_NEWNET):
            code = ctypes.get_errno()
            raise KernelError(f"cannot make a network namespace: {os.strerror(code)}; run as root", errno=code)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_thread(run)


def loopback_up(netns: str | int) -> None:
    """Bring up `lo`, and allow what Docker allows: ping without privilege, any port without privilege. No MPTCP.

    All are settings of the namespace alone. A namespace that CRIU made fresh has none.
    """
    in_netns(netns, set_up_here)


def set_up_here() -> None:
    """`loopback_up` for a thread that is in the namespace already."""
    with Rtnetlink() as link:
        link.batch([raise_link("lo")])
    settings = Path("/proc/sys/net/ipv4")
    (settings / "ping_group_range").write_text("0 2147483647")
    (settings / "ip_unprivileged_port_start").write_text("0")
    # Go's servers ask for MPTCP, which CRIU cannot save; without it they take TCP
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/sys/net/mptcp/enabled").write_text("0")
