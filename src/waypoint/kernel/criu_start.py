"""The two ways to have a CRIU worker: a program of its own, or a fork of one that was started before (template.py)."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from waypoint.kernel import criu_rpc_pb2 as rpc
from waypoint.kernel.criu_worker import Worker
from waypoint.kernel.later import Child

__all__ = ["BASIC_ENVIRONMENT", "Forked", "Started"]

BASIC_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
"""Nothing of the caller's: CRIU takes options from it."""
_WANTED = struct.Struct("=iI")
_OWN_NETWORK, _WRITTEN, _MERGE = 1, 2, 4
"""As in quick/template.c."""


def _ends() -> tuple[socket.socket, socket.socket, tuple[int, int], tuple[int, int]]:
    """Our socket and the worker's, a pipe for its errors, and one by which it says that it has begun."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return ours, theirs, os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)


class Started(Worker):
    """A program of its own."""

    def __init__(
        self, argv: Sequence[str], *, hold: Sequence[int], environment: Mapping[str, str], own: bool = False
    ) -> None:
        """`hold`: descriptors of locks that it keeps for as long as it lives."""
        ours, theirs, errors, begun = _ends()
        super().__init__(ours, errors[0], begun[0], own=own)
        try:
            with theirs:
                process = subprocess.Popen(
                    [*argv, "swrk", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(), begun[1], *hold),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors[1],
                    env={**BASIC_ENVIRONMENT, "WAYPOINT_BEGUN": str(begun[1]), **environment},
                    start_new_session=True,
                )
            self._met = process, os.pidfd_open(process.pid)
        except BaseException:
            self._errors.close()
            os.close(self._begun)
            raise
        finally:
            os.close(errors[1])
            os.close(begun[1])


class Forked(Worker):
    """A fork of one that was started before (template.py), for whatever it is then wanted for.

    It says first who it is, which is not waited for until that matters.
    """

    def __init__(self, fork: Callable[[int, int, int], None]) -> None:
        """`fork` is told its ends of the socket and of two pipes: for errors, and for what it has begun."""
        ours, theirs, errors, begun = _ends()
        super().__init__(ours, errors[0], begun[0], own=True)
        self._meeting = threading.Lock()
        self._wanted: tuple[bytes, Sequence[int]] = b"", ()
        self.since = time.monotonic()
        try:
            with theirs:
                fork(theirs.fileno(), errors[1], begun[1])
        except BaseException:
            ours.close()
            self._errors.close()
            os.close(self._begun)
            raise
        finally:
            os.close(errors[1])
            os.close(begun[1])

    def want(self, *, enter: int, own_network: bool, written: bool, merge: bool, hold: Sequence[int]) -> None:
        """What it will be told when it begins: not before, as it would be woken twice, and the first time where its caller is.

        `enter`: the PID 1 whose namespaces it enters to dump, or 0; `hold`: descriptors of locks that it keeps."""
        flags = _OWN_NETWORK * own_network | _WRITTEN * written | _MERGE * merge
        self._wanted = _WANTED.pack(enter, flags), hold

    def begin(self, kind: rpc.criu_req_type, options: rpc.criu_opts) -> None:
        said, hold = self._wanted
        try:
            socket.send_fds(self._socket, [said], hold)
        except OSError as error:
            raise self._no_answer(str(error)) from error
        super().begin(kind, options)

    def _meet(self) -> tuple[Child, int]:
        with self._meeting:
            if self._met is not None:
                return self._met
            said, descriptors = b"", list[int]()
            with contextlib.suppress(OSError):  # nobody is there, which may have been found out before
                said, descriptors, _, _ = socket.recv_fds(self._socket, 4, 1)
            if len(descriptors) != 1:
                raise self._no_answer("it was not started")
            return _ForkedChild(int.from_bytes(said, sys.byteorder)), descriptors[0]


class _ForkedChild:
    """Its parent is that of whoever has forked it: this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = False

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self) -> int:
        self._look(0)
        return 0

    def _look(self, how: int) -> int | None:
        with contextlib.suppress(ChildProcessError):  # a fork of this process: its child it is not
            self._ended = self._ended or os.waitpid(self.pid, how)[0] != 0
            return 0 if self._ended else None
        return 0
