"""The caller's stdin on its way into a command.

Bytes are numbered by their offset. init tells how far it has received and how far the command's pipe has taken them; no more
than a window is ever under way, so a command that prints without reading cannot block its own output, and what was under
way when a snapshot dropped the connection is sent again.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, BinaryIO

from waypoint.guest import frames

if TYPE_CHECKING:
    from waypoint.guest.connection import Connection

__all__ = ["Feed"]

_WINDOW = 512 << 10
_CHUNK = 64 << 10
_NOT_WANTED = (1 << 64) - 1


class Feed:
    """Bytes at hand, or a file that is read as it becomes readable."""

    def __init__(self, source: bytes | BinaryIO | None) -> None:
        self._data = memoryview(source) if isinstance(source, bytes) else None
        self._file = -1 if source is None or isinstance(source, bytes) else source.fileno()
        self._wanted = source is not None
        self._ended = False
        self._end_sent = False
        self._kept = bytearray()
        self._first = 0
        """Offset of the first byte kept: all before has been taken by the command's pipe."""
        self._sent: int | None = 0
        """Offset of the next byte to send; None until init has told what it has."""

    def joining(self) -> None:
        """Another caller has fed the command before: what init has received of that is where our bytes begin."""
        self._sent = None
        self._first = -1

    def disconnected(self) -> None:
        self._sent, self._end_sent = None, False

    def taken(self, payload: bytes) -> None:
        received, written = frames.OFFSETS.unpack(payload)
        if written == _NOT_WANTED:
            self._wanted = False
            return
        if self._first < 0:
            self._first = self._sent = received
            return
        written = max(written, self._first)  # what another caller sent is still under way
        del self._kept[: written - self._first]
        self._first = written
        if self._sent is None:
            self._sent = received

    @property
    def fileno(self) -> int:
        """What to watch for more, -1 when there is no room or no file."""
        return self._file if self._wanted and not self._ended and self._first >= 0 and len(self._kept) < _WINDOW else -1

    @property
    def ready(self) -> bool:
        """Something can be sent without waiting for the caller."""
        if not self._wanted or self._sent is None or self._end_sent:
            return False
        more = self._data is not None and not self._ended and len(self._kept) < _WINDOW
        return more or self._ended or self._sent < self._first + len(self._kept)

    def step(self, connection: Connection, command_id: int, readable: bool) -> None:
        if readable or (self._data is not None and not self._ended and len(self._kept) < _WINDOW):
            self._read()
        if self._sent is None:
            return
        while unsent := bytes(self._kept[self._sent - self._first :][:_CHUNK]):
            connection.send(frames.INPUT, command_id, frames.OFFSET.pack(self._sent) + unsent)
            self._sent += len(unsent)
        if self._ended and not self._end_sent:
            connection.send(frames.INPUT, command_id, frames.OFFSET.pack(self._sent))
            self._end_sent = True

    def _read(self) -> None:
        if self._data is not None:
            self._kept += self._data[:_CHUNK]
            self._data = self._data[_CHUNK:]
            self._ended = not len(self._data)
            return
        with contextlib.suppress(BlockingIOError):
            part = os.read(self._file, _CHUNK)
            self._kept += part
            self._ended = not part
