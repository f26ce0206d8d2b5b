"""What is started once and then forked: our own CRIU, for each dump or restore, and the program that mounts the roots.

To start a CRIU takes ten times as long as to fork one that runs already and knows its kernel. What waits here holds nothing: no lock,
no mount and no namespace but the host's own. It finds its socket closed when this process ends, however that ends, and ends too.
A worker that was forked is a child of this process, as one that was started by itself.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence

from waypoint.errors import CriuError, DiskFull
from waypoint.kernel import later, processors, tools
from waypoint.kernel.criu_start import BASIC_ENVIRONMENT, Forked
from waypoint.kernel.criu_worker import Worker
from waypoint.kernel.launch import ID_BASE, Overlay

__all__ = ["Template"]

_SPARE = 3
"""For a restore and a fork that follow each other, and the next snapshot."""


class _Server:
    """A program that forks for each request on its socket."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = argv
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        with theirs:
            self.process = subprocess.Popen(
                [*argv, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=BASIC_ENVIRONMENT,
                start_new_session=True,
            )
        processors.let_go(self.process.pid)  # its workers, and what they restore, are where it is

    def ask(self, request: bytes, descriptors: Sequence[int]) -> None:
        socket.send_fds(self._socket, [request], descriptors)

    def close(self) -> None:
        self._socket.close()
        later.reap(self.process)


class Template:
    """Those of one engine. Used by any number of threads; a server is started when it is first needed, and again if it has ended."""

    def __init__(self, options: Callable[[tools.Criu], Sequence[str]]) -> None:
        """`options`: what the launcher is told of a CRIU."""
        self._options = options
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._servers: dict[str, _Server] = {}
        self._spare: list[tuple[tools.Criu, Forked]] = []

    def worker(
        self,
        criu: tools.Criu,
        *,
        enter: int = 0,
        own_network: bool = False,
        written: bool = False,
        merge: bool = False,
        hold: Sequence[int],
    ) -> Worker:
        """One of `criu`, our own, for one request; see Forked for the rest."""
        worker = self._take(criu) or self._fork(criu)
        worker.want(enter=enter, own_network=own_network, written=written, merge=merge, hold=hold)
        return worker

    def fill(self, criu: tools.Criu) -> None:
        """As many that wait as there are to be."""
        while True:
            with self._lock:
                if len(self._spare) >= _SPARE:
                    return
            worker = self._fork(criu)
            with self._lock:
                self._spare.append((criu, worker))

    def _take(self, criu: tools.Criu) -> Forked | None:
        while True:
            with self._lock:
                if not self._spare or self._owner != os.getpid():
                    return None
                kind, worker = self._spare.pop(0)
            if kind == criu and worker.there():
                return worker
            worker.close()

    def _fork(self, criu: tools.Criu) -> Forked:
        def argv() -> list[str]:
            return [str(tools.launch_path()), "template", *self._options(criu), "--", *criu.argv, "swrk"]

        return Forked(lambda *ends: self._ask(argv, criu.argv[0], b"1", ends))

    def mount(self, pid: int, overlay: Overlay) -> Callable[[], None]:
        """A root where the worker with this pid looks for it, in its mount namespace; it is there when what is returned is.

        That is called once, whatever becomes of it.
        """
        words = [*overlay.options(), "--enter", str(pid)]
        request = b"".join(os.fsencode(word) + b"\0" for word in words)
        argv = [str(tools.launch_path()), "stage", "--idmap", str(ID_BASE), "--"]
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            self._ask(lambda: argv, argv[0] + " stage", request, [writing])
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)

        def mounted() -> None:
            with open(reading, "rb", buffering=0) as answer:
                said = answer.read(1)  # its end is not waited for, which takes longer
                if said == b"1":
                    return
                said += answer.readall()
            text = said.decode(errors="replace").strip() or "nobody answered"
            if os.strerror(errno.ENOSPC) in text:
                raise DiskFull(f"no space left on the store's disk; nothing was lost: {text}")
            raise CriuError(f"the session's root could not be mounted: {text}")

        return mounted

    def waiting(self) -> list[int]:
        """The pids of the workers that wait."""
        with self._lock:
            return [worker.pid for _, worker in self._spare]

    def servers(self) -> list[int]:
        """Theirs."""
        with self._lock:
            return [server.process.pid for server in self._servers.values()]

    def drop(self, oldest: float | None = None) -> None:
        """Let go of the workers that have waited since before `oldest`, or of all: each has a copy of the host's mount namespace."""
        with self._lock:
            gone = [one for one in self._spare if oldest is None or one[1].since < oldest]
            self._spare = [one for one in self._spare if one not in gone]
        for _, worker in gone:
            worker.close()

    def close(self) -> None:
        self.drop()
        with self._lock:
            servers, self._servers = self._servers, {}
        for server in servers.values():
            server.close()

    def _ask(self, argv: Callable[[], Sequence[str]], kind: str, request: bytes, descriptors: Sequence[int]) -> None:
        with self._lock:
            if self._owner != os.getpid():  # after a fork of this process: workers would be the other one's children
                self._owner, self._servers, self._spare = os.getpid(), {}, []
            for last in (False, True):
                server = self._servers.get(kind)
                if server is None:
                    server = self._servers[kind] = _Server(argv())
                try:
                    server.ask(request, descriptors)
                    return
                except OSError:
                    self._servers.pop(kind).close()
                    if last:
                        raise
