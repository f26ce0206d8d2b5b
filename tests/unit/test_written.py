"""Sets of addresses, against sets of pages."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from waypoint.kernel.written import PAGE, Range, united, without

ranges = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 6)).map(lambda pair: (pair[0] * PAGE, sum(pair) * PAGE)), max_size=12
)


def pages(found: list[Range]) -> set[int]:
    return {page for start, end in found for page in range(start, end, PAGE)}


def is_united(found: list[Range]) -> bool:
    return all(start < end for start, end in found) and all(a[1] < b[0] for a, b in itertools.pairwise(found))


@given(ranges)
def test_united(some: list[Range]) -> None:
    assert pages(united(some)) == pages(some)
    assert is_united(united(some))


@given(ranges, ranges)
def test_without(some: list[Range], others: list[Range]) -> None:
    left, right = united(some), united(others)
    assert pages(without(left, right)) == pages(left) - pages(right)
    assert is_united(without(left, right))
