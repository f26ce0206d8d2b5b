"""When to send a request again, and when to give up: decided here, waited for by the transport.

Sent again is what cannot have been done (no connection, 429) and what is done once however often it is sent (reads, and
requests with an idempotency key). What may have been done and cannot be repeated is told as Unreachable.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

import httpx

from statefork.client.errors import Unreachable, error_of, problem_of
from statefork.client.steps import Request

__all__ = ["Patience"]

_FIRST_SECONDS, _MOST_SECONDS = 0.05, 2.0
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_HOPELESS = frozenset({"too_many_environments"})
"""Refused with 429, and waiting does not help: something has to be deleted first."""


class Patience:
    """Of one request. `seconds` is how long it may be tried in all; 0: once."""

    def __init__(self, request: Request, where: str, seconds: float) -> None:
        self._request, self._where = request, where
        self._deadline = time.monotonic() + seconds
        self._next = _FIRST_SECONDS
        self._maybe_done = False

    def after_failure(self, error: httpx.TransportError, *, met: bool) -> float:
        """Seconds to wait; raises Unreachable if there is no use. `met`: this daemon has answered before."""
        what = f"{self._request.method} {self._request.path}"
        if isinstance(error, _NEVER_SENT):
            if not met or not self._time_left():
                raise Unreachable(
                    f"no daemon answers at {self._where}: {error}; start one with `statefork serve`"
                ) from error
        elif not self._request.repeatable:
            raise Unreachable(
                f"{what}: the connection to {self._where} broke ({error or type(error).__name__}), and what came of it is not known; "
                "look, and then ask again"
            ) from error
        elif not self._time_left():
            raise Unreachable(f"{what}: the connection to {self._where} breaks again and again: {error}") from error
        self._maybe_done = self._maybe_done or not isinstance(error, _NEVER_SENT)
        return self._pause()

    def after_answer(self, status: int, headers: Mapping[str, str], body: bytes) -> float | None:
        """None: it went well. Seconds to wait, if it is worth trying again; else raises what the answer says."""
        if status < 400 or (status == 404 and self._maybe_done and self._request.method == "DELETE"):
            return None  # what is not there any more was removed by the attempt whose answer was lost
        problem = problem_of(status, body)
        again = status == 429 or (status in (502, 503, 504) and self._request.repeatable)
        if again and problem["code"] not in _HOPELESS and self._time_left():
            return max(self._pause(), _seconds(headers.get("retry-after")))
        raise error_of(problem)

    def _time_left(self) -> bool:
        return time.monotonic() < self._deadline

    def _pause(self) -> float:
        """Longer each time, and not the same for two clients that failed together."""
        self._next = min(self._next * 2, _MOST_SECONDS)
        return self._next * random.uniform(0.5, 1.0)


def _seconds(text: str | None) -> float:
    try:
        return min(float(text or 0), 60.0)
    except ValueError:
        return 0.0
