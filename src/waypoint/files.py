"""Single files of a session, from outside: read, write, list, remove, move. Reading works for snapshots too.

These act as the host's root: permissions inside do not count. What is made belongs to the session's start user, or to `user`.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from waypoint.accounts import account
from waypoint.errors import UsageError
from waypoint.file_errors import explain
from waypoint.kernel.syscalls import open_inside
from waypoint.transfer import staged, start_owner
from waypoint.view import Entry, View, names_in, open_view

if TYPE_CHECKING:
    from waypoint.engine import Engine

__all__ = ["DEFAULT_LIMIT", "list_files", "mkdir", "move", "read_file", "remove", "stat_file", "write_file"]

DEFAULT_LIMIT = 64 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def read_file(engine: Engine, key: str, path: str, *, limit: int = DEFAULT_LIMIT) -> bytes:
    """A regular file's bytes, of a session or snapshot. NotFound; UsageError when it is larger than `limit` or no file."""
    with open_view(engine, key) as view:
        return view.read(_checked(path), limit)


def list_files(engine: Engine, key: str, path: str = "/") -> list[Entry]:
    with open_view(engine, key) as view:
        return view.entries(_checked(path))


def stat_file(engine: Engine, key: str, path: str, *, follow: bool = True) -> Entry:
    with open_view(engine, key) as view:
        return view.stat(_checked(path), follow=follow)


def write_file(
    engine: Engine,
    key: str,
    path: str,
    data: bytes,
    *,
    mode: int | None = None,
    user: str | None = None,
    parents: bool = False,
) -> None:
    """The file appears, or is replaced, in one step. One that was there keeps its mode and owner unless others are given."""
    with open_view(engine, key, write=True) as view:
        owner = start_owner(view) if user is None else account(view, user)
        if parents:
            _make_directories(view, _checked(path).rstrip("/").rpartition("/")[0], 0o755, owner)
        path = view.resolve(_checked(path))
        with view.parent(path) as (directory, name), explain(view.name(path)):
            before = _before(view, directory, name)
            if before is not None and user is None:
                owner = before.uid, before.gid
            if mode is None:
                mode = 0o644 if before is None else before.mode
            with staged(directory, name) as fresh:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(fresh, flags, 0o600, dir_fd=directory), "wb", buffering=0) as file:
                    rest = memoryview(data)
                    while rest:
                        rest = rest[file.write(rest) :]
                    _give(view, file.fileno(), owner, mode)


def _before(view: View, directory: int, name: str) -> Entry | None:
    try:
        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(st.st_mode):
        raise UsageError(f"{view.name(name)} is there and is not a regular file")
    return Entry(
        name,
        "file",
        stat.S_IMODE(st.st_mode),
        view.inside(st.st_uid),
        view.inside(st.st_gid),
        st.st_size,
        st.st_mtime_ns,
    )


def mkdir(
    engine: Engine, key: str, path: str, *, mode: int = 0o755, user: str | None = None, parents: bool = False
) -> None:
    """Exists when something is there; with `parents`, missing directories above are made and an existing one is no error."""
    with open_view(engine, key, write=True) as view:
        owner = start_owner(view) if user is None else account(view, user)
        if parents:
            _make_directories(view, _checked(path), mode, owner)
        else:
            _make_directory(view, _checked(path), mode, owner)


def _make_directories(view: View, path: str, mode: int, owner: tuple[int, int]) -> None:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    for count in range(1, len(parts) + 1):
        step = "/" + "/".join(parts[:count])
        there = view.exists(step)
        if there is None:
            _make_directory(view, step, mode if count == len(parts) else 0o755, owner)
        elif there.kind != "directory":
            raise UsageError(f"{view.name(step)} is a {there.kind}, not a directory")


def _make_directory(view: View, path: str, mode: int, owner: tuple[int, int]) -> None:
    with view.parent(path) as (directory, name), explain(view.name(path)):
        os.mkdir(name, 0o700, dir_fd=directory)
        fd = os.open(name, _DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        try:
            _give(view, fd, owner, mode)
        finally:
            os.close(fd)


def _give(view: View, fd: int, owner: tuple[int, int], mode: int) -> None:
    os.fchown(fd, owner[0] + view.idmap, owner[1] + view.idmap)
    os.fchmod(fd, mode)


def move(engine: Engine, key: str, source: str, target: str) -> None:
    """rename(2): `target` is the new name itself, and a file there is replaced. Links are moved, not followed."""
    with open_view(engine, key, write=True) as view:
        with view.parent(_checked(source)) as (old, name), view.parent(_checked(target)) as (new, final):
            with explain(f"{view.name(source)} to {target}"):
                os.rename(name, final, src_dir_fd=old, dst_dir_fd=new)


def remove(engine: Engine, key: str, path: str, *, recursive: bool = False) -> None:
    """A file, a link or an empty directory; with `recursive` a directory with all that is in it, never across a mount."""
    with open_view(engine, key, write=True) as view:
        with view.parent(_checked(path)) as (directory, name), explain(view.name(path)):
            st = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISDIR(st.st_mode):
                os.unlink(name, dir_fd=directory)
                return
            if recursive:
                fd = open_inside(directory, name, _DIRECTORY, follow=False, one_mount=True)
                try:
                    _empty(fd)
                finally:
                    os.close(fd)
            os.rmdir(name, dir_fd=directory)


def _empty(start: int) -> None:
    """Every directory is reached by its path below the start and without links, so no depth uses up descriptors."""
    waiting, found = [""], []
    while waiting:
        below = waiting.pop()
        fd = open_inside(start, below or ".", _DIRECTORY, follow=False, one_mount=True)
        try:
            for name in names_in(fd):
                if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    waiting.append(f"{below}/{name}" if below else name)
                else:
                    os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)
        if below:
            found.append(below)
    for below in reversed(found):
        before, _, name = below.rpartition("/")
        fd = open_inside(start, before or ".", _DIRECTORY, follow=False, one_mount=True)
        try:
            os.rmdir(name, dir_fd=fd)
        finally:
            os.close(fd)


def _checked(path: str) -> str:
    if not path.startswith("/"):
        raise UsageError(f"{path!r} is not an absolute path inside the session; begin it with /")
    return path
