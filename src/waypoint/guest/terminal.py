"""A person's terminal on a session: raw keys in, the screen out, sizes followed, and a key to leave (docs/terminals.md).

init keeps what the screen showed as the bytes that drew it. They are drawn again when a terminal attaches; what among them
asks the terminal a question is left out, or its answer would be typed into the session a second time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from waypoint.errors import UsageError
from waypoint.guest import frames
from waypoint.guest.commands import Link
from waypoint.guest.connection import Connection
from waypoint.guest.screen import Modes, without_questions
from waypoint.kernel import signals

__all__ = ["DETACH", "Remote", "attach", "parse_keys"]

DETACH = b"\x1d"
"""Ctrl-]"""

Left = Literal["detached", "shell_ended"]
_NOTHING_SEEN = (1 << 64) - 1


def parse_keys(text: str) -> bytes:
    """`ctrl-]`, `ctrl-p,ctrl-q`, `~,.`: single characters or ctrl- with one of a-z @ [ \\ ] ^ _, pressed one after the other."""
    keys = bytearray()
    for word in text.split(","):
        name = word.lower().removeprefix("ctrl-")
        if len(word) == 1 and word.isascii() and word.isprintable():
            keys += word.encode()
        elif word.lower().startswith("ctrl-") and len(name) == 1 and name in "abcdefghijklmnopqrstuvwxyz@[\\]^_":
            keys.append(ord(name.upper()) & 0x1F)
        else:
            raise UsageError(f"{text!r} are no detach keys; write them as ctrl-] or ctrl-p,ctrl-q")
    return bytes(keys)


def attach(link: Link, detach: bytes = DETACH, *, keyboard: int = 0, screen: int = 1) -> Left:
    """Until the detach keys are pressed, the terminal hangs up or the shell ends. The terminal is then as it was before.

    Snapshots and restores of the session do not end it. Raises what `link.connect` raises when the session is gone or paused.
    """
    if not os.isatty(keyboard) or not os.isatty(screen):
        raise UsageError(f"session {link.session}: `waypoint shell` needs a terminal; for scripts there is `waypoint exec`")
    with signals.noticed(signals.RESIZED, signals.TERMINATE, signals.HANGUP) as bell, _raw(keyboard):
        attached = _Attached(link, keyboard, screen, bell, _DetachKeys(detach))
        try:
            return attached.run()
        finally:
            attached.leave()


@contextmanager
def _raw(keyboard: int) -> Iterator[None]:
    before = termios.tcgetattr(keyboard)
    tty.setraw(keyboard, termios.TCSADRAIN)
    try:
        yield
    finally:
        try:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        except termios.error as error:
            if error.args[0] != errno.EIO:  # the terminal itself is gone
                raise


class _Attached:
    """One terminal on one session, over as many connections as it takes."""

    def __init__(self, link: Link, keyboard: int, screen: int, bell: int, detach: _DetachKeys) -> None:
        self._link = link
        self._keyboard = keyboard
        self._screen = screen
        self._bell = bell
        self._detach = detach
        self._modes = Modes()
        self._offset = _NOTHING_SEEN
        self._epoch = -1
        self._missed: bytearray | None = None
        """What came before we attached, until all of it is there."""
        self._anew = False
        """It is the whole screen drawn again, and not just what came while we were not connected."""

    def run(self) -> Left:
        while True:
            connection, epoch = self._link.connect()
            with connection:
                if epoch != self._epoch:  # another state has taken the session's place: so has its screen
                    self._offset = _NOTHING_SEEN
                self._epoch = epoch
                rows, columns = self._size()
                connection.send(frames.TERMINAL, 0, frames.ATTACH.pack(rows, columns, self._offset))
                left = self._pump(connection)
            if left is not None:
                return left

    def _pump(self, connection: Connection) -> Left | None:
        """None when the session has dropped the connection, as every snapshot does."""
        while True:
            while (frame := connection.pending()) is not None:
                if frame.type == frames.ENDED:
                    return "shell_ended"
                self._receive(frame)
            readable = select.select([connection.fileno(), self._keyboard, self._bell], [], [])[0]
            if self._bell in readable:
                if set(os.read(self._bell, 512)) & {signals.TERMINATE, signals.HANGUP}:
                    return "detached"
                connection.send(frames.RESIZE, 0, frames.SIZE.pack(*self._size()))
            if self._keyboard in readable:
                typed, leave = self._detach.feed(self._read_keys())
                if typed:
                    connection.send(frames.KEYS, 0, typed)
                if leave:
                    return "detached"
            if connection.fileno() in readable and not connection.fill():
                return None

    def _read_keys(self) -> bytes | None:
        try:
            return os.read(self._keyboard, 1 << 16) or None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return None

    def _receive(self, frame: frames.Frame) -> None:
        if frame.type == frames.KEYS:
            if self._missed is not None:
                self._missed += frame.payload
            else:
                self._offset += len(frame.payload)
                self._draw(frame.payload)
        elif frame.type == frames.SCREEN:
            offset = frames.OFFSET.unpack(frame.payload)[0]
            if self._missed is None:
                self._missed, self._anew = bytearray(), offset != self._offset
                if self._anew:
                    self._clear()
            else:
                missed, self._missed = bytes(self._missed), None
                self._draw(without_questions(missed) if self._anew else missed)
            self._offset = offset

    def _clear(self) -> None:
        """Push what is there up into the scroll-back, so that the session's screen begins where its own began."""
        rows, _ = self._size()
        self._draw(self._modes.undo() + b"\x1b[%d;1H" % rows + b"\n" * rows + b"\x1b[H")

    def _draw(self, data: bytes) -> None:
        self._modes.watch(data)
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._screen, view) :]
            except BlockingIOError:
                select.select([], [self._screen], [])

    def leave(self) -> None:
        """Whatever program is on the session's screen, the caller gets a plain terminal back."""
        try:
            self._draw(self._modes.undo() + b"\r\n")
        except OSError as error:
            if error.errno != errno.EIO:
                raise

    def _size(self) -> tuple[int, int]:
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(self._screen, termios.TIOCGWINSZ, b"\0" * 8))
        return rows or 24, columns or 80


class Remote(_Attached):
    """A terminal that is somewhere else, at the other end of a network: no keys detach it, its owner does."""

    def __init__(self, link: Link, rows: int, columns: int) -> None:
        self._typed, self._typing = os.pipe()
        self._rung, self._ringing = os.pipe()
        super().__init__(link, self._typed, -1, self._rung, _NoKeys())
        self._rows_columns = rows, columns
        self._show: Callable[[bytes], None] = lambda data: None

    def serve(self, draw: Callable[[bytes], None]) -> Left:
        """As `attach`, until `close`. Called once; the descriptors are gone afterwards."""
        self._show = draw
        try:
            return self.run()
        finally:
            for fd in (self._typed, self._rung, self._ringing):
                os.close(fd)
            self._ringing = -1
            self.close()

    def type(self, keys: bytes) -> None:
        view = memoryview(keys)
        while view and self._typing >= 0:
            view = view[os.write(self._typing, view) :]

    def resize(self, rows: int, columns: int) -> None:
        self._rows_columns = rows, columns
        if self._ringing >= 0:
            os.write(self._ringing, bytes([signals.RESIZED]))

    def close(self) -> None:
        fd, self._typing = self._typing, -1
        if fd >= 0:
            os.close(fd)

    def _size(self) -> tuple[int, int]:
        return self._rows_columns

    def _draw(self, data: bytes) -> None:
        self._modes.watch(data)
        self._show(data)


class _DetachKeys:
    """Finds the keys that detach in what is typed; holds back what may become them."""

    def __init__(self, keys: bytes) -> None:
        self._keys = keys
        self._held = b""

    def feed(self, typed: bytes | None) -> tuple[bytes, bool]:
        """(what to send on, whether to leave); None is the end of the keyboard."""
        if typed is None:
            return b"", True
        typed = self._held + typed
        at = typed.find(self._keys)
        if at >= 0:
            self._held = b""
            return typed[:at], True
        most = min(len(typed), len(self._keys) - 1)
        kept = next((n for n in range(most, 0, -1) if self._keys.startswith(typed[-n:])), 0)
        self._held = typed[len(typed) - kept :]
        return typed[: len(typed) - kept], False


class _NoKeys(_DetachKeys):
    def __init__(self) -> None:
        super().__init__(b"")

    def feed(self, typed: bytes | None) -> tuple[bytes, bool]:
        return (b"", True) if typed is None else (typed, False)
