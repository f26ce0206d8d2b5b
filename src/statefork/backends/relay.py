"""From an engine's two callbacks to the one that callers of StateFork give."""

from __future__ import annotations

from collections.abc import Callable

from statefork.model import OnOutput, Stream

__all__ = ["Relay"]


class Relay:
    """Passes output on. A callback that raises is told once, when the command has ended, and then left alone."""

    def __init__(self, on_output: OnOutput | None) -> None:
        self._on_output = on_output
        self._failure: Exception | None = None

    def to(self, stream: Stream) -> Callable[[bytes], None] | None:
        if self._on_output is None:
            return None
        return lambda data: self._pass(stream, data)

    def _pass(self, stream: Stream, data: bytes) -> None:
        if self._on_output is not None:
            try:
                self._on_output(stream, data)
            except Exception as error:  # noqa: BLE001  the caller's own; raised again by `settle`
                self._failure, self._on_output = error, None

    def settle(self) -> None:
        if self._failure is not None:
            raise self._failure
