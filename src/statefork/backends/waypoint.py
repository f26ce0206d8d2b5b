"""Waypoint: an Environment over a session of our own engine. Files, processes, memory, the shell and its terminal come back.

Only this module and those that are named after it import the engine. There is one tree, StateFork's: a stored state is a snapshot of the
engine, known by the id that the engine gave it, and an environment is a session whose name is that of its place. What
belongs to a place is noted in its directory before it is made, so that `sweep` finds it after a crash.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from statefork.backends.option_values import choice, flag, share, size_bytes, variables
from statefork.backends.waypoint_live import NOTE, Stored, WaypointLive, leave_note, name_at, note_ahead
from statefork.backends.waypoint_probe import probe
from statefork.driver import Captured, Driver, Live, Place
from statefork.errors import NotFound, SessionDead, UsageError, WrongState
from statefork.manifest import Comparison
from statefork.model import Capabilities
from statefork.registry import Argument, Backend, Method, directory, number, path, text
from waypoint.bases import base_from_dockerfile, base_from_rootfs
from waypoint.deltas import Tracking
from waypoint.diff import compare
from waypoint.drafts import Drafting
from waypoint.engine import Engine
from waypoint.model import BaseRecord, Limits, Network
from waypoint.twins import Budget

__all__ = ["BACKEND", "WaypointDriver", "WaypointOptions"]

DEFAULT_STORE = Path("/var/lib/waypoint")

_open: dict[tuple[Path, bool], tuple[Engine, int]] = {}
"""Engines, and how many drivers use each. An engine has a database connection for each thread, and workers that wait:
hundreds of environments over one store share one."""
_opening = threading.Lock()


@dataclass(frozen=True, slots=True)
class WaypointOptions:
    """What sessions are made of, or which one is taken."""

    dockerfile_dir: Path | None = None
    rootfs: Path | None = None
    """A directory or an archive; with neither of the two, the host's own root, copy-on-write."""
    build: bool = True
    """False: the base that an earlier build of `dockerfile_dir` made, as it is."""
    network: Network = "none"
    limits: Limits = field(default_factory=Limits)
    env: tuple[tuple[str, str], ...] = ()
    user: str | None = None
    workdir: str | None = None
    session: str | None = None
    """By id, name or unique prefix: one that exists, to attach to."""
    merge: bool = False
    twins: int = 0
    drafts: bool = False
    deltas: bool = True
    store: Path | None = None
    """The engine's state directory; by default one inside StateFork's own."""


class WaypointDriver(Driver):
    name = "waypoint"
    durable = True
    hasty = True

    def __init__(self, options: WaypointOptions) -> None:
        self.options = options
        self._engines: dict[Path, Engine] = {}

    def probe(self) -> Capabilities:
        found = probe()
        # What was attached to is left as it is, so pausing it cannot mean to end it: that is left to `suspend`.
        return replace(found, pause_releases_memory=False) if self.options.session else found

    def prepare(self, place: Place) -> None:
        for store in list(self._engines)[:1]:  # another is known only when it is used, and noted then
            note_ahead(place, store)

    def start(self, place: Place) -> Live:
        engine = self._engine(self._store(place))
        options = self.options
        with engine.store.operation():  # no collector takes a base away that has no session yet
            base = self._base(engine)
            leave_note(place, engine.store.paths.home)
            session = engine.new(
                name=name_at(place),
                base=base,
                network=options.network,
                limits=options.limits,
                env=options.env,
                user=options.user,
                workdir=options.workdir,
                merge=options.merge,
                hide=(place.home,),
            )
        return WaypointLive(engine, session, owned=True)

    def attach(self, place: Place) -> Live:
        wanted = self.options.session or ""
        stores = [self.options.store] if self.options.store else [place.home / "waypoint", DEFAULT_STORE]
        for store in stores:
            if not (store / "store.db").exists():
                continue
            engine = self._engine(store)
            with suppress(NotFound):
                record = engine.settle(engine.session(wanted).record)
                if record.state != "live":
                    raise NotFound(
                        f"session {record.id} is {record.state}, not live; `waypoint resume {record.id}` first"
                    )
                return WaypointLive(engine, engine.session(record.id), owned=False)
        looked = ", ".join(map(str, stores))
        raise NotFound(f"no session {wanted!r} in {looked}; `waypoint ls` lists them, store= names another store")

    def revive(self, captured: Captured, place: Place) -> Live:
        stored: Stored = captured.handle
        engine = self._engine(stored.store)
        leave_note(place, stored.store)
        return WaypointLive(engine, engine.fork_one(stored.snapshot, name_at(place)), owned=True)

    def keep(self, captured: Captured, name: str) -> str:
        stored: Stored = captured.handle
        engine = self._engine(stored.store)
        engine.fork(engine.store.db.snapshot(stored.snapshot), 1, [name])
        return f"WAYPOINT_HOME={shlex.quote(str(stored.store))} waypoint shell {shlex.quote(name)}"

    def discard(self, captured: Captured) -> None:
        stored: Stored = captured.handle
        _ = captured.files_bytes  # whoever has it in a history can still ask when it is gone
        _drop(self._engine(stored.store), stored.snapshot)

    def describe(self, captured: Captured) -> Mapping[str, Any]:
        stored: Stored = captured.handle
        return self._engine(stored.store).store.db.snapshot(stored.snapshot).manifest

    def compare(self, a: Captured, b: Captured | Live) -> Comparison | None:
        """The engine looks only where the layers that the two do not share have a name."""
        stored: Stored = a.handle
        other = b.session.id if isinstance(b, WaypointLive) else b.handle.snapshot  # type: ignore[union-attr]
        found = compare(self._engine(stored.store), stored.snapshot, other, every=True).files
        added, changed, removed = (
            tuple(sorted(change.path for change in found if change.status == status))
            for status in ("added", "changed", "removed")
        )
        return added, changed, removed

    # -- another process ----------------------------------------------------------------------------------------------

    def adopt(self, note: Mapping[str, Any], place: Place) -> Live:
        engine = self._engine(Path(note["store"]))
        try:
            record = engine.settle(engine.store.db.session(note["session"]))
        except NotFound as error:
            raise SessionDead(f"session {note['session']} was removed", session=note["session"]) from error
        if record.state == "dead":
            raise SessionDead(f"the processes of session {record.id} are gone", session=record.id)
        live = WaypointLive(engine, engine.session(record.id), owned=note["owned"])
        if record.state == "paused":
            live.stands_still()
        return live

    def note_of(self, captured: Captured) -> Any:
        stored: Stored = captured.handle
        return {"store": str(stored.store), "snapshot": stored.snapshot}

    def handle_of(self, note: Any) -> Any:
        return Stored(Path(note["store"]), note["snapshot"])

    def abandon(self, place: Place) -> None:
        try:
            note = json.loads((place.directory / NOTE).read_text())
        except FileNotFoundError:
            return
        engine = self._engine(Path(note["store"]))
        with suppress(NotFound):
            session = engine.session(name_at(place))  # its snapshots stay: others may have been told of them
            try:
                session.remove()
            except WrongState:  # it was only being made: that is for the engine's own collector
                engine.gc()
        with suppress(NotFound):
            _drop(engine, engine.store.db.snapshot(name_at(place)).id)

    def close(self) -> None:
        """Bases stay in the store, for the next one: `statefork gc` removes those that nothing needs."""
        self.leave()

    def leave(self) -> None:
        engines, self._engines = self._engines, {}
        for store, engine in engines.items():
            key = (store, self.options.deltas)
            with _opening:
                users = _open[key][1] - 1
                if users:
                    _open[key] = (engine, users)
                    continue
                del _open[key]
            engine.close()

    @classmethod
    def sweep(cls, home: Path, in_use: Callable[[str], bool]) -> Iterable[str]:
        own = home / "waypoint"
        noted: dict[Path, list[str]] = {own: []}
        for file in sorted(home.glob(f"trees/*/*/{NOTE}")):
            if not in_use(file.parent.parent.name):
                store = Path(json.loads(file.read_text())["store"])
                noted.setdefault(store, []).append(f"statefork-{file.parent.name}")
        for store, names in noted.items():
            if not (store / "store.db").exists():
                continue
            with Engine(store) as engine:
                yield from _sweep_named(engine, set(names))
                if store == own:
                    yield from (
                        f"waypoint {what}: {n}" for what, n in engine.gc().items() if n and what != "freed_bytes"
                    )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _store(self, place: Place) -> Path:
        return self.options.store or place.home / "waypoint"

    def _engine(self, store: Path) -> Engine:
        found = self._engines.get(store)
        if found is None:
            with _opening:
                found = self._engines.get(store)
                if found is None:
                    deltas = self.options.deltas
                    found, users = _open.get((store, deltas)) or (Engine(store, ahead=True, deltas=Tracking(on=deltas)), 0)
                    _open[store, deltas] = (found, users + 1)
                    self._engines[store] = found
        found.twins.allow(Budget(twins=self.options.twins))
        found.drafts.allow(Drafting(on=self.options.drafts))
        return found

    def _base(self, engine: Engine) -> BaseRecord | None:
        options = self.options
        if options.rootfs is not None:
            return base_from_rootfs(engine.store, options.rootfs)
        if options.dockerfile_dir is None:
            return None
        if options.build:
            return base_from_dockerfile(engine.store, options.dockerfile_dir)
        source = str(options.dockerfile_dir.resolve())
        for base in reversed(engine.store.db.bases()):
            if base.kind == "dockerfile" and base.source == source:
                return base
        raise NotFound(f"{source} has not been built in {engine.store.paths.home} yet; leave out build=False")


def _drop(engine: Engine, snapshot: str) -> bool:
    """What was taken of it since, by hand, moves up to its parent. False if it is gone already."""
    with engine.store.operation():
        try:
            record = engine.store.db.snapshot(snapshot)
        except NotFound:
            return False
        engine.cut_out(record)
    return True


def _sweep_named(engine: Engine, names: set[str]) -> Iterator[str]:
    """Sessions and snapshots by the name of their place, so never what was attached to; then what else was taken of those
    sessions, by hand."""
    ours = set()
    for record in engine.sessions():
        if record.name in names:
            session = engine.session(record.id)
            ours.add(session.id)
            try:
                session.remove()
            except WrongState:  # it was only being made: that is for the engine's own collector
                engine.gc()
            yield f"waypoint session {session.id}"
    for taken in engine.store.db.snapshots():
        if (taken.name in names or taken.session in ours) and _drop(engine, taken.id):
            yield f"waypoint snapshot {taken.id}"


# -- methods ----------------------------------------------------------------------------------------------------------


def _users_store() -> Path | None:
    """The store that the `waypoint` command would use, if the caller has chosen one. Read here, at the factory's edge."""
    chosen = os.environ.get("WAYPOINT_HOME")
    return Path(chosen).absolute() if chosen else None


def _build(
    memory: int | None = None,
    cpus: float | None = None,
    pids: int | None = None,
    store: Path | None = None,
    **options: Any,
) -> WaypointDriver:
    if options.get("dockerfile_dir") and options.get("rootfs"):
        raise UsageError("give only one of dockerfile_dir and rootfs; with neither the host's own root is used")
    limits = Limits(memory, cpus, pids)
    return WaypointDriver(WaypointOptions(limits=limits, store=store or _users_store(), **options))


def _attach(session_id: str, store: Path | None = None) -> WaypointDriver:
    return WaypointDriver(WaypointOptions(session=session_id, store=store or _users_store()))


_STORE = Argument("store", path, "the engine's state directory; else $WAYPOINT_HOME, else one in StateFork's own")
_BUILD_ARGUMENTS = (
    Argument(
        "dockerfile_dir", directory, "a directory with a Dockerfile; with neither this nor rootfs: the host's root"
    ),
    Argument("rootfs", path, "a directory or an archive with a root file system"),
    Argument("build", flag, "False: use what an earlier build of dockerfile_dir made"),
    Argument("network", choice("none", "host", "nat"), "none, host or nat"),
    Argument("memory", size_bytes, "a limit, such as 512M"),
    Argument("cpus", share, "a limit, such as 1.5"),
    Argument("pids", number, "a limit on processes and threads"),
    Argument("env", variables, "variables, as a mapping"),
    Argument("user", text, "whose shell it is"),
    Argument("workdir", text, "where the shell begins"),
    Argument("merge", flag, "True: share equal pages with other such environments; the host's KSM must be on"),
    Argument("twins", number, "so many snapshots are kept brought up, for quick restores; each takes its memory. 0: none"),
    Argument("drafts", flag, "True: save after each command, while nobody waits, for quick snapshots"),
    Argument("deltas", flag, "False: save the memory of big processes whole each time, while they stand still"),
    _STORE,
)
_ATTACH_ARGUMENTS = (Argument("session_id", text, "a live session, by id, name or unique prefix"), _STORE)

BACKEND = Backend(
    name=WaypointDriver.name,
    summary="files, processes, memory, shell, terminal",
    driver=WaypointDriver,
    probe=probe,
    methods=tuple(
        method
        for family in ("waypoint", "ckpt")
        for method in (
            Method(f"{family}_build", _build, _BUILD_ARGUMENTS),
            Method(f"{family}_attach", _attach, _ATTACH_ARGUMENTS, required=(("session_id",),), attach=True),
        )
    ),
)
