"""A window on the files of a session or snapshot, from outside.

A live session is seen through its PID 1's root; a paused or dead session and a snapshot through an overlay of their layers
that is mounted nowhere (kernel/overlays.py). Every path is resolved by the kernel inside that root: whatever links a session
made, `..` and absolute targets stay in it. What lies on a mount of its own in a live session (/proc, /sys, /dev/pts) is not
part of its files.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from waypoint.errors import Ambiguous, Busy, NotFound, SessionDead, UsageError, WaypointError, WrongState
from waypoint.file_errors import explain
from waypoint.guest.layer import PRIVATE
from waypoint.kernel import processes
from waypoint.kernel.overlays import open_overlay
from waypoint.kernel.syscalls import open_inside
from waypoint.model import BaseRecord, Process, SessionRecord, SnapshotRecord
from waypoint.store import locks
from waypoint.store.store import Store

if TYPE_CHECKING:
    from waypoint.engine import Engine

__all__ = ["Entry", "Kind", "View", "describe", "find", "kind_of", "local_view", "names_in", "open_view", "own_layers"]

Kind = Literal["file", "directory", "symlink", "fifo", "socket", "device"]
NOBODY = 65534
_MOST_LINKS = 40


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a session, with ids as they are inside it."""

    name: str
    kind: Kind
    mode: int
    uid: int
    gid: int
    size_bytes: int
    mtime_ns: int
    target: str | None = None
    """Where a symbolic link points."""


class View:
    """Everything below the descriptor `root`; ids seen through it are `idmap` above those inside."""

    def __init__(self, root: int, record: SessionRecord | SnapshotRecord | None, *, idmap: int = 0) -> None:
        self.root = root
        self.idmap = idmap
        self.record = record
        """As it was when the view was opened, and still is while a session's view is open; None for the caller's own files."""
        st = os.fstat(root)
        self._identity = (st.st_dev, st.st_ino)

    @property
    def local(self) -> bool:
        """The caller's own file system: mounts may be crossed, and nothing in it is Waypoint's."""
        return self.record is None

    @property
    def label(self) -> str:
        return "" if self.record is None else self.record.id

    def inside(self, identity: int) -> int:
        """An id as the session itself sees it."""
        if not self.idmap:
            return identity
        return identity - self.idmap if identity >= self.idmap else NOBODY

    def name(self, path: str) -> str:
        """`path` as messages say it."""
        return path if self.local else f"{self.label}:{path}"

    def is_root(self, directory: int) -> bool:
        st = os.fstat(directory)
        return (st.st_dev, st.st_ino) == self._identity

    def is_elsewhere(self, st: os.stat_result) -> bool:
        """Whether this directory is another mount's. Overlay gives all its directories one device number, files maybe not."""
        return not self.local and st.st_dev != self._identity[0]

    # -- paths ------------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int) -> int:
        """As a process inside would open it. The caller closes it."""
        self._not_private(path)
        if "\0" in path:
            raise UsageError("a path cannot contain a NUL byte")
        with explain(self.name(path)):
            return open_inside(self.root, path, flags, one_mount=not self.local)

    @contextmanager
    def opened(self, path: str, flags: int) -> Iterator[int]:
        fd = self.open(path, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def directory(self, path: str) -> Iterator[int]:
        with self.opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            yield fd

    @contextmanager
    def parent(self, path: str) -> Iterator[tuple[int, str]]:
        """The directory that holds the last name of `path`, and that name; links on the way are followed, a last one is not."""
        before, _, name = path.rstrip("/").rpartition("/")
        if name in ("", ".", ".."):
            raise UsageError(f"{self.name(path)} does not end in a name; give the path of a file or directory")
        with self.directory(before or "/") as fd:
            if name == PRIVATE and not self.local and self.is_root(fd):
                self._not_private(f"/{PRIVATE}")
            yield fd, name

    def resolve(self, path: str) -> str:
        """`path` with links in its last place followed, for writing through them; that last target need not exist."""
        for _ in range(_MOST_LINKS):
            with self.parent(path) as (directory, name):
                try:
                    target = os.readlink(name, dir_fd=directory)
                except OSError:  # not a link, or nothing at all
                    return path
            before = path.rstrip("/").rpartition("/")[0]
            path = target if target.startswith("/") else f"{before}/{target}"
        raise UsageError(f"{self.name(path)}: too many symbolic links")

    def _not_private(self, path: str) -> None:
        first = next((part for part in path.split("/") if part not in ("", ".", "..")), "")
        if first == PRIVATE and not self.local:
            raise UsageError(f"{self.name(f'/{PRIVATE}')} is Waypoint's own and not part of the session's files")

    # -- looking ----------------------------------------------------------------------------------------------------

    def stat(self, path: str, *, follow: bool = True) -> Entry:
        with self.opened(path, os.O_PATH | (0 if follow else os.O_NOFOLLOW)) as fd:
            return describe(self, os.fstat(fd), path.rstrip("/").rpartition("/")[2] or "/", fd)

    def exists(self, path: str) -> Entry | None:
        """What is there, links followed; None when nothing is, or only a dangling link."""
        try:
            return self.stat(path)
        except NotFound:
            return None

    def entries(self, path: str) -> list[Entry]:
        """A directory's contents by name, without Waypoint's own."""
        with self.directory(path) as fd:
            private = not self.local and self.is_root(fd)
            found = []
            for name in names_in(fd):
                if private and name == PRIVATE:
                    continue
                with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                    link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                    try:
                        found.append(describe(self, os.fstat(link), name, link))
                    finally:
                        os.close(link)
            return found

    def read(self, path: str, limit: int) -> bytes:
        """A regular file's bytes; UsageError when there are more than `limit`."""
        with self.opened(path, os.O_PATH) as found:
            st = os.fstat(found)
            if not stat.S_ISREG(st.st_mode):
                raise UsageError(f"{self.name(path)} is not a regular file but a {kind_of(st.st_mode)}")
            # the very file that was looked at, not what has its name by now
            with open(f"/proc/self/fd/{found}", "rb") as file, explain(self.name(path)):
                data = file.read(limit + 1)
        if len(data) > limit:
            raise UsageError(f"{self.name(path)} is larger than {limit} bytes; copy it with `waypoint cp`", limit=limit)
        return data


def names_in(directory: int) -> list[str]:
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries)


def kind_of(mode: int) -> Kind:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    if stat.S_ISLNK(mode):
        return "symlink"
    if stat.S_ISFIFO(mode):
        return "fifo"
    return "socket" if stat.S_ISSOCK(mode) else "device"


def describe(view: View, st: os.stat_result, name: str, fd: int) -> Entry:
    """`fd` is an O_PATH descriptor of the thing itself."""
    kind = kind_of(st.st_mode)
    return Entry(
        name=name,
        kind=kind,
        mode=stat.S_IMODE(st.st_mode),
        uid=view.inside(st.st_uid),
        gid=view.inside(st.st_gid),
        size_bytes=st.st_size,
        mtime_ns=st.st_mtime_ns,
        target=os.readlink("", dir_fd=fd) if kind == "symlink" else None,
    )


# -- opening one ------------------------------------------------------------------------------------------------------


def find(engine: Engine, key: str, tree: str | None = None) -> SessionRecord | SnapshotRecord:
    """A session or snapshot by id, name or unique prefix; snapshot names of `tree` come first."""
    found: list[SessionRecord | SnapshotRecord] = []
    unclear: Ambiguous | None = None
    for look in (engine.store.db.session, lambda key: engine.store.db.snapshot(key, tree)):
        try:
            found.append(look(key))
        except NotFound:
            continue
        except Ambiguous as error:
            unclear = error
    exact = [record for record in found if record.id == key] or [record for record in found if record.name == key]
    found = exact or found
    if len(found) == 1 and (exact or unclear is None):
        return found[0]
    if unclear is not None:
        raise unclear
    if not found:
        raise NotFound(f"no session or snapshot {key}; `waypoint ls` and `waypoint tree` list them", key=key)
    raise Ambiguous(
        f"{key} is both session {found[0].id} and snapshot {found[1].id}; give the id",
        key=key,
        found=[r.id for r in found],
    )


@contextmanager
def open_view(engine: Engine, key: str | SessionRecord | SnapshotRecord, *, write: bool = False) -> Iterator[View]:
    """While it is open no snapshot, restore or removal of that session begins: they would pull the root away or seal what is
    still being written. Commands run on.
    """
    record = find(engine, key) if isinstance(key, str) else key
    with engine.store.operation(), ExitStack() as stack:
        if isinstance(record, SnapshotRecord):
            if write:
                raise UsageError(
                    f"snapshot {record.id} cannot be written to; fork it: `waypoint fork --from {record.id}`"
                )
            yield _closing(stack, _layers_view(engine.store, record))
            _still_there(engine, record)
            return
        stack.enter_context(locks.shared(engine.store.paths.session_lock(record.id)))
        record = engine.settle(engine.store.db.session(record.id))
        if record.state == "live":
            if write:
                engine.store.mark_written(record.id)
            yield _closing(stack, _live_view(record))
            return
        if write or record.state == "creating":
            raise WrongState(
                f"session {record.id} is {record.state}; only a live session can be written to"
                + (f": `waypoint resume {record.id}`" if record.state == "paused" else ""),
                session=record.id,
                state=record.state,
            )
        yield _closing(stack, _layers_view(engine.store, record))


@contextmanager
def local_view() -> Iterator[View]:
    """The caller's own files, in the same terms."""
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield View(root, None)
    finally:
        os.close(root)


def _closing(stack: ExitStack, view: View) -> View:
    stack.callback(os.close, view.root)
    return view


def _live_view(record: SessionRecord) -> View:
    init = Process(record.init_pid, record.init_start)
    gone = f"session {record.id}: its processes have just ended; `waypoint restore {record.id} SNAPSHOT` brings it back"
    try:
        root = os.open(f"/proc/{init.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise SessionDead(gone, session=record.id) from error
    if not processes.alive(init):  # asked after opening: what was opened is that very process's root
        os.close(root)
        raise SessionDead(gone, session=record.id)
    return View(root, record, idmap=record.spec.idmap)


def own_layers(record: SessionRecord | SnapshotRecord, base: BaseRecord) -> tuple[int, ...]:
    """The layers over the base that make up its files, top-most first; over a flat base the top one is all of them."""
    upper = record.upper if isinstance(record, SessionRecord) else None
    layers = record.layers if upper is None else (upper, *record.layers)
    return layers[:1] if base.flat else layers


def _layers_view(store: Store, record: SessionRecord | SnapshotRecord) -> View:
    base = store.db.base(record.base)
    lower = [f"{layer}/d" for layer in own_layers(record, base)]
    root = open_overlay(store.paths.layers, lower, [Path(layer) for layer in base.layers], around_layers=base.flat)
    try:
        return View(root, record)
    except BaseException:
        os.close(root)
        raise


def _still_there(engine: Engine, record: SnapshotRecord) -> None:
    """Its layers may have been removed or replaced under the view; then what was read is not what it holds."""
    try:
        now = engine.store.db.snapshot(record.id)
    except WaypointError as error:
        raise NotFound(f"snapshot {record.id} was removed while it was being read", snapshot=record.id) from error
    if now.layers != record.layers:
        raise Busy(f"snapshot {record.id} was reorganised while it was being read; try again", snapshot=record.id)
