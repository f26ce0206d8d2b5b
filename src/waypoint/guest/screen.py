"""What a terminal's bytes do to it, as far as it matters for attaching and leaving."""

from __future__ import annotations

import re

__all__ = ["Modes", "without_questions"]

_SEQUENCE = re.compile(
    rb"\x1b\[\?(?P<private>[0-9;]+)(?P<on>[hl])"
    rb"|\x1b(?P<keypad>[=>])"
    rb"|\x1b\[>4;?(?P<keys>[0-9]*)m"
    rb"|\x1b\[(?P<cursor>[0-9]*) q"
    rb"|\x1b\[(?P<region>[0-9;]*)r"
    rb"|\x1b\[(?P<kitty>[><])[0-9;]*u"
    rb"|\x1b(?P<reset>c)"
)
_UNFINISHED = re.compile(rb"\x1b(?:\[[?>< 0-9;]{0,40})?\Z")
_ON_FROM_THE_START = {7, 25}
_OTHER_SCREEN = {47, 1047, 1049}

_QUESTION = re.compile(
    rb"\x1b\[[?>=]?[0-9;]*[cn]"  # attributes, status, where the cursor is
    rb"|\x1b\[(?:1[13-9]|2[01])(?:;[0-9]*)*t"  # size, title
    rb"|\x1b\[\??[0-9;]*\$p|\x1b\[>[0-9;]*q|\x1b\[\?u"  # modes, version, keyboard
    rb"|\x1b\][^\x07\x1b]*\?(?:\x07|\x1b\\)"  # colours, clipboard
    rb"|\x1bP[$+]q[^\x1b]*\x1b\\"  # settings
    rb"|\x05"
)
_BELL = re.compile(rb"(\x1b\][^\x07\x1b]*(?:\x07|\x1b\\))|\x07")


def without_questions(data: bytes) -> bytes:
    """The bytes of a screen that was drawn before: nothing in them makes a terminal answer or ring."""
    return _BELL.sub(lambda found: found[1] or b"", _QUESTION.sub(b"", data))


class Modes:
    """Which modes a stream of bytes has left the terminal in."""

    def __init__(self) -> None:
        self._tail = b""
        self._start()

    def _start(self) -> None:
        self._on: set[int] = set()
        self._off: set[int] = set()
        self._other = dict.fromkeys(("keypad", "keys", "cursor", "region"), False)
        self._kitty = 0

    def watch(self, data: bytes) -> None:
        data = self._tail + data
        for found in _SEQUENCE.finditer(data):
            kind = found.lastgroup
            if kind == "on":
                for number in (int(word) for word in found["private"].split(b";") if word):
                    (self._on if found["on"] == b"h" else self._off).add(number)
                    (self._off if found["on"] == b"h" else self._on).discard(number)
            elif kind == "keypad":
                self._other["keypad"] = found["keypad"] == b"="
            elif kind == "kitty":
                self._kitty = max(0, self._kitty + (1 if found["kitty"] == b">" else -1))
            elif kind == "reset":
                self._start()
            elif kind is not None:
                self._other[kind] = found[kind] not in (b"", b"0")
        unfinished = _UNFINISHED.search(data)
        self._tail = unfinished[0] if unfinished else b""

    def undo(self) -> bytes:
        """What makes it a plain terminal again; touches nothing that was not changed, since leaving a screen moves the cursor."""
        words = [b"\x1b[?%dl" % number for number in sorted(self._on - _ON_FROM_THE_START - _OTHER_SCREEN)]
        words += [b"\x1b[?%dh" % number for number in sorted(self._off & _ON_FROM_THE_START)]
        words += [b"\x1b[<%du" % self._kitty] if self._kitty else []
        undoing = {"keypad": b"\x1b>", "keys": b"\x1b[>4;0m", "cursor": b"\x1b[0 q", "region": b"\x1b7\x1b[r\x1b8"}
        words += [undoing[name] for name, changed in self._other.items() if changed]
        words += [b"\x1b[?%dl" % number for number in sorted(self._on & _OTHER_SCREEN)]
        self._start()
        return b"".join(words) + b"\x1b[0m"
