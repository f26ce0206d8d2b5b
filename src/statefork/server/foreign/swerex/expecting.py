"""What a caller waits for in a terminal's output: regular expressions, as pexpect has them, but only those that end soon.

Python's engine can take for ever on a pattern that was made for it, and the daemon stands still meanwhile. So a pattern may
repeat something once, and that only a single character; it is looked for in the newest few kilobytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from statefork.server.foreign.swerex.errors import Raised

__all__ = ["PROMPT", "Match", "Patterns"]

PROMPT = "SHELLPS1PREFIX"
"""What SWE-ReX calls its prompt, and tells when a command ended."""
_WINDOW = 4096
_MOST_PATTERNS = 32
_MOST_LENGTH = 512
_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")
_REPEATED = re.compile(r"(?<!\\)(?:\\\\)*[*+?{]")
_REPEATED_GROUP = re.compile(r"\)\s*(?:[*+?{])|\(\?P?[=!<>:]|\\\d")

Match = tuple[str, int, int]
"""The pattern, and where in the text it begins and ends."""


class Patterns:
    """Raises ValueError on the client's side for a pattern that is none, or too much."""

    def __init__(self, given: Sequence[str]) -> None:
        if len(given) > _MOST_PATTERNS or any(len(one) > _MOST_LENGTH for one in given):
            raise Raised(
                "builtins.ValueError", f"expect: at most {_MOST_PATTERNS} patterns of {_MOST_LENGTH} characters"
            )
        self._patterns = [(one, self._compiled(one)) for one in given if one]

    def search(self, text: str, seen: int) -> Match | None:
        """The one that begins first; text before `seen` was looked at already, and may be the beginning of a match."""
        best: Match | None = None
        for name, pattern in self._patterns:
            if pattern is None:
                at = text.find(name, max(0, seen - len(name)))
                found = (name, at, at + len(name)) if at >= 0 else None
            else:
                match = pattern.search(text, max(0, len(text) - _WINDOW))
                found = (name, match.start(), match.end()) if match is not None else None
            if found is not None and (best is None or found[1] < best[1]):
                best = found
        return best

    @staticmethod
    def _compiled(given: str) -> re.Pattern[str] | None:
        if not _SPECIAL.search(given):
            return None
        if len(_REPEATED.findall(given)) > 1 or _REPEATED_GROUP.search(given):
            raise Raised("builtins.ValueError", f"expect: {given!r} is too complicated to be looked for here")
        try:
            return re.compile(given, re.DOTALL)
        except (re.error, OverflowError) as error:
            raise Raised("builtins.ValueError", f"expect: {given!r} is no regular expression: {error}") from None
