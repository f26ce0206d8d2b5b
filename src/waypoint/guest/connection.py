"""One connection to a session's init.

The socket lies inside the session's root, where its root user may put symlinks; so it is looked up as a process in
the session would, and never through anything that leads out.
"""

from __future__ import annotations

import os
import select
import socket
import time
from types import TracebackType

from waypoint.errors import SessionDead
from waypoint.guest import frames
from waypoint.guest.frames import Frame
from waypoint.kernel import processes
from waypoint.kernel.syscalls import open_inside
from waypoint.outcomes import Process

__all__ = ["Connection", "connect", "quiesce"]

_SOCKET = ".waypoint/run/sock"


class Connection:
    """Frames over a stream socket. `receive` returns None when the session closed it (a snapshot does that)."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self.written = -1
        """See Links: what the store said when the session was what this leads to."""

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: bytes, identity: int = 0, payload: bytes = b"") -> bool:
        """False when the session has closed the connection."""
        try:
            self._socket.sendall(frames.encode(kind, identity, payload))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def pending(self) -> Frame | None:
        return frames.decode(self._buffer)

    def receive(self, deadline: float | None = None) -> Frame | None:
        """The next frame; None at the end of the connection; TimeoutError past the deadline (monotonic)."""
        while True:
            frame = frames.decode(self._buffer)
            if frame is not None:
                return frame
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self._socket], [], [], left)[0]:
                    raise TimeoutError
            if not self.fill():
                return None

    def is_open(self) -> bool:
        """Nobody has closed it, and it says nothing unasked."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return not self._buffer
        except OSError:
            return False
        return False

    def fill(self) -> bool:
        """Read once from the socket into the buffer; False at its end."""
        try:
            data = self._socket.recv(1 << 18)
        except ConnectionResetError:
            data = b""
        self._buffer += data
        return bool(data)


def connect(init: Process, session: str, timeout: float = 10) -> Connection:
    """Connect to the init of a live session; SessionDead when it is gone."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            root = os.open(f"/proc/{init.pid}/root", os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise SessionDead(f"session {session}: its processes are gone", session=session) from error
        try:
            target = open_inside(root, _SOCKET, os.O_PATH, follow=False)
            try:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
                try:
                    sock.connect(f"/proc/self/fd/{target}")
                    return Connection(sock)
                except BaseException:
                    sock.close()
                    raise
            finally:
                os.close(target)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            if not processes.alive(init):
                raise SessionDead(f"session {session}: its processes are gone", session=session) from error
            if time.monotonic() > deadline:
                raise SessionDead(f"session {session}: its init does not listen", session=session) from error
            time.sleep(0.002)
        finally:
            os.close(root)


def quiesce(connection: Connection, session: str) -> int:
    """Every client connection is dropped, this one, too, so that nothing in the tree points outside of it.

    Returns how many requests init has had that may have changed something; -1 from an init that does not count them.
    """
    requests = None
    with connection:
        connection.send(frames.QUIESCE)
        deadline = time.monotonic() + 10
        while (frame := connection.receive(deadline)) is not None:
            if frame.type == frames.READY:
                requests = int(frame.payload.split(b"=")[1]) if frame.payload else -1
    if requests is None:
        raise SessionDead(f"session {session}: its init has gone away", session=session)
    return requests
