"""Protocol buffers without their definitions: enough to read or change a field of one of CRIU's images and keep all the rest.

An image is two magic numbers and then messages, each after its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["Field", "framed", "messages", "pack", "signed", "unpack", "write_messages"]

Field = tuple[int, int | bytes]
"""Number and value: an integer, or the bytes of a string or of a message inside."""
_MAGICS = 8
_VARINT, _BYTES = 0, 2


def messages(image: Path) -> Iterator[bytes]:
    """Of an image that does not exist: none."""
    try:
        data = image.read_bytes()
    except FileNotFoundError:
        return
    at = _MAGICS
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        yield data[at + 4 : at + 4 + size]
        at += 4 + size


def write_messages(image: Path, new: list[bytes]) -> None:
    """It is not emptied first: what is written into an emptied file ext4 looks for room for at once, and not when there is time."""
    with image.open("r+b") as file:
        head = file.read(_MAGICS)
        file.seek(0)
        file.write(head + framed(new))
        file.truncate()


def framed(new: list[bytes]) -> bytes:
    return b"".join(len(message).to_bytes(4, "little") + message for message in new)


def unpack(message: bytes) -> list[Field]:
    """In order; fixed-size numbers do not occur in the images that are read here."""
    found: list[Field] = []
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == _VARINT:
            number, at = _varint(message, at)
            found.append((key >> 3, number))
        elif key & 7 == _BYTES:
            size, at = _varint(message, at)
            found.append((key >> 3, message[at : at + size]))
            at += size
        else:
            raise ValueError(f"a field of wire type {key & 7}")
    return found


def pack(fields: list[Field]) -> bytes:
    data = b""
    for number, value in fields:
        if isinstance(value, bytes):
            data += _packed(number << 3 | _BYTES) + _packed(len(value)) + value
        else:
            data += _packed(number << 3 | _VARINT) + _packed(value)
    return data


def signed(value: int) -> int:
    """A 64-bit integer as it was meant."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _packed(value: int) -> bytes:
    data = b""
    while value > 127:
        data += bytes([value & 127 | 128])
        value >>= 7
    return data + bytes([value])
