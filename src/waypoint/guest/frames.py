"""The frame protocol between a host process and a session's init; the same table as native/wire.h."""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["HEADER", "Frame", "decode", "encode"]

HEADER = struct.Struct("<IBI")
MAX_FRAME = 16 << 20
MAX_TEXT = 8 << 20

HELLO, EXEC, RUN, INPUT, SIGNAL, END, FOLLOW = b"H", b"X", b"R", b"I", b"K", b"E", b"A"
TERMINAL, KEYS, RESIZE, QUIESCE, BACKGROUND = b"T", b"t", b"W", b"Q", b"B"
STATE, STARTED, STDOUT, STDERR, DONE, BUSY, READY, ERROR, LOG = b"s", b"x", b"o", b"e", b"d", b"b", b"q", b"!", b"g"
SCREEN, ENDED, TAKEN = b"r", b"z", b"i"

EXEC_INPUT, EXEC_NO_WAIT, EXEC_MERGE, EXEC_OURS = 1, 2, 4, 8

DONE_HEAD = struct.Struct("<iBQQ")
OFFSET = struct.Struct("<Q")
OFFSETS = struct.Struct("<QQ")
SIZE = struct.Struct("<HH")
ATTACH = struct.Struct("<HHQ")


class Frame(NamedTuple):
    type: bytes
    id: int
    payload: bytes


def encode(kind: bytes, identity: int = 0, payload: bytes = b"") -> bytes:
    return HEADER.pack(len(payload), kind[0], identity) + payload


def decode(buffer: bytearray) -> Frame | None:
    """Take one whole frame off the front of `buffer`, or return None when it holds less than one."""
    if len(buffer) < HEADER.size:
        return None
    length, kind, identity = HEADER.unpack_from(buffer)
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes")
    end = HEADER.size + length
    if len(buffer) < end:
        return None
    payload = bytes(buffer[HEADER.size : end])
    del buffer[:end]
    return Frame(bytes([kind]), identity, payload)
