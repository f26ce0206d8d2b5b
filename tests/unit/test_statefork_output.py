"""Marks in a byte stream, however it is cut into pieces; and bounded memory for output of any length."""

from __future__ import annotations

import itertools

import pytest

from statefork.backends.output import Mark, MarkScanner, OutputRecord, new_token

TOKEN = "0123456789abcdef" * 2
STREAM = b"one\0two\0" + TOKEN.encode() + b":3 /tmp\0three\0" + TOKEN[:5].encode() + b"four"


def joined(pieces: list[bytes | Mark]) -> list[bytes | Mark]:
    """Neighbouring plain pieces as one."""
    found: list[bytes | Mark] = []
    for plain, group in itertools.groupby(pieces, key=lambda piece: isinstance(piece, bytes)):
        neighbours = list(group)
        found += [b"".join(piece for piece in neighbours if isinstance(piece, bytes))] if plain else neighbours
    return found


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_marks_are_found_however_the_stream_is_cut(size: int) -> None:
    scanner = MarkScanner()
    scanner.watch(TOKEN, new_token())
    pieces: list[bytes | Mark] = []
    for start in range(0, len(STREAM), size):
        pieces += scanner.feed(STREAM[start : start + size])
    assert joined(pieces) == [b"one\0two", Mark(TOKEN, b"3 /tmp"), b"three\0" + TOKEN[:5].encode() + b"four"]


def test_plain_bytes_are_not_held_back() -> None:
    scanner = MarkScanner()
    scanner.watch(TOKEN)
    assert scanner.feed(b"prompt> ") == [b"prompt> "]
    assert scanner.feed(b"\0" + TOKEN[:3].encode()) == []
    assert scanner.feed(b"x") == [b"\0" + TOKEN[:3].encode() + b"x"]


def test_a_forgotten_token_is_plain() -> None:
    scanner = MarkScanner()
    scanner.watch(TOKEN)
    scanner.forget(TOKEN)
    data = b"\0" + TOKEN.encode() + b":\0"
    assert scanner.feed(data) == [data]


def test_head_and_tail_are_kept() -> None:
    record = OutputRecord(100, None)
    for number in range(1000):
        record.add("stdout", b"%04d\n" % number)
    result = record.result(0)
    assert result.truncated
    head, tail = result.stdout_bytes.split(b"\n[... 4900 bytes left out ...]\n")
    assert head == b"".join(b"%04d\n" % number for number in range(10))
    assert tail == b"".join(b"%04d\n" % number for number in range(990, 1000))
    assert result.stderr_bytes == b""


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101])
def test_the_limit_itself(size: int) -> None:
    record = OutputRecord(100, None)
    record.add("stderr", b"x" * size)
    result = record.result(0)
    assert result.truncated == (size > 100)
    assert (result.stderr_bytes == b"x" * size) == (size <= 100)
