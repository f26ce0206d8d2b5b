"""Names that a live session's overlay shows changed although its upper layer does not have them.

A file of a lower layer may have several names. When one of them is written to, overlayfs (`index=on`) copies the file up once
and shows the copy under all of its names, but the upper directory has only the name that was used; the others hang on the index
in the work directory. Whoever looks for changes in the upper alone misses them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from waypoint.kernel.attributes import attribute
from waypoint.kernel.syscalls import open_inside
from waypoint.view import View, names_in

__all__ = ["changed_aliases"]

_NLINK = "trusted.overlay.nlink"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def changed_aliases(view: View, work: Path) -> list[str]:
    """Paths that may be such names. Nothing, at the price of a short listing, unless a file with several names was copied up.

    Which names those are is written nowhere, so then every file with more than one name is given.
    """
    if not _any_hidden(work / "index"):
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


def _any_hidden(index: Path) -> bool:
    """Whether a copied-up file has a name that is not in the upper.

    The index has one entry per copied-up file, a hard link of it. Where names come and go overlay keeps the number of all names
    in an attribute: `U+1` says one more than the links on disk, of which the entry itself is one; so with `U-1` all are there.
    """
    try:
        with os.scandir(index) as entries:
            for entry in entries:
                count = None if entry.is_dir(follow_symlinks=False) else attribute(entry.path, _NLINK)
                if count is not None and not (count.startswith(b"U-") and int(count[1:]) <= -1):
                    return True
    except FileNotFoundError:
        pass
    return False
