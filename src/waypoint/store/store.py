"""One store: its paths, its database, and the layers that lie in it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from waypoint.errors import DiskFull, HostUnsupported, NotFound
from waypoint.kernel import trees
from waypoint.model import BaseRecord, SnapshotRecord
from waypoint.store import locks
from waypoint.store.database import Database
from waypoint.store.paths import Paths

__all__ = ["Store"]


class Store:
    def __init__(self, home: Path) -> None:
        self.paths = Paths(home.absolute())
        try:
            self.paths.make()
        except PermissionError as error:
            raise HostUnsupported(
                f"{home} cannot be used as a store by this user; Waypoint needs root, or set WAYPOINT_HOME to a directory "
                "that you own",
                fix="sudo waypoint ...",
                feature="root",
            ) from error
        self._local = threading.local()
        self._queue, self._gate = locks.Doors(str(self.paths.queue)), locks.Doors(str(self.paths.gate))
        self.db = Database(self.paths.database)
        identity = self.db.meta("id")
        assert identity is not None
        self.tag = identity
        """Marks every process, cgroup and link of this store on the host."""
        self._bases: dict[str, BaseRecord] = {}

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Everything that makes layers, images or processes happens inside one; gc waits for all of them.

        One operation may be part of another. A full disk is DiskFull, wherever in it the kernel said so.
        """
        depth: int = getattr(self._local, "depth", 0)
        self._local.depth = depth + 1
        try:
            if depth > 0:
                yield
            else:
                with self._queue.shared():  # once gc waits, it goes before whoever comes later
                    pass
                with self._gate.shared():
                    yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"no space left on the store's disk ({error.filename}); nothing was lost") from error
            raise
        finally:
            self._local.depth = depth

    def close(self) -> None:
        """What the calling thread has open."""
        self.db.close()
        self._queue.close()
        self._gate.close()

    @contextmanager
    def alone(self, timeout: float) -> Iterator[None]:
        """Outside of every operation; Busy when those in flight do not end in time."""
        with locks.exclusive(self.paths.queue, timeout=timeout), locks.exclusive(self.paths.gate, timeout=timeout):
            yield

    def gc_waits(self) -> bool:
        """Somebody waits in `alone` for all operations to end: those that need not go on should not."""
        fd = locks.open_lock(self.paths.queue)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def mark_written(self, session: str) -> int:
        """Somebody outside is about to write into a live session's files, or to put another state in its place; no process in it
        will show that. Returns what `written` says from now on."""
        now = time.time_ns()
        with suppress(FileNotFoundError):
            os.utime(self.paths.session_lock(session), ns=(now, now))
        return self.written(session)

    def written(self, session: str) -> int:
        """Another number than before: somebody did."""
        try:
            return self.paths.session_lock(session).stat().st_mtime_ns
        except FileNotFoundError as error:
            raise NotFound(f"session {session} has just been removed", session=session) from error

    def base(self, base: str) -> BaseRecord:
        """Of a session or a snapshot that is there: it keeps its base, which never changes but for its name, so it is read once."""
        known = self._bases.get(base)
        if known is None:
            known = self._bases[base] = self.db.base(base)
        return known

    @contextmanager
    def holding(self, snapshot: SnapshotRecord) -> Iterator[SnapshotRecord]:
        """The snapshot as it is now; its files stay meanwhile, even if its row is removed. NotFound if it is gone."""
        with ExitStack() as stack:
            gone: NotFound | None = None
            try:
                self.keep(snapshot, stack)
            except NotFound as error:
                gone = error
            now = self.db.snapshot(snapshot.id)
            if now.layers != snapshot.layers or now.full != snapshot.full:  # merged meanwhile, or its processes given up
                now = stack.enter_context(self.holding(now))
            elif gone is not None:
                raise gone
            yield now

    def keep(self, snapshot: SnapshotRecord, stack: ExitStack) -> None:
        """Its files stay until `stack` is closed, whether it has a row or not."""
        needed = [self.paths.layer(layer) for layer in snapshot.layers]
        if snapshot.full:
            needed.append(self.paths.image(snapshot.image))
        for directory in needed:
            try:
                fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError as error:
                raise NotFound(f"snapshot {snapshot.id} has just been removed", snapshot=snapshot.id) from error
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_SH)

    def new_layer(self, purpose: str) -> int:
        """A directory with an empty `d` (and `w` for overlay's work); garbage until a row names it."""
        (layer,) = self.db.new_layers(purpose, 1)
        self.paths.layer(layer).mkdir()
        return layer

    def forget_layer(self, layer: int) -> None:
        """One that was made and is empty: nobody else can know of it."""
        self.paths.layer(layer).rmdir()
        self.forget_numbers({layer})

    def new_uppers(self, n: int) -> list[int]:
        """Numbers for `make_upper`."""
        return self.db.new_layers("upper", n)

    def forget_numbers(self, layers: set[int]) -> None:
        """Of layers that were not made after all."""
        if layers:
            self.db.forget_layers(sorted(layers))

    def make_upper(self, layer: int, seed: int | None) -> int:
        """A private upper for a live session; a copy of layer `seed` where layers cannot be stacked. It may be a spare one."""
        if seed is None and self.is_made(layer):
            return layer
        self.paths.layer(layer).mkdir()
        if seed is None:
            self.paths.upper(layer).mkdir(mode=0o755)
        else:
            trees.copy_tree(self.paths.upper(seed), self.paths.upper(layer))
        self.paths.work(layer).mkdir()
        return layer

    def is_made(self, layer: int) -> bool:
        return self.paths.work(layer).exists()

    def make_session_directory(self, session: str) -> None:
        """With its lock, of which `written` tells. It may be a spare one."""
        with suppress(FileExistsError):
            self.paths.session(session).mkdir()
            self.paths.session_lock(session).touch(0o600)

    def forget_session_directory(self, session: str) -> None:
        shutil.rmtree(self.paths.session(session), ignore_errors=True)

    def discard_layers(self, layers: Sequence[int]) -> None:
        """Remove those of `layers` that no row names and nobody holds; what is held is left to gc."""
        used = self.db.layers_in_use()
        with ExitStack() as stack:
            free = [layer for layer in layers if layer not in used and self._claim(self.paths.layer(layer), stack)]
            used = self.db.layers_in_use() if free else used  # whoever held one may have named it before we claimed it
            doomed = [layer for layer in free if layer not in used]
            for layer in doomed:
                trees.discard_tree(self.paths.layer(layer))
            if doomed:
                self.db.forget_layers(doomed)

    def discard_image(self, image: str) -> None:
        """Remove an image that no row names any more; if somebody is restoring from it, that is left to gc."""
        with ExitStack() as stack:
            if self._claim(self.paths.image(image), stack) and not self.db.image_in_use(image):
                trees.discard_tree(self.paths.image(image))

    def _claim(self, directory: Path, stack: ExitStack) -> bool:
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        stack.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def content_layer(self, kind: str, sources: list[Path]) -> tuple[int | None, str]:
        """(layer, purpose) of the layer made of exactly these files, or (None, purpose) when it has to be made."""
        digest = sha256()
        for source in sources:
            digest.update(source.read_bytes())
        purpose = f"{kind}:{digest.hexdigest()[:24]}"
        return self.db.find_layer(purpose), purpose
