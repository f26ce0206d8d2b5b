"""CRIU's images are changed in one field, and all other bytes stay what they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from waypoint.kernel.wire_format import messages, pack, signed, unpack, write_messages


@pytest.mark.parametrize(
    "fields",
    [[], [(1, 0)], [(1, 300), (2, b"name\0"), (1, (1 << 64) - 1)], [(16, b"x" * 200), (15, 1)]],
)
def test_fields_survive(fields: list[tuple[int, int | bytes]]) -> None:
    assert unpack(pack(fields)) == fields


def test_a_message_as_protobuf_writes_it() -> None:
    assert unpack(b"\x08\x96\x01\x12\x07testing") == [(1, 150), (2, b"testing")]
    assert pack([(1, 150), (2, b"testing")]) == b"\x08\x96\x01\x12\x07testing"


def test_images(tmp_path: Path) -> None:
    image = tmp_path / "files.img"
    assert list(messages(image)) == []
    image.write_bytes(b"MAGICNUM")
    write_messages(image, [b"one", b"", b"three"])
    assert list(messages(image)) == [b"one", b"", b"three"]
    assert image.read_bytes().startswith(b"MAGICNUM")
    write_messages(image, [b"less"])
    assert list(messages(image)) == [b"less"]


def test_negative_numbers() -> None:
    assert [signed(value) for value in (5, (1 << 64) - 1)] == [5, -1]


def test_an_unknown_wire_type_is_refused() -> None:
    with pytest.raises(ValueError, match="wire type"):
        unpack(b"\x0d\x00\x00\x00\x00")
