"""Take a snapshot of a live session: freeze, save the processes, seal the files (sealing.py), commit one row."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from waypoint import bringup, faults
from waypoint.ahead import Ready, Stock
from waypoint.counting import NOT_YET
from waypoint.deltas import Deltas
from waypoint.ending import resolve
from waypoint.errors import DiskFull
from waypoint.guest.commands import Link
from waypoint.guest.connection import quiesce
from waypoint.guest.layer import forget_socket
from waypoint.kernel import (
    cgroups,
    criu,
    moved,
    processes,
    pulse,
    socket_names,
    trees,
    typed,
)
from waypoint.manifest import describe_session, told
from waypoint.model import BaseRecord, Capture, Process, SessionRecord, SnapshotRecord
from waypoint.preparing import NoDraft, Preparing
from waypoint.reapply import TYPED
from waypoint.rehoming import Rehoming
from waypoint.sealing import Sealing, is_big
from waypoint.squash import DEPTH
from waypoint.store import locks
from waypoint.store.store import Store
from waypoint.verify import FILES, file_digest

__all__ = ["Marks", "Taken", "take", "take_files"]

_FULL = ("files", "processes", "memory", "terminal", "network", "ipc")


@dataclass(frozen=True, slots=True)
class Taken:
    record: SnapshotRecord
    init: Process | None
    """The session's PID 1 afterwards; None when it was ended on purpose (pause)."""
    marks: Marks | None = None
    """By which to tell later whether anything has happened since; of a session that ran on."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands still when nothing happens in a session: requests to its init, writes from outside, its processes' I/O."""

    requests: int
    written: int
    io: dict[int, tuple[int, int]]


def take(
    store: Store,
    session: SessionRecord,
    snapshot: str,
    *,
    name: str | None,
    link: Link,
    began: float,
    created: float,
    ready: Ready,
    deltas: Deltas,
    some_time: Callable[[Callable[[], object]], None],
    whole: bool = False,
    end_session: bool = False,
    draft: bool = False,
    count: bool = True,
    stock: Stock | None = None,
) -> Taken:
    """The caller holds the session's lock, `ready.lock`. On any failure before the commit the session runs on as it was.

    `some_time`: what it is called with is done when nobody waits.
    `link`: to the session; its shell is asked about itself first of all, and all else is got ready meanwhile.
    `count`: if not, what its files take may be left to be found out (counting.py).
    `draft`: no row is made, so that all of it is garbage until the caller makes one; NoDraft where that is not to be done.
    """
    sealing = Sealing(store, session, snapshot)
    init = Process(session.init_pid, session.init_start)
    upper = sealing.upper
    doomed: list[Process] = []
    rehoming: Rehoming | None = None
    stack = contextlib.ExitStack()
    staging = ready.staging(store.paths.images, snapshot)
    coming = Preparing(
        store, session, sealing, ready, deltas, staging, stack,
        whole=whole, end_session=end_session, draft=draft, ends=end_session,
    )  # fmt: skip
    try:
        if len(session.layers) >= DEPTH - 1 and not draft and (end_session or is_big(session, upper, draft=False)):
            sealing.merge_below()
        faults.point("snapshot-staged")
        stack.enter_context(locks.shared_on(ready.gate))
        said = coming.ask(link)
        ends, delta, dumper = coming.ends, coming.delta, coming.dumper
        if draft and said is None:
            raise NoDraft(f"session {session.id} is in the middle of a command")
        requests = quiesce(link.connect()[0], session.id)
        written = store.written(session.id)
        faults.point("snapshot-quiesced")

        def counts() -> bool:
            return end_session or (ends and count)

        def when_frozen() -> bool:
            sealing.inspect()
            sealing.io = pulse.io_counts(sealing.held)
            if ends or not sealing.still:
                sealing.seal(end_session=end_session, busy=said is None, stack=stack)
            if counts():  # CRIU makes names of its own in the upper, which are passed over
                sealing.look()
            sealing.typed = typed.take_typed(init.pid)
            if sealing.typed:
                stack.callback(typed.type_again, init.pid, sealing.typed)
            return sealing.sockets

        def while_frozen() -> None:
            nonlocal rehoming
            if not sealing.sealed:
                sealing.seal(end_session=end_session, busy=said is None, stack=stack)
            if sealing.files_bytes != NOT_YET:
                sealing.digest = file_digest(store.paths.upper(sealing.layers[0]))
            sealing.renamed = socket_names.present_names(init.pid)
            sealing.manifest = describe_session(
                init.pid, session.spec.idmap, told(said), filtered=session.spec.seccomp, held=sealing.held
            )
            sealing.manifest["base_files"] = _base_files(store, coming.base, session, sealing.manifest.pop("mapped"))
            if sealing.rehome:
                doomed.extend(processes.identified(sealing.held))
                rehoming = Rehoming(store, coming.base, session, sealing.below, stock)
            faults.point("snapshot-frozen")

        def before_release() -> None:
            delta.mark()
            if ends:
                delta.complete(staging)
            if sealing.renamed:
                socket_names.rewrite_names(staging, sealing.renamed)
            if sealing.new_layer is not None and criu.has_remaps(staging):
                trees.carry_links(upper, store.paths.upper(sealing.new_layer), criu.LINK_PREFIX)
                sealing.digest = ""
            sealing.link_names()
            if ends:
                if counts() and criu.has_remaps(staging):  # it may have made directories for them
                    sealing.look()
                _room_to_come_back(store, sealing)
                if sealing.rehome:
                    bringup.refuse_changed(coming.base, snapshot, sealing.manifest["base_files"])
                    stack.callback(moved.hold(init.pid))
                store.db.add_ending(made(), time.time_ns())
                faults.point("snapshot-intended")

        def made() -> SnapshotRecord:
            staging.rename(store.paths.image(snapshot))
            faults.point("snapshot-renamed")
            sealing.record = _record(store, session, sealing, name, 0.0, began, created, pinned=end_session)
            return sealing.record

        def meanwhile() -> None:
            if sealing.rehome and sealing.survey is None:
                for process in doomed:  # as CRIU is about to: none of them runs again, whatever becomes of CRIU
                    processes.kill(process)
                move()
                if rehoming is not None and sealing.record is not None:
                    rehoming.begin(sealing.record)
            elif not ends and not delta.tracks:  # what takes longer than CRIU takes to let go comes after that
                made()

        def move() -> None:
            moved.move(upper.parent)
            forget_socket(upper)
            faults.point("snapshot-moved")

        dumped = dumper.dump(
            when_frozen=when_frozen,
            watched=delta.watched,
            mappings=delta.mappings,
            look=delta.look,
            while_frozen=while_frozen,
            before_release=before_release,
            meanwhile=meanwhile,
            apart=ready.ahead and not counts(),  # what is started to count outlives the dump
        )
        faults.point("snapshot-dumped")
        if ends:  # CRIU has ended the tree
            if sealing.survey is not None and sealing.rehome:
                sealing.survey.held()
                move()
            if not sealing.rehome:
                store.db.complete_ending(session.id)
        else:
            if sealing.record is None:
                delta.complete(staging)
                made()
            assert sealing.record is not None
            duration_ms = (time.perf_counter() - began) * 1000
            sealing.record = replace(sealing.record, paused_ms=dumped.paused_ms, duration_ms=duration_ms)
            if not draft:
                store.db.add_snapshot(sealing.record, {"snapshot": snapshot})
        if not sealing.rehome:
            faults.point("snapshot-committed")
        if not ends:
            delta.keep(snapshot)
    except BaseException:
        stack.close()
        sealing.stop_looking()
        if rehoming is not None:
            rehoming.close()
        if not coming.ends or resolve(store, session, session.boot).state == "live":
            _undo(store, sealing, staging)
        raise
    with contextlib.ExitStack() as after:
        if rehoming is not None:
            after.callback(rehoming.close)
        stack.close()
        sealing.discard_unused()
        assert sealing.record is not None
        record = sealing.record
        if ends:
            live = bringup.Live(init, session.upper or 0, session.layers, session.spec)
            bringup.retire(store, live, wait=end_session)
            sealing.forget_index()
        if end_session:
            forget_socket(upper)
            sealing.clear()
            return Taken(sealing.surveyed(record), None, None)
        if rehoming is None:
            return Taken(record, init, Marks(requests, written, sealing.io))
        after.callback(some_time, sealing.clear)
        try:
            record, back = rehoming.come_back(record, dumped.since)
        finally:
            record = sealing.surveyed(record)
        return Taken(record, back.init)


def take_files(
    store: Store,
    session: SessionRecord,
    snapshot: str,
    *,
    name: str | None,
    shell: dict[str, Any] | None,
    began: float,
    created: float,
    end_session: bool = False,
) -> Taken:
    """The files alone, copied while every process of the session stands still."""
    sealing = Sealing(store, session, snapshot, full=False)
    init = Process(session.init_pid, session.init_start)
    group = cgroups.freezer_group(store.tag, str(session.upper))
    try:
        if end_session:
            sealing.merge_below()
        else:
            sealing.prepare()
        stopped = time.perf_counter()
        with contextlib.ExitStack() as stack, cgroups.frozen(group):
            sealing.inspect()
            sealing.manifest = describe_session(init.pid, session.spec.idmap, shell)
            sealing.manifest.pop("mapped")
            sealing.seal(end_session=end_session, busy=shell is None, stack=stack)
            sealing.link_names()
            if end_session:
                sealing.look()
            frozen_ns = time.time_ns()
            faults.point("files-frozen")
            paused_ms = (time.perf_counter() - stopped) * 1000
            record = _record(store, session, sealing, name, paused_ms, began, created, pinned=end_session)
            if end_session:
                store.db.add_ending(record, frozen_ns)
                faults.point("files-intended")
                processes.kill_each(processes.namespace_pids(init.pid))  # none runs again: they die as they are let go
                faults.point("files-ended")
            else:
                store.db.add_snapshot(record, {"snapshot": snapshot})
    except BaseException:
        sealing.stop_looking()
        sealing.discard_layer()
        if end_session:
            resolve(store, session, session.boot)
        raise
    if end_session:
        bringup.retire(store, bringup.Live(init, session.upper or 0, session.layers, session.spec), wait=True)
        store.db.complete_ending(session.id)
        sealing.forget_index()
        sealing.clear()
    sealing.discard_unused()
    faults.point("files-committed")
    return Taken(sealing.surveyed(record), None if end_session else init)


def _undo(store: Store, sealing: Sealing, staging: Path) -> None:
    """CRIU has let the tree go on: the session is what it was before, and nothing of the snapshot is left."""
    shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(store.paths.image(sealing.snapshot), ignore_errors=True)
    sealing.discard_layer()


_COME_BACK_BYTES = 16 << 20


def _room_to_come_back(store: Store, sealing: Sealing) -> None:
    """A re-homed session is ended and restored at once: better not begun than to find no room half-way."""
    if not sealing.rehome:
        return
    disk = os.statvfs(store.paths.home)
    if disk.f_bavail * disk.f_frsize < _COME_BACK_BYTES:
        raise DiskFull("the store's disk is almost full; the session goes on untouched, free some space and try again")


def _base_files(
    store: Store, base: BaseRecord, session: SessionRecord, mapped: dict[str, list[int]]
) -> dict[str, list[int]]:
    """Of the files that processes run, those of a base that others may change, and not the session's changed copies.

    One that has been replaced there already is among them as the processes have it: over the other one they cannot be restored.
    """
    if base.kind not in bringup.CHANGEABLE:
        return {}
    own = [store.paths.upper(layer) for layer in (session.upper or 0, *session.layers)]
    found = {}
    for path, st in mapped.items():
        there = bringup.file_state(base, path)
        if there == st or (there is not None and not any((root / path.lstrip("/")).exists() for root in own)):
            found[path] = st
    return found


def _record(
    store: Store,
    session: SessionRecord,
    sealing: Sealing,
    name: str | None,
    paused_ms: float,
    began: float,
    created: float,
    *,
    pinned: bool,
) -> SnapshotRecord:
    manifest = sealing.manifest
    if sealing.typed:
        manifest[TYPED] = sealing.typed.hex()
    if sealing.files_bytes != NOT_YET:
        manifest[FILES] = sealing.digest or file_digest(store.paths.upper(sealing.layers[0]))
    if sealing.print:
        manifest["upper_print"] = sealing.print
    return SnapshotRecord(
        id=sealing.snapshot,
        name=name,
        parent=session.snapshot,
        tree=session.tree,
        session=session.id,
        base=session.base,
        spec=session.spec,
        layers=sealing.layers,
        full=sealing.full,
        created=created,
        duration_ms=(time.perf_counter() - began) * 1000,
        paused_ms=paused_ms,
        files_bytes=sealing.files_bytes,
        memory_bytes=trees.allocated_bytes(store.paths.image(sealing.snapshot), own=True) if sealing.full else 0,
        capture=Capture(_FULL, tuple(manifest.pop("not_captured", ())))
        if sealing.full
        else Capture(("files",), ("processes, memory and terminal: the session is files-only",)),
        manifest=manifest,
        pinned=pinned,
    )
