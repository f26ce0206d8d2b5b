"""What the attendant (native/attend.c) says and hears, in bytes; native/frames.h is the same page in C."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Frame", "Frames", "told"]

MARK = b"SF\xf5"
_HEAD = 8
MOST_BYTES = 1 << 20

Frame = tuple[str, bytes]
"""Its kind (b begun, f failed, o stdout, e stderr, p terminal, x exit, v change, n entry) and its payload."""


class Frames:
    """A stream cut into frames. One that begins in the middle of something is read from the next mark on."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        rest = self._rest
        rest += data
        while len(rest) >= _HEAD:
            size = int.from_bytes(rest[4:8], "big")
            if rest[:3] != MARK or size > MOST_BYTES:
                at = rest.find(MARK, 1)
                del rest[: at if at > 0 else max(1, len(rest) - len(MARK))]
                continue
            if len(rest) < _HEAD + size:
                return
            yield chr(rest[3]), bytes(rest[_HEAD : _HEAD + size])
            del rest[: _HEAD + size]


def told(kind: str, payload: bytes = b"") -> bytes:
    """A frame for the attendant: i input, c end of input, r size of the terminal, s signal."""
    return kind.encode() + len(payload).to_bytes(4, "big") + payload
