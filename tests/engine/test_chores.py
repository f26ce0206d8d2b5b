"""Chores: done later, in their order, all of them before their owner is closed."""

from __future__ import annotations

import threading
import time

from waypoint.kernel.chores import Chores


def test_each_is_done_when_it_is_due() -> None:
    done: list[str] = []
    ended = threading.Event()
    chores = Chores("test")
    chores.later(lambda: done.append("second"), 0.06)
    chores.later(lambda: done.append("first"), 0.02, lazily=True)
    chores.later(ended.set, 0.12)
    assert done == []
    assert ended.wait(20)
    assert done == ["first", "second"]
    chores.close()


def test_none_is_left_undone() -> None:
    done: list[int] = []
    chores = Chores("test")
    for number in range(5):
        chores.later(lambda number=number: done.append(number), 1000 + number)  # type: ignore[misc]
    chores.close()
    assert done == [0, 1, 2, 3, 4]
    assert not chores.later(lambda: done.append(5))


def test_one_that_fails_keeps_none_from_being_done() -> None:
    done = threading.Event()
    chores = Chores("test")
    chores.later(lambda: 1 / 0, 0)
    chores.later(done.set, 0)
    assert done.wait(20)
    chores.close()


def test_it_wakes_for_what_cannot_wait() -> None:
    """A thread that has dozed off is woken for the next."""
    ended = threading.Event()
    chores = Chores("test")
    chores.later(lambda: None, 0)
    time.sleep(0.05)
    chores.later(ended.set, 0)
    assert ended.wait(20)
    chores.close()
