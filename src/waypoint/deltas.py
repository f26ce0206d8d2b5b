"""Snapshots that save only the memory that was written since the last one; the rest is in that one's image.

For sessions with a lot of memory, in a process that lives longer than one snapshot: it holds what the kernel tracks by, and when it
ends, however it ends, the next snapshot begins anew. The first snapshot of a process is whole, but the session does not stand still
for it: its memory is copied while it runs, and only what was written to meanwhile is saved while it does. Of a process that came
from an image the memory is compared with that image instead, and what is the same is not stored again. One that has written most
of its memory since is treated as if it were the first time.

Nothing is left to trust. Only one process may track a session (a lock in its directory). Every page that CRIU left out must have
been saved before, in the very image that is linked in as its parent, or the snapshot is taken again as a whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from waypoint.errors import CriuError, DiskFull, HostUnsupported, KernelError, WaypointError
from waypoint.kernel import pagemaps, processes, usage
from waypoint.kernel.regions import Range, Regions
from waypoint.kernel.vmas import Flags
from waypoint.kernel.written import Watch, anonymous, can_be_tracked, clean_elsewhere, united, within, without
from waypoint.model import Process, SessionRecord
from waypoint.store import locks
from waypoint.store.paths import Paths

__all__ = ["Delta", "DeltaLost", "Deltas", "Tracking"]

MOST_PARENTS = 24
_MOST_SESSIONS = 8
_MOSTLY = 0.75
_LOCK_TRIES, _LOCK_SECONDS = 5, 0.002
_WORTH_COPYING = 1 << 20
"""Less than that CRIU saves as quickly itself, and the image has one parent less."""
_COMING, _ABOVE = ".parent", ".above"
"""CRIU must not see it before it has dumped: it would do its own kind of tracking."""


@dataclass(frozen=True, slots=True)
class Tracking:
    """Whose memory is tracked."""

    on: bool = True
    least: int = 128 << 20
    """Processes with less memory of their own are saved whole: it takes no longer."""
    smaps: bool = False
    """CRIU is to read for itself what mappings they have; else it is told, where the kernel tells us (vmas.py)."""


class DeltaLost(CriuError):
    """What CRIU left out is not where it should be: take the snapshot again, as a whole."""


@dataclass(slots=True)
class _Watched:
    watch: Watch
    number: int
    """Its pid inside."""
    saved: list[Range] = field(default_factory=list)
    """What of its memory the last image holds, with its parents."""
    clean: list[Range] = field(default_factory=list)
    """What of it CRIU need not save: it was not written since, or has been saved before CRIU touched anything."""
    written: list[Range] = field(default_factory=list)
    """What was and is left to CRIU."""


@dataclass(slots=True)
class _Tracked:
    """One incarnation of a session."""

    init: Process
    lock: int
    image: str = ""
    """What is clean is in this image, or in its parents."""
    depth: int = 0
    """How many of those it has."""
    watched: dict[Process, _Watched] = field(default_factory=dict)

    def forget(self, process: Process) -> None:
        self.watched.pop(process).watch.close()

    def close(self) -> None:
        for process in list(self.watched):
            self.forget(process)
        os.close(self.lock)


class Delta:
    """For one snapshot. Without anything to track it does nothing."""

    def __init__(self, owner: Deltas, session: str, images: Path, tracked: _Tracked | None, written: bool) -> None:
        self._owner = owner
        self._session = session
        self._images = images
        self._tracked = tracked
        self._looked = False
        self.written = written
        """CRIU is to save only what was written since."""

    def watched(self) -> list[int]:
        """The processes that CRIU must not touch before `look` has been at them; those that have ended are forgotten."""
        if self._tracked is None or not self.written:
            return []
        for process in [process for process in self._tracked.watched if _ended(process.pid)]:
            self._tracked.forget(process)
        return [process.pid for process in self._tracked.watched]

    def mappings(self, pid: int) -> bytes:
        """What CRIU would read in its `smaps` once everything stands still; nothing where we do not know."""
        with contextlib.suppress(KernelError, OSError):
            return self._owner.flags.text(pid)
        return b""

    def look(self) -> None:
        """When everything stands still, and CRIU has touched none of those that are watched.

        Not later: CRIU runs code of its own in each thread, for which the kernel writes to the thread's memory (rseq). A page that it
        found clean and left out may be written to by the time that it is done.
        """
        if self._tracked is None or not self.written:
            return
        tracked = self._tracked
        watched = {process.pid: one for process, one in tracked.watched.items()}
        found: dict[int, Regions] = {}
        for pid in processes.namespace_pids(tracked.init.pid):
            if _ended(pid):
                continue
            one = watched.get(pid)
            if clean_elsewhere(pid, [] if one is None else one.watch.areas):
                raise DeltaLost(f"somebody else tracks the memory of process {pid}")
            if one is None:
                continue
            if not can_be_tracked(pid):
                raise DeltaLost(f"process {pid} has just become one that cannot be tracked")
            try:
                found[pid] = one.watch.take_written(pid)
                one.clean = found[pid].whole()
            except KernelError as error:
                raise DeltaLost(f"process {pid}: {error.message}") from error
            if not within(one.clean, one.saved):  # there is new memory
                one.clean = found[pid].clean()
            if not within(one.clean, united(anonymous(pid))):
                raise DeltaLost(f"process {pid} has a file where it had memory when that was to be tracked")
            if not within(one.clean, one.saved):
                raise DeltaLost(f"memory of process {pid} was left out that no earlier image holds")
        written = sum(regions.written_bytes() for regions in found.values())
        if written >= _WORTH_COPYING and pagemaps.depth(self._images / _COMING) + 2 <= MOST_PARENTS:
            self._save(watched, found)
        else:
            for pid, regions in found.items():
                watched[pid].clean, watched[pid].written = regions.clean(), regions.written()
                watched[pid].watch.leave(watched[pid].written)
        self._looked = True

    def _save(self, watched: dict[int, _Watched], found: dict[int, Regions]) -> None:
        """What was written, into an image between that which is coming and the last one, while CRIU is busy elsewhere."""
        coming, above = self._images / _COMING, self._images / _ABOVE
        above.mkdir()
        coming.rename(above / pagemaps.PARENT)
        above.rename(coming)
        for pid, regions in found.items():
            one = watched[pid]
            missing = pagemaps.save_written(pid, one.number, regions, coming)
            one.watch.leave(missing)
            one.clean = without(regions.whole(), missing)

    def mark(self) -> None:
        """When CRIU has saved what it saw, and nothing runs yet: what is written from now on is what the next one has to save."""
        if self._tracked is not None:
            if self.written and not self._looked:
                raise DeltaLost("nobody has looked at the memory that CRIU has left out")
            for process, one in list(self._tracked.watched.items()):
                try:
                    one.watch.go_on(process.pid, one.written)
                except (KernelError, OSError) as error:
                    raise DeltaLost(f"the memory of process {process.pid} cannot be tracked any more: {error}") from error
                if not one.watch.areas and not one.clean:  # it has become another program: that has memory of its own
                    self._tracked.forget(process)

    @property
    def tracks(self) -> bool:
        """There is something for `complete` to do."""
        return self._tracked is not None

    def complete(self, images: Path) -> None:
        """Say in the image what is in its parent. The session may run again."""
        if self._tracked is None:
            return
        for one in self._tracked.watched.values():
            one.saved = (
                pagemaps.inherit(images, one.number, one.clean)
                if one.clean
                else pagemaps.saved_pages(images, one.number)
            )
        if any(one.clean for one in self._tracked.watched.values()):
            (images / _COMING).rename(images / pagemaps.PARENT)
        else:
            shutil.rmtree(images / _COMING, ignore_errors=True)
        self._tracked.depth = pagemaps.depth(images)
        for one in self._tracked.watched.values():
            one.clean, one.written = [], []

    def keep(self, image: str) -> None:
        """The snapshot is made: the next one builds on it."""
        if self._tracked is not None:
            self._tracked.image = image
            self._owner.keep(self._session, self._tracked)
            self._tracked = None

    def give_up(self) -> None:
        """It is not made, or the session was ended."""
        if self._tracked is not None:
            self._tracked.close()
            self._tracked = None


class Deltas:
    """Those of one engine. Used by any number of threads."""

    def __init__(self, paths: Paths, plan: Tracking) -> None:
        self._paths = paths
        self._plan = plan
        self._lock = threading.Lock()
        self._tracked: dict[str, _Tracked] = {}
        self._closed = False
        self.flags = Flags()

    def tracks(self, session: str) -> bool:
        with self._lock:
            return session in self._tracked

    def finds_much(self, init: Process, *, whole: bool) -> set[Process]:
        """What is to be copied by `begin`, which may take long then."""
        return self._big(init) if self._plan.on and not whole else set()

    def begin(
        self,
        session: SessionRecord,
        images: Path,
        origin: Callable[[], str | None],
        *,
        whole: bool = False,
        big: set[Process] | None = None,
    ) -> Delta:
        """The caller holds the session's lock, and calls `keep` or `give_up` in the end.

        `origin`: the image that the session came from, or was last saved to. `whole`: build on nothing, and track nothing.
        `big`: what `finds_much` has just found, if it has been asked.
        """
        with self._lock:
            tracked = self._tracked.pop(session.id, None)
        try:
            init = Process(session.init_pid, session.init_start)
            if tracked is not None and (tracked.init != init or whole):
                tracked.close()
                tracked = None
            big = self.finds_much(init, whole=whole) if big is None else big
            if tracked is None and big:
                tracked = self._track(session.id, init)
            if tracked is not None:
                for process in set(tracked.watched) - big:
                    tracked.forget(process)
                known = {process for process, one in tracked.watched.items() if not _mostly_written(process, one)}
                if tracked.watched and not known:  # nothing is worth building on: better copied while it runs
                    (images / _COMING).mkdir()
                elif not self._link(tracked, images, known):
                    known = self._recognized(tracked, big, images, origin())
                for process in big - known:
                    _copy(tracked, process, images / _COMING)
                for process in tracked.watched:
                    self._learn(process.pid)
        except BaseException:
            if tracked is not None:
                tracked.close()
            raise
        return Delta(self, session.id, images, tracked, tracked is not None and bool(tracked.watched))

    def _learn(self, pid: int) -> None:
        if not self._plan.smaps:
            with contextlib.suppress(KernelError, OSError):  # then CRIU reads them itself
                self.flags.learn(pid)

    def _big(self, init: Process) -> set[Process]:
        found = set()
        for pid in processes.namespace_pids(init.pid):
            with contextlib.suppress(OSError, WaypointError):
                if usage.anonymous_bytes(pid) >= self._plan.least and can_be_tracked(pid):
                    found.add(processes.identify(pid))
        return found

    def _track(self, session: str, init: Process) -> _Tracked | None:
        """None when another process tracks this session."""
        lock = locks.open_lock(self._paths.session(session) / "tracked.lock")
        for _ in range(_LOCK_TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return _Tracked(init, lock)
            time.sleep(_LOCK_SECONDS)  # a program that is just being started has a copy of the one that was let go, until it runs
        os.close(lock)
        return None

    def _link(self, tracked: _Tracked, images: Path, known: set[Process]) -> bool:
        """False when there is nothing to build on: the image is gone or about to go, or has too many parents."""
        if not known or not tracked.image:
            return False
        source = self._paths.image(tracked.image)
        try:
            with _held(source):
                if tracked.depth >= MOST_PARENTS or pagemaps.depth(source) != tracked.depth:
                    return False
                pagemaps.link_parent(images / _COMING, source, [tracked.watched[process].number for process in known])
        except (FileNotFoundError, BlockingIOError):
            shutil.rmtree(images / _COMING, ignore_errors=True)
            return False
        return True

    def _recognized(self, tracked: _Tracked, big: set[Process], images: Path, origin: str | None) -> set[Process]:
        """Those that have mostly the memory that they have in the image `origin`, which becomes the parent."""
        place = images / _COMING
        found = set()
        source = self._paths.image(origin or "none")
        # it was removed, is just being removed, or is no image of processes
        with contextlib.suppress(FileNotFoundError, BlockingIOError), _held(source):
            if pagemaps.depth(source) < MOST_PARENTS:
                there = {process: number for process in big if pagemaps.holds(source, number := processes.pid_inside(process.pid))}
                if there:
                    pagemaps.link_parent(place, source, sorted(there.values()))
                    found = {process for process in there if _compare(tracked, process, place)}
        if not found:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        return found

    def keep(self, session: str, tracked: _Tracked) -> None:
        with self._lock:
            gone = [self._tracked.pop(session, None)]
            if self._closed:
                gone.append(tracked)
            else:
                self._tracked[session] = tracked
            while len(self._tracked) > _MOST_SESSIONS:
                gone.append(self._tracked.pop(next(iter(self._tracked))))
        for one in gone:
            if one is not None:
                one.close()

    def drop(self, session: str) -> None:
        """The session is ended, or its next snapshot shall be a whole one."""
        with self._lock:
            found = self._tracked.pop(session, None)
        if found is not None:
            found.close()

    def close(self) -> None:
        with self._lock:
            found = list(self._tracked.values())
            self._tracked.clear()
            self._closed = True
        for one in found:
            one.close()


def _copy(tracked: _Tracked, process: Process, place: Path) -> None:
    """Copy what it has in memory while it runs; what is still clean afterwards was copied as it is."""

    shared = processes.may_share_memory(process.pid, tracked.init.pid)

    def copy(one: _Watched, clean: list[Range]) -> bool:
        missing = pagemaps.copy_memory(process.pid, one.number, clean, place, shared=shared)
        one.saved = without(clean, missing)
        one.watch.leave(missing)
        return True

    _tracking(tracked, process, copy)


def _compare(tracked: _Tracked, process: Process, image: Path) -> bool:
    """Find out what of its memory the image has; what is still clean afterwards is so. False if that is not most of it."""

    shared = processes.may_share_memory(process.pid, tracked.init.pid)

    def compare(one: _Watched, clean: list[Range]) -> bool:
        one.saved = pagemaps.same_pages(process.pid, one.number, clean, image, shared=shared)
        if _size(one.saved) < _MOSTLY * _size(clean):
            return False  # it is copied then, and that begins anew
        one.watch.leave(without(clean, one.saved))
        return True

    return _tracking(tracked, process, compare)


def _mostly_written(process: Process, one: _Watched) -> bool:
    try:
        return one.watch.mostly_written(process.pid)
    except OSError:  # it has just ended, which whoever tries to copy it finds out
        return True


def _size(ranges: list[Range]) -> int:
    return sum(end - start for start, end in ranges)


def _tracking(tracked: _Tracked, process: Process, work: Callable[[_Watched, list[Range]], bool]) -> bool:
    """With the writes of a process tracked from here on, and what is clean at first.

    False: it has ended, or cannot be tracked and is saved whole.
    """
    try:
        if process not in tracked.watched:
            number = processes.pid_inside(process.pid)
            tracked.watched[process] = _Watched(Watch(process.pid), number)
        one = tracked.watched[process]
        return work(one, one.watch.begin(process.pid).whole())
    except (KernelError, HostUnsupported, OSError) as error:
        if isinstance(error, OSError):
            if error.errno == errno.ENOSPC:
                full = "the store's disk is full; the session goes on untouched, free some space and try again"
                raise DiskFull(full) from error
            if not _ended(process.pid):
                raise
        if process in tracked.watched:
            tracked.forget(process)
        return False


@contextlib.contextmanager
def _held(image: Path) -> Iterator[None]:
    """Nobody removes it meanwhile. FileNotFoundError: it is gone; BlockingIOError: it is being removed."""
    fd = os.open(image, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _ended(pid: int) -> bool:
    """It is gone, or waits for its parent and has no memory any more."""
    return processes.state(pid) in "ZX"
