"""A system call filter that decides the same in fewer steps.

The kernel compiles a filter, and works out which calls need no run of it, for every process that CRIU brings back: what that takes
grows with its length. Most calls have one answer whatever their arguments, and calls with the same answer are neighbours in the
kernel's table, so a search tree over ranges of numbers says it all; only what looks at arguments is kept as it was.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["shorter"]

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant."""

_LOAD, _GIVE, _JUMP = 0x20, 0x06, 0x05
_EQUAL, _GREATER, _NOT_LESS = 0x15, 0x25, 0x35
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4
_FARTHEST = 255
_LAYOUT = struct.Struct("=HBBI")


class _Unclear(Exception):
    """It does something with a call's number that is more than to compare it, or has too much to say."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Of a call: an answer, or where in the filter its arguments are looked at."""

    answer: int = 0
    look_at: int | None = None


_Node = tuple[int, "int | _Outcome", "int | _Outcome"]
"""A number, and whereto from it on and below it: another node, or the end."""


def shorter(program: bytes, architectures: Sequence[int]) -> bytes:
    """The same verdict on every call. A filter that is not understood is given back as it is."""
    code: list[Instruction] = list(_LAYOUT.iter_unpack(program))
    try:
        other = _outcome(code, 0, 0)
        blocks = [(one, _block(code, _ranges(code, one))) for one in architectures]
    except _Unclear:
        return program
    if other.look_at is not None:
        return program
    made: list[Instruction] = [(_LOAD, 0, 0, _ARCHITECTURE_AT)]
    for architecture, block in blocks:
        made += [(_EQUAL, 1, 0, architecture), (_JUMP, 0, 0, len(block)), *block]
    made.append((_GIVE, 0, 0, other.answer))
    return b"".join(_LAYOUT.pack(*one) for one in made) if len(made) < len(code) else program


def _outcome(code: list[Instruction], architecture: int, number: int) -> _Outcome:
    at, known = 0, 0
    while True:
        operation, if_true, if_false, constant = code[at]
        if operation == _GIVE:
            return _Outcome(answer=constant)
        if operation == _LOAD:
            if constant not in (_NUMBER_AT, _ARCHITECTURE_AT):
                return _Outcome(look_at=at)
            known = number if constant == _NUMBER_AT else architecture
        elif operation == _JUMP:
            at += constant
        elif operation in (_EQUAL, _GREATER, _NOT_LESS):
            holds = {_EQUAL: known == constant, _GREATER: known > constant, _NOT_LESS: known >= constant}[operation]
            at += if_true if holds else if_false
        else:
            raise _Unclear
        at += 1


def _ranges(code: list[Instruction], architecture: int) -> list[tuple[int, _Outcome]]:
    """The first number of each range, and what becomes of it: between two constants of the filter nothing can change."""
    compared = {constant for operation, _, _, constant in code if operation in (_EQUAL, _GREATER, _NOT_LESS)}
    edges = sorted({0} | {edge for constant in compared for edge in (constant, constant + 1) if edge < 1 << 32})
    ranges: list[tuple[int, _Outcome]] = []
    for edge in edges:
        outcome = _outcome(code, architecture, edge)
        if not ranges or ranges[-1][1] != outcome:
            ranges.append((edge, outcome))
    return ranges


def _block(code: list[Instruction], table: list[tuple[int, _Outcome]]) -> list[Instruction]:
    nodes = _tree(table, 0)
    ends = list(dict.fromkeys(outcome for _, outcome in table))
    place = {outcome: len(nodes) + i for i, outcome in enumerate(ends)}
    tails: list[Instruction] = []
    leaves: list[Instruction] = []
    for outcome in ends:
        if outcome.look_at is None:
            leaves.append((_GIVE, 0, 0, outcome.answer))
        else:
            leaves.append((_JUMP, 0, 0, len(ends) - len(leaves) - 1 + len(tails)))
            tails += _tail(code, outcome.look_at)
    tree: list[Instruction] = []
    for here, (edge, high, low) in enumerate(nodes, 1):
        jumps = [(target if isinstance(target, int) else place[target]) - here for target in (high, low)]
        if max(jumps) > _FARTHEST:
            raise _Unclear
        tree.append((_NOT_LESS, jumps[0], jumps[1], edge))
    return [(_LOAD, 0, 0, _NUMBER_AT), *tree, *leaves, *tails]


def _tree(table: list[tuple[int, _Outcome]], begin: int) -> list[_Node]:
    """In the order in which they stand from `begin` on; none where there is nothing to decide."""
    if len(table) == 1:
        return []
    middle = len(table) // 2
    low = _tree(table[:middle], begin + 1)
    high = _tree(table[middle:], begin + 1 + len(low))
    node = (table[middle][0], begin + 1 + len(low) if high else table[-1][1], begin + 1 if low else table[0][1])
    return [node, *low, *high]


def _tail(code: list[Instruction], begin: int) -> list[Instruction]:
    """All that can be reached from there, in its order: jumps only go forward."""
    reached, ahead = {begin}, [begin]
    while ahead:
        at = ahead.pop()
        for target in _targets(code, at):
            if target not in reached:
                reached.add(target)
                ahead.append(target)
    kept = sorted(reached)
    place = {old: new for new, old in enumerate(kept)}
    made: list[Instruction] = []
    for old in kept:
        operation, if_true, if_false, constant = code[old]
        here = place[old] + 1
        if operation == _JUMP:
            made.append((_JUMP, 0, 0, place[old + 1 + constant] - here))
        elif operation & 7 == _JUMP:
            made.append((operation, place[old + 1 + if_true] - here, place[old + 1 + if_false] - here, constant))
        else:  # what came next does so still
            made.append(code[old])
    return made


def _targets(code: list[Instruction], at: int) -> tuple[int, ...]:
    operation, if_true, if_false, constant = code[at]
    if operation == _GIVE:
        return ()
    if operation == _JUMP:
        return (at + 1 + constant,)
    if operation & 7 == _JUMP:
        return (at + 1 + if_true, at + 1 + if_false)
    return (at + 1,)
