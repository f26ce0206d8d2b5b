"""A little space kept back, so that on a full disk the store can still be opened and things can still be removed.

SQLite needs some files even to read (WAL), and space for the rows of a removal. The last of it is given up then; nothing else
may have it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["Reserve"]

_SIZE = 1 << 20
_SCARCE = 512 << 10
_PLENTY = 16 << 20


class Reserve:
    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self) -> None:
        """Set the space aside, if there is plenty and it is not set aside yet."""
        if self._path.exists() or self._free() < _PLENTY:
            return
        with contextlib.suppress(OSError), self._path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _SIZE)

    def spend(self) -> bool:
        """Something must be written now: give the space up if there is hardly any other; whether there was not."""
        scarce = self._free() < _SCARCE
        if scarce:
            self._path.unlink(missing_ok=True)
        return scarce

    def _free(self) -> int:
        try:
            disk = os.statvfs(self._path.parent)
        except FileNotFoundError:
            return 0
        return disk.f_bavail * disk.f_frsize
