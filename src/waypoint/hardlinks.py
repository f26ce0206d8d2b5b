"""Names that a live session's overlay shows changed although its upper layer does not have them.

A file of a lower layer may have several names. When one of them is written to, overlayfs (`index=on`) copies the file up once
and shows the copy under all of its names, but the upper directory has only the name that was used; the others hang on the index
in the work directory. Whoever looks for changes in the upper alone misses them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from waypoint.kernel.aliases import any_hidden
from waypoint.kernel.syscalls import open_inside
from waypoint.view import View, names_in

__all__ = ["changed_aliases"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def changed_aliases(view: View, work: Path) -> list[str]:
    """Paths that may be such names. Nothing, at the price of a short listing, unless a file with several names was copied up.

    Which names those are is written nowhere, so then every file with more than one name is given.
    """
    if not any_hidden(work / "index"):
        return []
    found = []
    waiting = [""]
    while waiting:
        below = waiting.pop()
        try:
            fd = open_inside(view.root, below or ".", _DIRECTORY, follow=False, one_mount=True)
        except OSError:  # gone since it was listed
            continue
        try:
            for name in names_in(fd):
                path = f"{below}/{name}" if below else name
                try:
                    st = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(st.st_mode) and not view.is_elsewhere(st):
                    waiting.append(path)
                elif st.st_nlink > 1 and not stat.S_ISDIR(st.st_mode):
                    found.append(path)
        finally:
            os.close(fd)
    return found
