"""What callers may write for an option, beyond the plain kinds of registry.py: sizes, shares, flags, mappings, choices."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from statefork.errors import UsageError

__all__ = ["choice", "flag", "share", "size_bytes", "variables"]


def size_bytes(value: Any) -> int:
    """512M, 1.5G, 1GiB or a number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", str(value).strip().lower())
    if found is None or float(found[1]) == 0:
        raise UsageError(f"{value!r} is not a size; write it as 512M or 2G")
    return int(float(found[1]) * 1024 ** " kmgt".index(found[2] or " "))


def share(value: Any) -> float:
    """A number of processors, maybe a fraction."""
    try:
        cpus = float(value)
    except (TypeError, ValueError):
        cpus = 0
    if not 0 < cpus < float("inf"):
        raise UsageError(f"{value!r} is not a number of processors; write it as 1 or 0.5")
    return cpus


_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def flag(value: Any) -> bool:
    """A command line has only words."""
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if not isinstance(value, bool):
        raise UsageError(f"{value!r} is neither True nor False")
    return value


def variables(value: Any) -> tuple[tuple[str, str], ...]:
    try:
        pairs = tuple((str(key), str(word)) for key, word in dict(value).items())
    except (TypeError, ValueError):
        raise UsageError(f"{value!r} is not a mapping of names to values") from None
    for name, _ in pairs:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"{name!r} cannot name a variable")
    return pairs


def choice(*words: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if value not in words:
            raise UsageError(f"{value!r} is not one of {', '.join(words)}")
        return str(value)

    return convert
