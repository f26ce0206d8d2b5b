"""Long text in pages: what a model sees at once is small, and it can ask for the rest.

The whole text stays here, in memory, until it is the oldest of too much; a cursor names a place in it. A cursor belongs to
the caller that got it.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass

from statefork.errors import NotFound

__all__ = ["PAGE_CHARACTERS", "Excerpt", "Pages", "page_end"]

PAGE_CHARACTERS = 8000
"""About 2,000 tokens."""
MOST_PAGE_CHARACTERS = 50_000
_KEPT_CHARACTERS = 64 << 20


@dataclass(frozen=True, slots=True)
class Excerpt:
    text: str
    cursor: str | None
    """Where the part that was left out begins."""
    left_out: int = 0


class Pages:
    def __init__(self, kept: int = _KEPT_CHARACTERS) -> None:
        self._room = kept
        self._texts: OrderedDict[str, tuple[str, str, int]] = OrderedDict()

    def excerpt(self, text: str, owner: str, limit: int) -> Excerpt:
        """Its head and its tail, the tail three times as long: that is where errors are."""
        if len(text) <= limit:
            return Excerpt(text, None)
        head = page_end(text, 0, limit // 4)
        tail = len(text) - (limit - limit // 4)
        tail = text.find("\n", tail, tail + 200) + 1 or tail
        key = self._keep(text, owner, tail)
        gap = f"\n[… {tail - head} characters left out; read_output with the cursor shows them …]\n"
        return Excerpt(text[:head] + gap + text[tail:], f"{key}.{head}", tail - head)

    def following(self, text: str, owner: str, limit: int) -> Excerpt:
        """Its beginning, for lists that are read from the top."""
        if len(text) <= limit:
            return Excerpt(text, None)
        end = page_end(text, 0, limit)
        return Excerpt(text[:end], f"{self._keep(text, owner, len(text))}.{end}", len(text) - end)

    def read(self, cursor: str, owner: str, limit: int) -> Excerpt:
        """Raises: NotFound."""
        key, _, at = cursor.partition(".")
        kept = self._texts.get(key)
        if kept is None or kept[1] != owner or not at.isdigit():
            raise NotFound(
                "there is no output under this cursor any more; run the command again, with its output in a file if it is long"
            )
        self._texts.move_to_end(key)
        text, _, end = kept
        start = min(int(at), end)
        stop = min(page_end(text, start, limit), end)
        return Excerpt(text[start:stop], f"{key}.{stop}" if stop < end else None, end - stop)

    def _keep(self, text: str, owner: str, end: int) -> str:
        key = secrets.token_hex(6)
        self._texts[key] = (text, owner, end)
        self._room -= len(text)
        while self._room < 0 and len(self._texts) > 1:
            self._room += len(self._texts.popitem(last=False)[1][0])
        return key


def page_end(text: str, start: int, limit: int) -> int:
    """Where a page of at most `limit` characters ends: after a line if one ends in its second half."""
    end = start + limit
    if end >= len(text):
        return len(text)
    newline = text.rfind("\n", start + limit // 2, end)
    return newline + 1 if newline >= 0 else end
