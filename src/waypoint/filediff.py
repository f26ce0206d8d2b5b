"""Which files differ between two roots, without walking them.

Two overlays that share their lower layers can differ only where one of the other layers has a name. So the layers that are not
shared say *where* to look, and the two real views say *what* is there: the kernel's overlay is the judge of whiteouts, opaque
directories and redirects, not a second implementation of its rules. A directory that a layer marks opaque or redirected
(renamed) shows things that no layer names below it; under such a one both views are walked in full.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from waypoint.guest.layer import PRIVATE
from waypoint.kernel.attributes import attributes
from waypoint.kernel.contents import open_regular, same_contents
from waypoint.kernel.syscalls import open_inside
from waypoint.view import Kind, View, kind_of, names_in

__all__ = ["FileChange", "Status", "Where", "compare_files"]

Status = Literal["added", "removed", "changed"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_ELSEWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
"""A layer has no such directory: a live session replaced it meanwhile, or it is a mount that an overlay does not show."""
_MARKS = ("trusted.overlay.opaque", "trusted.overlay.redirect")


@dataclass(frozen=True, slots=True)
class FileChange:
    """One path that differs. A directory that is on one side only stands for all that is in it: `entries` counts that."""

    status: Status
    path: str
    kind: Kind
    detail: str
    entries: int = 0


@dataclass(frozen=True, slots=True)
class Where:
    """Where two views can differ."""

    layers: Sequence[Path] | None
    """Those that the two do not share; None when nothing is known to be shared."""
    uppers: Sequence[Path] = ()
    """Layers that live sessions are writing to."""
    aliases: Sequence[str] = ()
    """Paths that no layer names and that may differ all the same (hardlinks.py)."""
    one_device: bool = False
    """All layers of both lie on one file system, so that inode numbers mean something."""


def compare_files(one: View, other: View, where: Where, *, every: bool = False) -> tuple[list[FileChange], list[str]]:
    """Changes from `one` to `other`, by path, and notes on what could not be judged.

    `every` lists what is in a directory that is on one side only, instead of counting it.
    """
    with ExitStack() as stack:
        opened = None if where.layers is None else tuple(_opened(stack, path) for path in where.layers)
        uppers = tuple(_opened(stack, path) for path in where.uppers)
        work = _Comparison(one, other, every, uppers, where.one_device)
        work.run(opened)
        work.look_again(where.aliases)
    return sorted(work.found, key=lambda change: change.path.split("/")), work.notes


def _opened(stack: ExitStack, path: Path) -> int:
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


@dataclass(frozen=True, slots=True)
class _Place:
    """A directory that is in both views. `layers` have it and name what may differ in it; None: everything may."""

    path: str
    layers: tuple[int, ...] | None


@dataclass(slots=True)
class _Comparison:
    one: View
    other: View
    every: bool
    uppers: tuple[int, ...]
    one_device: bool
    found: list[FileChange] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self, layers: tuple[int, ...] | None) -> None:
        roots = self.one.root, self.other.root
        self._report_pair("/", ".", (roots[0], os.fstat(roots[0])), (roots[1], os.fstat(roots[1])))
        waiting = [_Place("", layers)]
        while waiting:
            waiting += self._directory(waiting.pop())

    def look_again(self, paths: Sequence[str]) -> None:
        """Single paths, unless they or a directory above them were reported already."""
        reported = {change.path for change in self.found}
        for path in paths:
            above = [path[:at] for at, char in enumerate(path) if char == "/"]
            if path.startswith(f"{PRIVATE}/") or any(f"/{part}" in reported for part in (*above, path)):
                continue
            with ExitStack() as stack, contextlib.suppress(OSError):  # gone on one side: its directory is reported
                before, _, name = path.rpartition("/")
                left, right = (_directory(stack, view.root, before) for view in (self.one, self.other))
                self._judge(path, name, left, right)

    def _directory(self, place: _Place) -> Iterator[_Place]:
        """Judge the names in one directory; yields the directories below it that are on both sides."""
        with ExitStack() as stack:
            try:
                left = _directory(stack, self.one.root, place.path)
                right = _directory(stack, self.other.root, place.path)
            except OSError as error:  # longer than a path can be, or renamed in a live session since it was seen
                self.notes.append(f"/{place.path}: not compared: {error.strerror}")
                return
            names = self._names(stack, place, left, right)
            for name in sorted(names):
                if not place.path and name == PRIVATE:
                    continue
                path = f"{place.path}/{name}" if place.path else name
                if self._judge(path, name, left, right):
                    yield _Place(path, names[name])

    def _names(self, stack: ExitStack, place: _Place, left: int, right: int) -> dict[str, tuple[int, ...] | None]:
        """Each name that may differ, with the layers that have a directory of that name, or None where all must be looked at."""
        if place.layers is None:
            return dict.fromkeys([*names_in(left), *names_in(right)])
        found: dict[str, tuple[int, ...] | None] = {}
        for layer in place.layers:
            try:
                fd = _directory(stack, layer, place.path)
            except OSError as error:
                if error.errno not in _ELSEWHERE:
                    raise
                continue
            with os.scandir(fd) as entries:
                for entry in entries:
                    known = found.setdefault(entry.name, ())
                    if known is not None and entry.is_dir(follow_symlinks=False):
                        found[entry.name] = None if _is_marked(fd, entry.name) else (*known, layer)
        return found

    # -- one name ---------------------------------------------------------------------------------------------------

    def _judge(self, path: str, name: str, left: int, right: int) -> bool:
        """Report what differs; True when it is a directory on both sides and has to be looked into."""
        before, after = _look(left, name), _look(right, name)
        if before is None or after is None:
            if after is not None:
                self._report_whole("added", self.other, path, after)
            elif before is not None:
                self._report_whole("removed", self.one, path, before)
            return False
        directories = stat.S_ISDIR(before.st_mode) and stat.S_ISDIR(after.st_mode)
        if directories and (self.one.is_elsewhere(before) or self.other.is_elsewhere(after)):
            return False  # a mount point of a live session: what it covers cannot be seen
        self._report_pair(f"/{path}", name, (left, before), (right, after))
        return directories

    def _report_whole(self, status: Status, view: View, path: str, st: os.stat_result) -> None:
        kind = kind_of(st.st_mode)
        if kind != "directory":
            self.found.append(FileChange(status, f"/{path}", kind, _size(st)))
            return
        entries = 0 if view.is_elsewhere(st) else self._contents(status, view, path)
        self.found.append(FileChange(status, f"/{path}", kind, _counted(entries), entries))

    def _contents(self, status: Status, view: View, path: str) -> int:
        """Count all that is in a directory, and list it if asked."""
        entries = 0
        waiting = [path]
        while waiting:
            below = waiting.pop()
            with ExitStack() as stack:
                try:
                    fd = _directory(stack, view.root, below)
                except OSError as error:
                    self.notes.append(f"/{below}: not listed: {error.strerror}")
                    continue
                for name in names_in(fd):
                    st = _look(fd, name)
                    if st is None:
                        continue
                    entries += 1
                    if self.every:
                        self.found.append(FileChange(status, f"/{below}/{name}", kind_of(st.st_mode), _size(st)))
                    if stat.S_ISDIR(st.st_mode) and not view.is_elsewhere(st):
                        waiting.append(f"{below}/{name}")
        return entries

    def _report_pair(
        self, path: str, name: str, left: tuple[int, os.stat_result], right: tuple[int, os.stat_result]
    ) -> None:
        """What is on both sides, but maybe not the same."""
        kinds = kind_of(left[1].st_mode), kind_of(right[1].st_mode)
        if kinds[0] != kinds[1]:
            detail, entries = f"{kinds[0]} → {kinds[1]}", 0
            if kinds[0] == "directory":
                entries = self._contents("removed", self.one, path[1:])
            elif kinds[1] == "directory":
                entries = self._contents("added", self.other, path[1:])
            self.found.append(FileChange("changed", path, kinds[1], detail, entries))
            return
        try:
            parts = self._parts(path, name, left, right)
        except OSError as error:  # a live session has taken it away meanwhile
            self.notes.append(f"{path}: not compared: {error.strerror}")
            return
        if parts:
            self.found.append(FileChange("changed", path, kinds[1], ", ".join(parts)))

    def _parts(
        self, path: str, name: str, left: tuple[int, os.stat_result], right: tuple[int, os.stat_result]
    ) -> list[str]:
        """What is different between two things of one kind; times are not looked at."""
        (one, before), (other, after) = left, right
        parts = []
        kind = kind_of(before.st_mode)
        if kind == "file":
            if before.st_size != after.st_size:
                parts.append(f"size {before.st_size} → {after.st_size}")
            elif not self._is_one_file(path, before, after) and not _same_file(one, other, name):
                parts.append("content")
        elif kind == "symlink":
            targets = os.readlink(name, dir_fd=one), os.readlink(name, dir_fd=other)
            if targets[0] != targets[1]:
                parts.append(f"target {targets[0]} → {targets[1]}")
        elif kind == "device" and (before.st_rdev, stat.S_IFMT(before.st_mode)) != (
            after.st_rdev,
            stat.S_IFMT(after.st_mode),
        ):
            parts.append("device number")
        modes = stat.S_IMODE(before.st_mode), stat.S_IMODE(after.st_mode)
        if modes[0] != modes[1]:
            parts.append(f"mode {modes[0]:04o} → {modes[1]:04o}")
        owners = [
            f"{view.inside(st.st_uid)}:{view.inside(st.st_gid)}"
            for view, st in ((self.one, before), (self.other, after))
        ]
        if owners[0] != owners[1]:
            parts.append(f"owner {owners[0]} → {owners[1]}")
        first = attributes(f"/proc/self/fd/{one}/{name}", self.one.idmap)
        second = attributes(f"/proc/self/fd/{other}/{name}", self.other.idmap)
        names = sorted(first.keys() | second.keys())
        return parts + [f"attribute {key}" for key in names if first.get(key) != second.get(key)]

    def _is_one_file(self, path: str, before: os.stat_result, after: os.stat_result) -> bool:
        """The very same file of a shared layer: its bytes need not be read.

        What a live session has copied up keeps the number of the file that it was copied from, so a number proves something only
        where the upper has no such name; and one of several names may be copied up without being there.
        """
        facts = [(st.st_ino, st.st_nlink, st.st_size, st.st_mtime_ns, st.st_ctime_ns) for st in (before, after)]
        if not self.one_device or facts[0] != facts[1] or before.st_nlink != 1:
            return False
        return not any(_exists(upper, path[1:]) for upper in self.uppers)


def _size(st: os.stat_result) -> str:
    return f"{st.st_size} bytes" if stat.S_ISREG(st.st_mode) else kind_of(st.st_mode)


def _counted(entries: int) -> str:
    return f"directory, {entries} {'entry' if entries == 1 else 'entries'}"


def _directory(stack: ExitStack, root: int, path: str) -> int:
    """Links are never followed: a live session cannot lead the walk anywhere else."""
    fd = open_inside(root, path or ".", _DIRECTORY, follow=False, one_mount=True)
    stack.callback(os.close, fd)
    return fd


def _exists(root: int, path: str) -> bool:
    try:
        os.close(open_inside(root, path, os.O_PATH | os.O_NOFOLLOW, follow=False))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _look(directory: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_marked(directory: int, name: str) -> bool:
    try:
        marks = os.listxattr(f"/proc/self/fd/{directory}/{name}", follow_symlinks=False)
    except FileNotFoundError:  # in a live session's own layer: look at everything there is now
        return True
    return any(mark in marks for mark in _MARKS)


def _same_file(left: int, right: int, name: str) -> bool:
    first = open_regular(left, name, quietly=True)
    try:
        second = open_regular(right, name, quietly=True)
        try:
            return same_contents(first, second)
        finally:
            os.close(second)
    finally:
        os.close(first)
