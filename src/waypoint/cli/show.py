"""How sizes, ages and tables look to a person."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from waypoint.cli.output import paint

__all__ = ["age", "size", "table"]


def size(count: int) -> str:
    value = float(count)
    for unit in ("B", "K", "M", "G"):
        if value < 1000:
            return f"{value:.0f}{unit}" if unit == "B" or value >= 10 else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.1f}T"


def age(seconds: float) -> str:
    for limit, divisor, unit in ((90, 1, "s"), (90 * 60, 60, "min"), (36 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the head only for a person who looks at it."""
    shown = [list(head)] if sys.stdout.isatty() else []
    shown += [list(row) for row in rows]
    widths = [max((len(row[i]) for row in shown), default=0) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    if sys.stdout.isatty() and lines:
        lines[0] = paint(lines[0], "1", sys.stdout)
    return "".join(f"{line}\n" for line in lines)
