"""A shorter filter says the same of every call as the one that libseccomp made."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import pytest

from waypoint.kernel import seccomp, seccomp_profile, shorter
from waypoint.kernel.capabilities import ALL_CAPABILITIES, DEFAULT_CAPABILITIES

LAYOUT = struct.Struct("=HBBI")
X86_64, X86 = 0xC000003E, 0x40000003
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000


def verdict(program: bytes, architecture: int, number: int, arguments: list[int]) -> int:
    """What the kernel would say, by its documented rules."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments)
    code, at, held = list(LAYOUT.iter_unpack(program)), 0, 0
    while True:
        operation, if_true, if_false, constant = code[at]
        at += 1
        if operation == 0x06:
            return int(constant)
        if operation == 0x20:
            (held,) = struct.unpack_from("=I", data, constant)
        elif operation == 0x05:
            at += constant
        elif operation == 0x54:
            held &= constant
        else:
            holds = {0x15: held == constant, 0x25: held > constant, 0x35: held >= constant, 0x45: bool(held & constant)}
            at += if_true if holds[operation] else if_false


def calls(chance: random.Random) -> Iterator[tuple[int, int, list[int]]]:
    telling = [0, 1, 2, 8, 38, 40, 44, 45, 46, 1 << 32, seccomp_profile.NAMESPACE_FLAGS, 0x20000, 0x20008, 0xFFFFFFFF]
    for architecture in (*seccomp._architectures(), 0, 0xC00000F3):
        for number in (*range(520), 0x40000000, 0x40000001, 0xFFFFFFFF):
            for _ in range(12):
                some = [*telling, chance.getrandbits(32), chance.getrandbits(64)]
                yield architecture, number, [chance.choice(some) for _ in range(6)]


@pytest.mark.parametrize("capabilities", [DEFAULT_CAPABILITIES, ALL_CAPABILITIES, frozenset()])
def test_the_same_verdicts_in_fewer_steps(capabilities: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = seccomp.filter_program(capabilities)
    monkeypatch.setattr(shorter, "shorter", lambda program, architectures: program)
    whole = seccomp.filter_program(capabilities)
    assert len(made) < len(whole) / 2
    seen = set()
    for architecture, number, arguments in calls(random.Random(7)):
        said = verdict(made, architecture, number, arguments)
        assert said == verdict(whole, architecture, number, arguments), (hex(architecture), number, arguments)
        seen.add(said)
    assert {ALLOW, REFUSE, KILL} < seen


def filter_of(*instructions: tuple[int, int, int, int]) -> bytes:
    return b"".join(LAYOUT.pack(*one) for one in instructions)


def test_a_filter_that_does_more_with_the_number_is_left_alone() -> None:
    masks = filter_of((0x20, 0, 0, 0), (0x54, 0, 0, 7), (0x15, 0, 1, 3), (0x06, 0, 0, ALLOW), (0x06, 0, 0, KILL))
    assert shorter.shorter(masks, [X86_64]) == masks


def test_a_tree_with_jumps_that_are_too_long_is_left_alone() -> None:
    """Every other number allowed: more ranges than one jump can pass over."""
    each = [one for number in range(0, 600, 2) for one in ((0x15, 0, 1, number), (0x06, 0, 0, ALLOW))]
    long = filter_of((0x20, 0, 0, 0), *each, (0x06, 0, 0, REFUSE))
    assert shorter.shorter(long, [X86_64]) == long


def test_arguments_are_looked_at_as_before() -> None:
    """Call 5 with an argument of 9 alone, in both halves."""
    original = filter_of(
        (0x20, 0, 0, 4), (0x15, 0, 8, X86_64), (0x20, 0, 0, 0), *[(0x15, 6, 0, 1), (0x15, 5, 0, 2)], (0x15, 0, 4, 5),
        (0x20, 0, 0, 20), (0x15, 0, 2, 0), (0x20, 0, 0, 16), (0x15, 1, 0, 9), (0x06, 0, 0, REFUSE), (0x06, 0, 0, ALLOW),
    )  # fmt: skip
    padded = original[:-8] + filter_of(*[(0x06, 0, 0, ALLOW)] * 20)
    made = shorter.shorter(padded, [X86_64])
    assert len(made) < len(padded)
    for number in range(8):
        for argument in (0, 9, 9 | 1 << 32):
            wanted = verdict(padded, X86_64, number, [argument] * 6)
            assert verdict(made, X86_64, number, [argument] * 6) == wanted
    assert verdict(made, X86, 5, [9] * 6) == verdict(padded, X86, 5, [9] * 6)
