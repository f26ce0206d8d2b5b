"""Collects a stream of any length in bounded memory: its head and its tail, and how much lay between."""

from __future__ import annotations

from collections import deque

__all__ = ["Collector"]


class Collector:
    """Keeps at most `limit` bytes: the first half from the beginning, the rest from the end."""

    def __init__(self, limit: int) -> None:
        self._head_room = limit // 2
        self._tail_room = limit - self._head_room
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.total_bytes = 0
        self.dropped_bytes = 0

    def add(self, data: bytes) -> None:
        self.total_bytes += len(data)
        room = self._head_room - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes > self._tail_room:
            first = self._tail[0]
            over = self._tail_bytes - self._tail_room
            if len(first) <= over:
                self._tail.popleft()
                gone = len(first)
            else:
                self._tail[0] = first[over:]
                gone = over
            self._tail_bytes -= gone
            self.dropped_bytes += gone

    @property
    def truncated(self) -> bool:
        return self.dropped_bytes > 0

    def value(self) -> bytes:
        tail = b"".join(self._tail)
        if not self.truncated:
            return bytes(self._head) + tail
        return bytes(self._head) + b"\n[... %d bytes left out ...]\n" % self.dropped_bytes + tail
