"""How long an engine call took as its caller saw it."""

from __future__ import annotations

import time

__all__ = ["Stopwatch"]


class Stopwatch:
    """Runs from its making."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    @property
    def ms(self) -> float:
        return round((time.perf_counter() - self._began) * 1000, 3)
