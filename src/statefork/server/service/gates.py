"""How much goes on at once. Calls into backends block, so each has a thread; what finds neither a thread nor a place in the
queue is told to come back later (429), instead of making everybody slow."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from statefork.server.guard.problems import Refused

__all__ = ["Gate"]

T = TypeVar("T")


class Gate:
    """Used from the event loop only."""

    def __init__(self, name: str, slots: int, queue: int) -> None:
        self.name = name
        self._slots, self._queue = slots, queue
        self._pool = ThreadPoolExecutor(slots, thread_name_prefix=f"statefork-{name}")
        self._under_way = 0
        self._seconds = 0.05
        """How long one takes, lately: what Retry-After is made from."""

    @property
    def running(self) -> int:
        return min(self._under_way, self._slots)

    @property
    def waiting(self) -> int:
        return max(0, self._under_way - self._slots)

    def check(self, more: int = 1) -> None:
        if self._under_way + more > self._slots + self._queue:
            wait = self._seconds * (self._queue + 1) / self._slots
            raise Refused(
                429,
                "overloaded",
                f"{self._slots} of this kind go on and {self._queue} wait already; try again later",
                retry_after=min(max(wait, 1.0), 30.0),
            )

    def start(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Refused when there is no room; what has begun goes on, whether or not anybody waits for the answer."""
        self.check()
        self._under_way += 1
        began = time.monotonic()
        context = contextvars.copy_context()
        future = asyncio.get_running_loop().run_in_executor(self._pool, lambda: context.run(call))
        future.add_done_callback(lambda done: self._ended(began, done))
        return future

    async def run(self, call: Callable[[], T]) -> T:
        return await asyncio.shield(self.start(call))

    def _ended(self, began: float, done: asyncio.Future[T]) -> None:
        self._under_way -= 1
        if not done.cancelled():
            done.exception()  # whoever waited may have left: then nobody is to complain about it
        self._seconds += (time.monotonic() - began - self._seconds) / 16

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
