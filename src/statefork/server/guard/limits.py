"""How much a caller may send, how fast, and how slowly.

A body is counted as it arrives, whatever its Content-Length says. Slow clients: the head of a request, each piece of its body
and the reading of an answer have deadlines (the first and the last are kept by the connection itself, see listening.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope

from statefork.server.guard.principal import Principal
from statefork.server.guard.problems import Refused

__all__ = ["Limits", "RateLimiter", "body_limited", "check_environments", "large_body"]


@dataclass(frozen=True, slots=True)
class Limits:
    body_bytes: int = 16 * 1024 * 1024
    large_body_bytes: int = 4 * 1024**3
    """For routes that take a stream (`large_body`)."""
    requests_per_second: float = 1000.0
    """Per token, on average; 0: no limit."""
    burst: int = 2000
    refusals_per_minute: float = 60.0
    """Per address: how often wrong tokens are told so; then 429 without a look at the token."""
    head_seconds: float = 10.0
    body_idle_seconds: float = 30.0
    """The longest wait for the next piece of a body."""
    body_bytes_per_second: float = 1024.0
    """Below this on average, after `body_idle_seconds`, a sender is cut off."""
    write_seconds: float = 60.0
    """How long an answer may wait for its reader to take the next 48 KiB."""


class RateLimiter:
    """A token bucket per key; forgets those that are full again, and knows at most `size` keys."""

    def __init__(self, per_second: float, burst: float, size: int = 10_000) -> None:
        self._rate, self._burst, self._size = per_second, burst, size
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_seconds(self, key: str, now: float | None = None, *, take: bool = True) -> float:
        """0: go on (and one is taken); else how long until there is one."""
        if self._rate <= 0:
            return 0.0
        now = time.monotonic() if now is None else now
        level, at = self._buckets.pop(key, (self._burst, now))
        level = min(self._burst, level + (now - at) * self._rate)
        allowed = level >= 1
        self._buckets[key] = (level - 1 if allowed and take else level, now)
        if len(self._buckets) > self._size:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - level) / self._rate


def check_environments(principal: Principal, count: int, adding: int = 1) -> None:
    """`count` is what the token owns now. Raises Refused 429 when it would own more than it may."""
    allowed = principal.max_environments
    if allowed is not None and count + adding > allowed:
        raise Refused(
            429,
            "too_many_environments",
            f"token {principal.token_id} may have {allowed} environments and has {count}; delete one first",
            limit=allowed,
            count=count,
        )


async def large_body(connection: HTTPConnection) -> None:
    """A FastAPI dependency for routes that stream their body (`request.stream()`) and so may take a large one."""
    connection.scope["statefork.large_body"] = True


def body_limited(scope: Scope, receive: Receive, limits: Limits) -> Receive:
    """`receive` that raises Refused 413 or 408 on a body that is too large or comes too slowly."""
    declared = _content_length(scope)
    got, began, done = 0, 0.0, False

    async def limited() -> Message:
        nonlocal got, began, done
        if done:
            return await receive()  # waits for the disconnect, for as long as that takes
        allowed = limits.large_body_bytes if scope.get("statefork.large_body") else limits.body_bytes
        began = began or time.monotonic()
        if declared is not None and declared > allowed:
            raise _too_large(allowed)
        message = await _in_time(receive, limits.body_idle_seconds)
        if message["type"] != "http.request":
            done = True
            return message
        got += len(message.get("body", b""))
        done = not message.get("more_body", False)
        if got > allowed:
            raise _too_large(allowed)
        elapsed = time.monotonic() - began
        if not done and elapsed > limits.body_idle_seconds and got < elapsed * limits.body_bytes_per_second:
            raise _too_slow()
        return message

    return limited


async def _in_time(receive: Callable[[], Awaitable[Message]], seconds: float) -> Message:
    try:
        async with asyncio.timeout(seconds):
            return await receive()
    except TimeoutError:
        raise _too_slow() from None


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None


def _too_large(allowed: int) -> Refused:
    return Refused(
        413,
        "too_large",
        f"the body is larger than {allowed} bytes; upload large things as a tar stream",
        headers={"Connection": "close"},
        limit_bytes=allowed,
    )


def _too_slow() -> Refused:
    return Refused(408, "too_slow", "the body came too slowly; send it again", headers={"Connection": "close"})
