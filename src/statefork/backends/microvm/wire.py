"""The frames between StateFork and the agent: native/wire.h in Python, which explains them."""

from __future__ import annotations

import struct
from enum import IntEnum

__all__ = [
    "HEADER",
    "MAX_PAYLOAD",
    "PADDING",
    "STDIN_WINDOW",
    "WINDOW",
    "Kind",
    "frame",
    "hello",
    "hello_answer",
    "spawn",
]

HEADER = struct.Struct("<BBHI")
MAX_PAYLOAD = 32768
WINDOW = 4194304
STDIN_WINDOW = 65536
PADDING = bytes(MAX_PAYLOAD + 2 * HEADER.size)
_NONCE, _SEED = 16, 32


class Kind(IntEnum):
    HELLO = ord("H")
    PART = ord("x")
    SPAWN = ord("X")
    STDIN = ord("I")
    STDIN_END = ord("E")
    SIGNAL = ord("K")
    GRANT = ord("G")
    FORGET = ord("F")
    CLOCK = ord("T")
    LIST = ord("L")
    SYNC = ord("Y")
    FREEZE = ord("Z")
    STARTED = ord("S")
    FAILED = ord("f")
    STDOUT = ord("O")
    STDERR = ord("R")
    EXIT = ord("e")


def frame(kind: Kind, channel: int = 0, payload: bytes = b"") -> bytes:
    return HEADER.pack(kind, 0, channel, len(payload)) + payload


def hello(nonce: bytes, clock_ns: int, seed: bytes, keep: int) -> bytes:
    assert len(nonce) == _NONCE and len(seed) == _SEED
    return frame(Kind.HELLO, 0, nonce + struct.pack("<Q", clock_ns) + seed + struct.pack("<H", keep))


def hello_answer(nonce: bytes) -> bytes:
    """All of the answer but its last byte, which tells whether the channel was kept."""
    return HEADER.pack(Kind.HELLO, 0, 0, _NONCE + 1) + nonce


def spawn(channel: int, argv: list[bytes], env: list[bytes], user: bytes, cwd: bytes) -> bytes:
    """One SPAWN frame, after as many PART frames as it takes."""
    strings = [user, cwd, *argv, *env]
    text = struct.pack("<HH", len(argv), len(env)) + b"".join(string + b"\0" for string in strings)
    pieces = [text[start : start + MAX_PAYLOAD] for start in range(0, len(text), MAX_PAYLOAD)]
    *early, last = pieces
    return b"".join(frame(Kind.PART, channel, piece) for piece in early) + frame(Kind.SPAWN, channel, last)
