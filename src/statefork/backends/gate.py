"""Keeps programs of `run` and snapshots apart, where a program that hangs on a tool outside cannot be stored."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from statefork.errors import NotCapturable

__all__ = ["Gate"]


class Gate:
    """Many may pass at a time; one that must be alone waits for them and keeps new ones out."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def alone(self, timeout: float) -> Iterator[None]:
        with self._condition:
            self._closed = True
            try:
                if not self._condition.wait_for(lambda: self._inside == 0, timeout):
                    raise NotCapturable(
                        "a program started with `run` is still running; such a program cannot be stored: "
                        "wait for its end, or start it from the shell"
                    )
            except BaseException:
                self._closed = False
                self._condition.notify_all()
                raise
        try:
            yield
        finally:
            with self._condition:
                self._closed = False
                self._condition.notify_all()
