"""Iterate over a command's output while it runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from statefork.model import ExecResult, OnOutput, Stream

__all__ = ["ExecStream"]

_PIECES = 256


class ExecStream:
    """The pieces in the order of their arrival, then the end. A slow reader slows the command down, loses nothing."""

    def __init__(self, execute: Callable[[OnOutput], ExecResult]) -> None:
        self._pieces: queue.Queue[tuple[Stream, bytes] | None] = queue.Queue(_PIECES)
        self._outcome: ExecResult | BaseException | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._work, args=(execute,), name="statefork-stream", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[Stream, bytes]]:
        while (piece := self._pieces.get()) is not None:
            yield piece
        self._pieces.put(None)
        if isinstance(self._outcome, BaseException):
            raise self._outcome

    @property
    def result(self) -> ExecResult:
        """Waits for the end; output that was not iterated over is dropped here (the result has it)."""
        self._abandoned = True
        while self._thread.is_alive():
            try:
                self._pieces.get(timeout=0.05)
            except queue.Empty:
                continue
        if isinstance(self._outcome, ExecResult):
            return self._outcome
        assert self._outcome is not None
        raise self._outcome

    def _work(self, execute: Callable[[OnOutput], ExecResult]) -> None:
        try:
            self._outcome = execute(self._piece)
        except BaseException as error:  # noqa: BLE001  it is raised in the reader's thread
            self._outcome = error
        finally:
            self._pieces.put(None)

    def _piece(self, stream: Stream, data: bytes) -> None:
        if not self._abandoned:
            self._pieces.put((stream, data))
