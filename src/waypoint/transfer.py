"""Copy files and directories into sessions, out of sessions and snapshots, and between them.

The rules of names are those of `docker cp` (docs/diff-and-cp.md). Below the two starting points only single names are opened,
relative to a directory that is already open and never through a link: what a session does to its tree meanwhile cannot lead
a copy anywhere else. Each file appears whole, by a rename. Fifos, sockets and devices are not copied.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from waypoint.accounts import account
from waypoint.errors import UsageError
from waypoint.file_errors import explain
from waypoint.guest.layer import PRIVATE
from waypoint.kernel.attributes import attributes, set_attributes
from waypoint.kernel.contents import copy_contents, open_regular
from waypoint.kernel.syscalls import open_inside
from waypoint.view import Kind, View, kind_of, local_view, names_in, open_view

if TYPE_CHECKING:
    from waypoint.engine import Engine

__all__ = ["Copied", "Location", "Progress", "copy", "parse_location", "staged", "start_owner"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Location:
    """One side of a copy: a path of the caller's, or of a session or snapshot."""

    key: str | None
    path: str

    def __str__(self) -> str:
        return self.path if self.key is None else f"{self.key}:{self.path}"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a copy is."""

    path: str
    files: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy did; `notes` name what was left out, and why."""

    files: int
    directories: int
    links: int
    size_bytes: int
    notes: tuple[str, ...]


def parse_location(text: str) -> Location:
    """`S:/path`, or a local path; one that has a colon in it is written with a leading `./` or `/`."""
    if not text:
        raise UsageError("an empty path; give a file, or SESSION:/path")
    key, colon, path = text.partition(":")
    if not colon or text.startswith(("/", ".")) or "/" in key:
        return Location(None, text)
    if not key or not path.startswith("/"):
        raise UsageError(
            f"{text}: give an absolute path after the colon (SESSION:/path); a local file of that name is ./{text}"
        )
    return Location(key, path)


def copy(
    engine: Engine,
    source: str,
    target: str,
    *,
    archive: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Copied:
    """Copy `source` to `target`; one of them, or both, is in a session (a snapshot only as source).

    What arrives in a session belongs to its start user, what arrives here to the caller; with `archive` owners stay the same
    numbers, and setuid bits, access lists and file capabilities are kept too.
    """
    origin, destination = parse_location(source), parse_location(target)
    if origin.key is None and destination.key is None:
        raise UsageError(f"neither {source} nor {target} is in a session; write one of them as SESSION:/path")
    with ExitStack() as stack:
        reading = stack.enter_context(_side(engine, origin, write=False))
        writing = stack.enter_context(_side(engine, destination, write=True))
        owner = None if archive or destination.key is None else start_owner(writing)
        work = _Copy(reading, writing, owner, archive, on_progress)
        work.start(_absolute(origin), _absolute(destination))
    return Copied(work.files, work.directories, work.links, work.size_bytes, tuple(work.notes))


def _side(engine: Engine, location: Location, *, write: bool) -> contextlib.AbstractContextManager[View]:
    return local_view() if location.key is None else open_view(engine, location.key, write=write)


def start_owner(view: View) -> tuple[int, int]:
    """Whom new files in this session belong to."""
    assert view.record is not None
    return account(view, view.record.spec.start.user)


def _absolute(location: Location) -> str:
    """`..` stays for the kernel to resolve: behind a link it is not the name before it."""
    path = location.path
    return path if path.startswith("/") else f"{Path.cwd()}/{path}"


def _names_contents(path: str) -> bool:
    """`DIR/.`, `..` and `/` mean what is in the directory, since they are no name to give a copy."""
    return path.rstrip("/").rpartition("/")[2] in ("", ".", "..")


@dataclass(slots=True)
class _Copy:
    """One copy under way."""

    source: View
    target: View
    owner: tuple[int, int] | None
    archive: bool
    on_progress: Callable[[Progress], None] | None
    files: int = 0
    directories: int = 0
    links: int = 0
    size_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    _linked: dict[tuple[int, ...], str] = field(default_factory=dict)
    """Files with several names that were copied already: identity -> path below the target's directory."""

    # -- where it goes ----------------------------------------------------------------------------------------------

    def start(self, source: str, target: str) -> None:
        entry = self.source.stat(source, follow=False)
        there = self.target.exists(target)
        if entry.kind == "directory":
            self._start_directory(source, target, there.kind if there else None)
            return
        if there is None and target.endswith("/"):
            raise UsageError(f"{self.target.name(target)}: no such directory; make it first, or leave the slash off")
        name = source.rstrip("/").rpartition("/")[2]
        if there is not None and there.kind == "directory":
            target = f"{target}/{name}"
        if entry.kind == "file":
            target = self.target.resolve(target)
        with self.source.parent(source) as (reading, name), self.target.parent(target) as (writing, final):
            self._copy_entry(reading, name, writing, final, source, final)

    def _start_directory(self, source: str, target: str, there: Kind | None) -> None:
        if there is not None and there != "directory":
            raise UsageError(f"{self.target.name(target)} is a {there}: a directory cannot be copied over it")
        if there is not None and not _names_contents(source):
            target = f"{target}/{source.rstrip('/').rpartition('/')[2]}"
            there = None
        with self.source.directory(source) as reading:
            if there is None:
                with self.target.parent(target) as (parent, name):
                    self._not_into_itself(parent, reading, source)
                    made = self._make_directory(parent, name, reading, "", self.target.name(target))
                    writing = os.open(name, _DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
            else:
                made, writing = False, self.target.open(target, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self._not_into_itself(writing, reading, source)
                self._copy_tree(reading, writing, source.rstrip("/"))
                if made:
                    _set_times(writing, os.fstat(reading))
            finally:
                os.close(writing)

    def _not_into_itself(self, writing: int, reading: int, source: str) -> None:
        """It would never end: the copy is part of what there is to copy."""
        if self.source.local or self.target.local:
            return
        forbidden = os.fstat(reading)
        fd = os.dup(writing)
        try:
            while True:
                st = os.fstat(fd)
                if os.path.samestat(st, forbidden):
                    raise UsageError(f"{self.source.name(source)} cannot be copied into itself")
                above = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
                os.close(fd)
                fd = above
                if os.path.samestat(st, os.fstat(fd)) or self.target.is_root(fd):
                    return
        finally:
            os.close(fd)

    # -- a tree -----------------------------------------------------------------------------------------------------

    def _copy_tree(self, reading: int, writing: int, label: str) -> None:
        """Directories are reached by their path below the start, so no depth of nesting uses up descriptors."""
        waiting = [""]
        made: list[tuple[str, os.stat_result]] = []
        while waiting:
            below = waiting.pop()
            place = f"{label}/{below}" if below else label
            with explain(self.source.name(place)), ExitStack() as stack:
                inner = self._entered(stack, reading, below, place)
                if inner is None:
                    continue
                outer = _inside(stack, self.target, writing, below)
                for name, st in self._listed(inner, place):
                    path = f"{below}/{name}" if below else name
                    if not stat.S_ISDIR(st.st_mode):
                        self._copy_entry(inner, name, outer, name, f"{label}/{path}", path, start=writing)
                    elif self.source.is_elsewhere(st):
                        self.notes.append(f"{label}/{path}: a mount of its own, left out")
                    else:
                        if self._make_directory(outer, name, inner, name, f"{label}/{path}"):
                            made.append((path, st))
                        waiting.append(path)
        for path, st in reversed(made):  # last of all, since every new name in a directory changes its time
            with explain(path), ExitStack() as stack:
                _set_times(_inside(stack, self.target, writing, path), st)

    def _entered(self, stack: ExitStack, reading: int, below: str, label: str) -> int | None:
        """None when it is no directory any more: a live session goes on working."""
        try:
            return _inside(stack, self.source, reading, below)
        except OSError as error:
            if not below or error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            self.notes.append(f"{label}: gone before it was read")
            return None

    def _listed(self, directory: int, label: str) -> Iterator[tuple[str, os.stat_result]]:
        at_root = not self.source.local and self.source.is_root(directory)
        for name in names_in(directory):
            if at_root and name == PRIVATE:
                continue
            try:
                yield name, os.stat(name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                self.notes.append(f"{label}/{name}: gone before it was read")

    def _make_directory(self, parent: int, name: str, reading: int, source: str, label: str) -> bool:
        """Whether it is new; one that is there already keeps its owner and mode unless owners and modes are what is copied.

        It is to be like `source` in the directory `reading`, or like that directory itself.
        """
        self._not_private(parent, name)
        new = True
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            new = False
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise UsageError(f"{label}: something that is no directory has its name in the target") from None
        if new or self.archive:
            like = os.open(source or ".", _DIRECTORY | os.O_CLOEXEC, dir_fd=reading)
            try:
                fd = os.open(name, _DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
                try:
                    self._dress(fd, os.fstat(like), like)
                finally:
                    os.close(fd)
            finally:
                os.close(like)
        self.directories += new
        return new

    # -- one name ---------------------------------------------------------------------------------------------------

    def _copy_entry(
        self, reading: int, name: str, writing: int, final: str, label: str, below: str, start: int | None = None
    ) -> None:
        """`below` is the path of `final` under the directory `start` where a tree's copy began."""
        self._not_private(writing, final)
        with explain(self.source.name(label)):
            st = os.stat(name, dir_fd=reading, follow_symlinks=False)
            if stat.S_ISLNK(st.st_mode):
                self._copy_link(reading, name, writing, final, st)
            elif not stat.S_ISREG(st.st_mode):
                self.notes.append(f"{label}: a {kind_of(st.st_mode)}, left out")
            elif start is None or st.st_nlink == 1 or not self._link_again(start, st, writing, final):
                self._copy_file(reading, name, writing, final, label)
                if st.st_nlink > 1:
                    self._linked[_identity(st)] = below

    def _copy_link(self, reading: int, name: str, writing: int, final: str, st: os.stat_result) -> None:
        with staged(writing, final) as fresh:
            os.symlink(os.readlink(name, dir_fd=reading), fresh, dir_fd=writing)
            owner = self._owner(st)
            if owner is not None:
                os.chown(fresh, *owner, dir_fd=writing, follow_symlinks=False)
            os.utime(fresh, ns=(st.st_atime_ns, st.st_mtime_ns), dir_fd=writing, follow_symlinks=False)
        self.links += 1

    def _link_again(self, start: int, st: os.stat_result, writing: int, final: str) -> bool:
        """A second name of a file that is copied already; False when the first is not to be found any more."""
        first = self._linked.get(_identity(st))
        if first is None:
            return False
        before, _, name = first.rpartition("/")
        with contextlib.suppress(FileNotFoundError):
            directory = open_inside(start, before or ".", _DIRECTORY, follow=False)
            try:
                with staged(writing, final) as fresh:
                    os.link(name, fresh, src_dir_fd=directory, dst_dir_fd=writing, follow_symlinks=False)
            finally:
                os.close(directory)
            self.files += 1
            return True
        return False

    def _copy_file(self, reading: int, name: str, writing: int, final: str, label: str) -> None:
        try:
            source = open_regular(reading, name)
        except FileNotFoundError:
            self.notes.append(f"{label}: gone before it was read")
            return
        try:
            with staged(writing, final) as fresh:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                target = os.open(fresh, flags, 0o600, dir_fd=writing)
                try:
                    copy_contents(source, target, lambda done: self._moved(label, done))
                    # as it is now, not as it was listed: a live session may have changed it
                    st = os.fstat(source)
                    refused = self._dress(target, st, source)
                    _set_times(target, st)
                finally:
                    os.close(target)
        finally:
            os.close(source)
        self.files += 1
        self._moved(label, 0)
        if refused:
            self.notes.append(f"{label}: without {', '.join(refused)}, which the target does not take")

    # -- what it looks like -----------------------------------------------------------------------------------------

    def _owner(self, st: os.stat_result) -> tuple[int, int] | None:
        """The ids to give, as the target's file system counts; None leaves what creating gave: the caller."""
        if self.archive:
            ids = self.source.inside(st.st_uid), self.source.inside(st.st_gid)
        elif self.owner is not None:
            ids = self.owner
        else:
            return None
        return ids[0] + self.target.idmap, ids[1] + self.target.idmap

    def _dress(self, fd: int, st: os.stat_result, source: int) -> list[str]:
        """Owner, mode, attributes. A file that changes hands loses its setuid bits, as it would by chown(2).

        Returns the attributes that could not be given.
        """
        owner = self._owner(st)
        if owner is not None:
            os.fchown(fd, *owner)
        os.fchmod(fd, stat.S_IMODE(st.st_mode) & (0o7777 if self.archive else 0o1777))
        found = attributes(source, self.source.idmap)
        wanted = {name: value for name, value in found.items() if self.archive or name.startswith("user.")}
        return set_attributes(fd, wanted, self.target.idmap)

    def _moved(self, label: str, done: int) -> None:
        self.size_bytes += done
        if self.on_progress is not None:
            self.on_progress(Progress(label, self.files, self.size_bytes))

    def _not_private(self, directory: int, name: str) -> None:
        if name == PRIVATE and not self.target.local and self.target.is_root(directory):
            raise UsageError(f"{self.target.name(f'/{PRIVATE}')} is Waypoint's own: nothing can be copied there")


def _inside(stack: ExitStack, view: View, start: int, below: str) -> int:
    """A directory below `start`, by a path without links."""
    fd = open_inside(start, below or ".", _DIRECTORY, follow=False, one_mount=not view.local)
    stack.callback(os.close, fd)
    return fd


def _identity(st: os.stat_result) -> tuple[int, ...]:
    """An overlay may report one inode number for what was copied up and for what was not: sizes and times part them."""
    return st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, st.st_nlink


def _set_times(fd: int, st: os.stat_result) -> None:
    os.utime(fd, ns=(st.st_atime_ns, st.st_mtime_ns))


@contextmanager
def staged(directory: int, name: str) -> Iterator[str]:
    """A name to make the file under; it takes `name`'s place when the body is done, and is gone when that failed."""
    fresh = f".waypoint-{secrets.token_hex(6)}"
    try:
        yield fresh
        try:
            os.rename(fresh, name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ENOTEMPTY):
                raise UsageError(f"{name}: a directory has its name in the target") from error
            raise
    finally:
        with contextlib.suppress(FileNotFoundError):  # gone by the rename; two names of one file leave both
            os.unlink(fresh, dir_fd=directory)
