"""How long a run may take. Each part gets an equal share of what is left, so that what one does not need is for those after it.

On a slow machine a part may not come to all of its backends: those that are left out are listed as such.
"""

from __future__ import annotations

import time

__all__ = ["Allowance"]


class Allowance:
    def __init__(self, seconds: float, parts: int) -> None:
        self._until = time.monotonic() + seconds
        self._parts = parts
        self._part_until = self._until

    def begin_part(self, shares: int = 1) -> None:
        """The next one, which counts as so many; there may be more of them than was said."""
        now = time.monotonic()
        self._part_until = now + max(self._until - now, 0.0) / max(self._parts / shares, 1)
        self._parts -= shares

    def left(self) -> float:
        """Seconds of this part's share; below zero it is used up."""
        return self._part_until - time.monotonic()
