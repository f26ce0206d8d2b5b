"""Names of a copied-up file that only the overlay's index knows, written into the layer that is sealed.

A file of a lower layer may have several names. When one of them is written to, overlayfs (`index=on`) copies the file up once and
shows the copy under all of its names; but the upper directory has only the name that was used, the others hang on the index in
the work directory. A layer made of the upper alone would show the old content under those names.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from pathlib import Path

from waypoint.kernel import tools
from waypoint.kernel.attributes import attribute

__all__ = ["Hidden", "any_hidden", "link_hidden_names"]

_NLINK = "trusted.overlay.nlink"
_BIG_BYTES = 256 << 10
"""Of an index, as a directory: some thousand entries."""


_Entry = tuple[int, bool, str]
"""Inode, whether it has a name that is not in the upper, name in the index."""


class Hidden:
    """Copied-up files with names that are not in the upper. Looked for from now on, asked for later; nothing may change meanwhile.

    An overlay that can be exported has an entry in its index for every file that was changed or removed: a session that has
    removed thousands has thousands, and they are looked at by a program of its own.
    """

    def __init__(self, index: Path) -> None:
        self._index = index
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(FileNotFoundError):
            if index.stat().st_size > _BIG_BYTES:
                argv = [str(tools.survey_path()), str(index)]
                self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={})
        self._entries = _listed(index) if self._process is None else []

    def inodes(self) -> set[int]:
        return {inode for inode, hidden, _ in self._told() if hidden}

    def forget_files(self) -> None:
        """When the overlay is gone: its links to copied-up files would be counted among their names by the next one over them."""
        for _, _, name in self._told():
            (self._index / name).unlink(missing_ok=True)

    def _told(self) -> list[_Entry]:
        if self._process is not None:
            told, _ = self._process.communicate()
            if self._process.returncode != 0:  # it says nothing of what kept it: here is who can
                self._entries = _listed(self._index)
            else:
                words = (line.split(b" ", 2) for line in told.splitlines())
                self._entries = [(int(inode), hidden == b"1", os.fsdecode(name)) for inode, hidden, name in words]
            self._process = None
        return self._entries

    def cancel(self) -> None:
        """Nobody will ask."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def any_hidden(index: Path) -> bool:
    """Whether a copied-up file has a name that is not in the upper: the usual answer is no, after a short listing."""
    return bool(Hidden(index).inodes())


def _listed(index: Path) -> list[_Entry]:
    """The files in the index; hidden.h says the same of big ones.

    The index has one entry per copied-up file, a hard link of it. Where names come and go overlay keeps the number of all names
    in an attribute: `U+1` says one more than the links on disk, of which the entry itself is one; so with `U-1` all are there.
    A removed file has an entry, too, a whiteout; those are names of one inode, or of a few.
    """
    found: list[_Entry] = []
    whiteouts: set[int] = set()
    try:
        with os.scandir(index) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) or entry.inode() in whiteouts:
                    continue
                if not entry.is_file(follow_symlinks=False) and _is_whiteout(entry.stat(follow_symlinks=False)):
                    whiteouts.add(entry.inode())
                    continue
                count = attribute(entry.path, _NLINK)
                hidden = count is not None and not (count.startswith(b"U-") and int(count[1:]) <= -1)
                found.append((entry.inode(), hidden, entry.name))
    except FileNotFoundError:
        pass
    return found


def _is_whiteout(st: os.stat_result) -> bool:
    return stat.S_ISCHR(st.st_mode) and st.st_rdev == 0


def link_hidden_names(root: str, upper: Path, hidden: set[int], sealed: Path, idmap: int) -> int:
    """Give `sealed` every name that the session at `root` shows for its copied-up files; returns how many were missing.

    Which names those are is written nowhere, so the whole root is walked; only when there are any.
    """
    if not hidden:
        return 0
    known = _names_of(upper, hidden)
    wanted = {}
    for path in known:
        st = os.lstat(f"{root}/{path}")
        wanted[st.st_dev, st.st_ino] = path
    numbers = {ino for _, ino in wanted}
    linked = 0
    device = os.stat(root).st_dev  # all directories of an overlay have its number; what is mounted inside has another
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(f"{root}/{below}") as entries:
            for entry in entries:
                path = f"{below}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    if entry.stat(follow_symlinks=False).st_dev == device:
                        waiting.append(f"{path}/")
                elif entry.inode() in numbers:
                    st = entry.stat(follow_symlinks=False)
                    name = wanted.get((st.st_dev, st.st_ino))
                    if name is not None and not os.path.lexists(sealed / path):
                        _make_parents(root, path, sealed, idmap)
                        os.link(sealed / name, sealed / path, follow_symlinks=False)
                        linked += 1
    for name in wanted.values() if linked else ():
        os.removexattr(sealed / name, _NLINK, follow_symlinks=False)  # all names are here now: the links on disk are the number
    return linked


def _names_of(upper: Path, inodes: set[int]) -> list[str]:
    """One path in the upper for each of the inodes."""
    found: dict[int, str] = {}
    for directory, _, files in os.walk(upper):
        for name in files:
            path = f"{directory}/{name}"
            st = os.lstat(path)
            if st.st_ino in inodes:
                found[st.st_ino] = os.path.relpath(path, upper)
    return list(found.values())


def _make_parents(root: str, path: str, sealed: Path, idmap: int) -> None:
    """The directories above `path`, looking as they do in the session."""
    parts = path.split("/")[:-1]
    for depth in range(1, len(parts) + 1):
        below = "/".join(parts[:depth])
        target = sealed / below
        if os.path.lexists(target):
            continue
        st = os.lstat(f"{root}/{below}")
        target.mkdir()
        os.chown(target, st.st_uid - idmap, st.st_gid - idmap)
        target.chmod(stat.S_IMODE(st.st_mode))
        os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))
