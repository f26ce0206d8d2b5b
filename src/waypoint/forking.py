"""New sessions from a snapshot: many side by side, or one that is up already because it has a twin."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from waypoint import bringup, faults
from waypoint.beginning import Beginning
from waypoint.counting import counted
from waypoint.errors import WaypointError
from waypoint.model import BaseRecord, SessionRecord, SnapshotRecord
from waypoint.session import Session, check_name, fork_threads
from waypoint.store.store import Store

if TYPE_CHECKING:
    from waypoint.engine import Engine

__all__ = ["fork"]


def fork(engine: Engine, snapshot: SnapshotRecord, n: int, names: Sequence[str] | None, verify: bool) -> list[Session]:
    """All or none, even if the caller is killed half-way."""
    if names is not None and len(names) != n:
        raise WaypointError(f"{len(names)} names for {n} forks")
    for name in names or ():
        check_name(name)
    adopted = _adopt(engine, snapshot, names[0] if names else None, verify) if n == 1 else None
    forks = [adopted] if adopted is not None else _make(engine, snapshot, n, names, verify)
    faults.point("fork-live")
    engine.afterwards(snapshot)
    if snapshot.spec.on_fork:
        _greet(engine, forks, snapshot.spec.on_fork)
    return forks


def _adopt(engine: Engine, snapshot: SnapshotRecord, name: str | None, verify: bool) -> Session | None:
    """One row, when the twin has answered. None if there is no twin, or it is of no use any more.

    Until then no row names it: if this process is killed meanwhile, gc ends it.
    """
    store = engine.store
    with store.operation():
        adopted = engine.adopt(snapshot, verify, look=False)
        if adopted is None:
            return None
        session, live = adopted
        try:
            faults.point("fork-up")
            _note_written(engine, session, live)
            record = SessionRecord(
                id=session, name=name, state="live", tree=snapshot.tree, base=snapshot.base, boot=engine.boot, created=time.time(),
                snapshot=snapshot.parent if snapshot.pinned else snapshot.id, **live.columns(),
            )  # fmt: skip
            added = store.db.add_session_of(record, snapshot)
        except BaseException:
            engine.end_live(live)
            engine.store.forget_session_directory(session)
            raise
        if not added:  # it was removed meanwhile, or is not what it was: that is for `_make` to say
            engine.end_live(live)
            engine.store.forget_session_directory(session)
            return None
    _keep_link(engine, session, live)
    return Session(engine, session, shell=live.shell, automatic=live.spec.auto_snapshot)


def _make(engine: Engine, snapshot: SnapshotRecord, n: int, names: Sequence[str] | None, verify: bool) -> list[Session]:
    store = engine.store
    with contextlib.ExitStack() as stack:
        stack.enter_context(store.operation())
        ids = engine.stock.spares.take_sessions(n)
        unnamed = stack.enter_context(contextlib.ExitStack())
        for session in ids:
            unnamed.callback(store.forget_session_directory, session)
        begun = Beginning()
        if n == 1:  # more of them begin side by side
            begun = stack.enter_context(engine.beginning(snapshot.id, ids[0], verify))
            store.make_session_directory(ids[0])
        held = stack.enter_context(store.holding(snapshot))
        source = counted(store, held) if verify else held  # not on the threads below: each would begin an operation of its own
        base = store.base(source.base)
        parent = source.parent if source.pinned else source.id
        uppers: list[int | None] = [None] if n == 1 else [*bringup.upper_numbers(store, base, n, engine.stock)]
        named: dict[str, str | None] = {session: names[i] if names else None for i, session in enumerate(ids)}
        engine.new_rows(named, source.tree, base, source.spec, parent)
        unnamed.pop_all()
        faults.point("fork-row")
        made, failures = _side_by_side(
            store, partial(_make_one, engine, base, source, verify, begun.of(source)), dict(zip(ids, uppers, strict=True))
        )
        try:
            if failures:
                raise failures[0]
            for session, live in made.items():
                _note_written(engine, session, live)
            store.db.make_live({session: live.columns() for session, live in made.items()})
            store.forget_numbers({upper for upper in uppers if upper is not None} - {live.upper for live in made.values()})
            for session, live in made.items():
                _keep_link(engine, session, live)
        except BaseException:
            for session, live in made.items():
                engine.end_live(live)
                engine.unmake(session)
            raise
    return [Session(engine, session, shell=made[session].shell, automatic=source.spec.auto_snapshot) for session in ids]


def _note_written(engine: Engine, session: str, live: bringup.Live) -> None:
    """While nobody else can know of the session: afterwards another one may put a state in its place."""
    if live.link is not None:
        live.link.written = engine.store.written(session)


def _keep_link(engine: Engine, session: str, live: bringup.Live) -> None:
    if live.link is not None:
        engine.links.keep(session, live.link, 0)


def _side_by_side(
    store: Store, make: Callable[[str, int | None], bringup.Live], wanted: Mapping[str, int | None]
) -> tuple[dict[str, bringup.Live], list[BaseException]]:
    """What came up, and what went wrong. One alone needs no thread, which would have to open the database for itself."""
    if len(wanted) == 1:
        ((session, upper),) = wanted.items()
        return {session: make(session, upper)}, []

    def make_apart(session: str, upper: int | None) -> bringup.Live:
        try:
            return make(session, upper)
        finally:
            store.db.close()

    with fork_threads(len(wanted)) as pool:
        futures = {session: pool.submit(make_apart, session, upper) for session, upper in wanted.items()}
    made = {session: future.result() for session, future in futures.items() if future.exception() is None}
    return made, [error for future in futures.values() if (error := future.exception()) is not None]


def _make_one(
    engine: Engine,
    base: BaseRecord,
    snapshot: SnapshotRecord,
    verify: bool,
    begun: bringup.Restoring | None,
    session: str,
    upper: int | None,
) -> bringup.Live:
    try:
        live = engine.bring_up(base, snapshot, snapshot.spec, session, upper=upper, verify=verify, begun=begun)
        faults.point("fork-up")
        return live
    except BaseException:
        engine.unmake(session)
        raise


def _greet(engine: Engine, forks: list[Session], command: str) -> None:
    """Run the command that the snapshot's session wants to be run in each fork."""

    def greet(fork: Session) -> None:
        try:
            fork.exec(command, timeout=60)
        finally:
            engine.store.db.close()

    try:
        with fork_threads(len(forks)) as pool:
            list(pool.map(greet, forks))
    except BaseException:
        for fork in forks:
            with contextlib.suppress(WaypointError):
                fork.remove()
        raise
