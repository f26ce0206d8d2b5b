"""A person at the environment's terminal: types, and reads the screen as a terminal emulator would draw it."""

from __future__ import annotations

import re
import time
from types import TracebackType

import pyte

from statefork.testing.fidelity.subject import CaseFailed, Channel, Subject

__all__ = ["Terminal"]


class _Screen(pyte.Screen):
    """vim asks for things of xterm's that pyte takes for colours with a wrong argument."""

    def select_graphic_rendition(self, *attrs: int, private: bool = False) -> None:
        if not private:
            super().select_graphic_rendition(*attrs)


class Terminal:
    """Attached while used as a context manager; leave it before a snapshot, and come back after."""

    def __init__(self, subject: Subject, rows: int = 24, columns: int = 80) -> None:
        self._subject = subject
        self._rows, self._columns = rows, columns
        self._screen = _Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._channel: Channel | None = None

    def __enter__(self) -> Terminal:
        self._channel = self._subject.open_terminal(self._rows, self._columns)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    @property
    def text(self) -> str:
        """The screen's lines, without the blank ends."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    def send(self, keys: str | bytes) -> None:
        self._open.send(keys.encode() if isinstance(keys, str) else keys)

    def line(self, text: str) -> None:
        self.send(text + "\r")

    def resize(self, rows: int, columns: int) -> None:
        self._rows, self._columns = rows, columns
        self._screen.resize(rows, columns)
        self._open.resize(rows, columns)

    def settle(self, seconds: float = 0.25) -> None:
        """Wait until nothing more is drawn: a full-screen program throws keys away while it draws itself anew."""
        while data := self._open.receive(seconds):
            self._stream.feed(data)

    def expect(self, pattern: str, timeout: float = 15.0) -> str:
        """Wait until the pattern is on the screen; returns what it matched."""
        deadline = time.monotonic() + timeout
        compiled = re.compile(pattern, re.MULTILINE)
        while True:
            found = compiled.search(self.text)
            if found is not None:
                return found.group()
            left = deadline - time.monotonic()
            if left <= 0:
                raise CaseFailed(f"the screen never showed {pattern!r}; it shows:\n{self.text}")
            data = self._open.receive(min(left, 1.0))
            if data is None:
                raise CaseFailed(f"the terminal was closed while waiting for {pattern!r}; it showed:\n{self.text}")
            self._stream.feed(data)

    @property
    def _open(self) -> Channel:
        if self._channel is None:
            raise CaseFailed("the terminal is not attached")
        return self._channel
