"""Pages of the documentation with a part that a command writes; the words around it are written by people."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_between_marks"]


def write_between_marks(page: Path, mark: str, text: str) -> None:
    """`text` takes the place of what is between `<!-- mark -->` and `<!-- end of mark -->`; the page changes whole or not."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
    before = page.read_text() if page.exists() else f"{begin}{end}"
    head, _, rest = before.partition(begin)
    tail = rest.partition(end)[2]
    fresh = page.with_suffix(".new")
    fresh.write_text(f"{head}{begin}{text}{end}{tail}")
    fresh.replace(page)
