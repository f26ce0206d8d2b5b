"""Waypoint: an Environment over a session of our own engine. Files, processes, memory, the shell and its terminal come back.

The only room of StateFork that imports the engine. There is one tree, StateFork's: a stored state is a snapshot of the
engine, known by the id that the engine gave it, and an environment is a session whose name is that of its place. What
belongs to a place is noted in its directory before it is made, so that `sweep` finds it after a crash.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import waypoint.errors
from statefork.backends.option_values import choice, flag, share, size_bytes, variables
from statefork.backends.probe_cache import remembered
from statefork.backends.relay import Relay
from statefork.driver import Captured, Driver, Live, Place
from statefork.errors import (
    ExecTimeout,
    HostUnsupported,
    NotFound,
    SessionDead,
    UsageError,
    WaypointError,
    WrongState,
)
from statefork.manifest import Comparison
from statefork.model import Capabilities, Capability, ExecRequest, ExecResult, Mode, RunRequest
from statefork.registry import Argument, Backend, Method, directory, number, path, text
from waypoint.bases import base_from_dockerfile, base_from_rootfs
from waypoint.diff import compare
from waypoint.engine import Engine
from waypoint.kernel import tools
from waypoint.model import BaseRecord, Limits, Network, SnapshotRecord
from waypoint.outcomes import ExecResult as Outcome
from waypoint.session import Session

__all__ = ["BACKEND", "WaypointDriver", "WaypointOptions"]

NOTE = "waypoint.json"
DEFAULT_STORE = Path("/var/lib/waypoint")


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
    store: Path | None = None
    """The engine's state directory; by default one inside StateFork's own."""


class WaypointLive(Live):
    """One session; `owned` is False for one that somebody else made."""

    def __init__(self, engine: Engine, session: Session, *, owned: bool) -> None:
        self.description = session.id
        self.session = session
        self._engine = engine
        self._owned = owned
        self._stopped = False
        self._suspended = False

    def ready(self, timeout: float) -> None:
        """A new shell has run something. One that came back is only looked at: it may be in the middle of a command,
        and if it is not, its `$?` and `$_` would be others afterwards."""
        with self._reached():
            if self.session.state()["state"] != "starting":
                return
        super().ready(timeout)

    def exec(self, request: ExecRequest) -> ExecResult:
        relay = Relay(request.on_output)
        with self._reached():
            outcome = self.session.exec(
                request.command,
                timeout=request.timeout,
                stdin=request.stdin,
                on_stdout=relay.to("stdout"),
                on_stderr=relay.to("stderr"),
                limit=request.output_limit_bytes,
            )
        relay.settle()
        return _result(outcome)

    def run(self, request: RunRequest) -> ExecResult:
        relay = Relay(request.on_output)
        with self._reached():
            outcome = self.session.run(
                request.argv,
                timeout=request.timeout,
                stdin=_source(request.stdin),
                cwd=request.cwd or "",
                env=tuple(request.env.items()),
                on_stdout=relay.to("stdout"),
                on_stderr=relay.to("stderr"),
                limit=request.output_limit_bytes,
            )
        relay.settle()
        return _result(outcome)

    def capture(self, place: Place, mode: Mode, parent: Captured | None) -> Captured:
        _note(place, self._engine, session=self.session.id)
        with self._reached():
            taken = self.session.snapshot()
        _note(place, self._engine, session=self.session.id, snapshot=taken.id)
        if mode == "files":
            taken = self._engine.keep_files_only(taken)
        return _captured(self._engine, taken)

    def stop(self) -> None:
        self._stopped = True
        if self._owned:
            with suppress(NotFound):
                self.session.remove()
        elif self._suspended:
            self.session.resume()

    def suspend(self) -> None:
        """For a session that was attached to: it is the engine's own pause, which gives the memory back too."""
        with self._reached():
            self.session.pause()
        self._suspended = True

    def proceed(self) -> None:
        with self._reached():
            self.session.resume()
        self._suspended = False

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """The engine's errors are ours already, but for those that mean that the session went away meanwhile."""
        try:
            yield
        except waypoint.errors.ExecTimeout as error:
            raise ExecTimeout(error.message, _result(error.result), **error.details) from error
        except (NotFound, WrongState, OSError) as error:
            if not self._stopped and not self._is_dead():
                raise
            raise SessionDead(f"session {self.session.id} is gone: {error}", session=self.session.id) from error

    def _is_dead(self) -> bool:
        try:
            return self._engine.settle(self.session.record).state == "dead"
        except NotFound:
            return True


class WaypointDriver(Driver):
    name = "waypoint"

    def __init__(self, options: WaypointOptions) -> None:
        self.options = options
        self._engines: dict[Path, Engine] = {}
        self._lock = threading.Lock()

    def probe(self) -> Capabilities:
        found = _probe()
        # What was attached to is left as it is, so pausing it cannot mean to end it: that is left to `suspend`.
        return replace(found, pause_releases_memory=False) if self.options.session else found

    def start(self, place: Place) -> Live:
        engine = self._engine(self._store(place))
        options = self.options
        with engine.store.operation():  # no collector takes a base away that has no session yet
            base = self._base(engine)
            name = _name(place)
            _note(place, engine, session=name)
            session = engine.new(
                name=name,
                base=base,
                network=options.network,
                limits=options.limits,
                env=options.env,
                user=options.user,
                workdir=options.workdir,
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
        stored: _Stored = captured.handle
        engine = self._engine(stored.store)
        _note(place, engine, session=_name(place))
        (session,) = engine.fork(engine.store.db.snapshot(stored.snapshot), 1, [_name(place)])
        return WaypointLive(engine, session, owned=True)

    def discard(self, captured: Captured) -> None:
        stored: _Stored = captured.handle
        _drop(self._engine(stored.store), stored.snapshot)

    def compare(self, a: Captured, b: Captured | Live) -> Comparison | None:
        """The engine looks only where the layers that the two do not share have a name."""
        stored: _Stored = a.handle
        other = b.session.id if isinstance(b, WaypointLive) else b.handle.snapshot  # type: ignore[union-attr]
        found = compare(self._engine(stored.store), stored.snapshot, other, every=True).files
        added, changed, removed = (
            tuple(sorted(change.path for change in found if change.status == status))
            for status in ("added", "changed", "removed")
        )
        return added, changed, removed

    def close(self) -> None:
        """Bases stay in the store, for the next one: `statefork gc` removes those that nothing needs."""
        for engine in self._engines.values():
            engine.close()

    @classmethod
    def sweep(cls, home: Path, in_use: Callable[[str], bool]) -> Iterable[str]:
        own = home / "waypoint"
        notes: dict[Path, list[dict[str, str]]] = {own: []}
        for file in sorted(home.glob(f"trees/*/*/{NOTE}")):
            if not in_use(file.parent.parent.name):
                note = json.loads(file.read_text())
                notes.setdefault(Path(note["store"]), []).append(note)
        for store, noted in notes.items():
            if not (store / "store.db").exists():
                continue
            with Engine(store) as engine:
                yield from _sweep_noted(engine, noted)
                if store == own:
                    yield from (
                        f"waypoint {what}: {n}" for what, n in engine.gc().items() if n and what != "freed_bytes"
                    )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _store(self, place: Place) -> Path:
        return self.options.store or place.home / "waypoint"

    def _engine(self, store: Path) -> Engine:
        with self._lock:
            if store not in self._engines:
                self._engines[store] = Engine(store)
            return self._engines[store]

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


@dataclass(frozen=True, slots=True)
class _Stored:
    store: Path
    snapshot: str


def _name(place: Place) -> str:
    return f"statefork-{place.name}"


def _note(place: Place, engine: Engine, **facts: str) -> None:
    fresh = place.directory / f".{NOTE}"
    fresh.write_text(json.dumps({"store": str(engine.store.paths.home), **facts}))
    fresh.replace(place.directory / NOTE)


def _captured(engine: Engine, taken: SnapshotRecord) -> Captured:
    known = {capability.value for capability in Capability}
    words = [word for word in taken.capture.captured if word in known]
    processes = taken.manifest.get("processes", ()) if taken.full else ()
    lines = [" ".join(process["argv"])[:200] for process in processes if process["pid"] != 1]
    return Captured(
        handle=_Stored(engine.store.paths.home, taken.id),
        captured=(*words, Capability.SHELL) if taken.full else tuple(words),
        not_captured=taken.capture.not_captured,
        files_bytes=taken.files_bytes,
        memory_bytes=taken.memory_bytes,
        paused_ms=taken.paused_ms,
        processes=tuple(line for line in lines if line),
    )


def _drop(engine: Engine, snapshot: str) -> bool:
    """What was taken of it since, by hand, moves up to its parent. False if it is gone already."""
    with engine.store.operation():
        try:
            record = engine.store.db.snapshot(snapshot)
        except NotFound:
            return False
        engine.cut_out(record)
    return True


def _sweep_noted(engine: Engine, notes: list[dict[str, str]]) -> Iterator[str]:
    """Sessions by the name of their place, so never one that was attached to; then all snapshots that were noted, and
    those of our sessions that were not noted any more when the owner died."""
    ours = set()
    for name in {note["session"] for note in notes if note["session"].startswith("statefork-")}:
        with suppress(NotFound):
            session = engine.session(name)
            ours.add(session.id)
            session.remove()
            yield f"waypoint session {session.id}"
    snapshots = {note["snapshot"] for note in notes if "snapshot" in note}
    snapshots |= {record.id for record in engine.snapshots() if record.session in ours}
    for snapshot in sorted(snapshots):
        if _drop(engine, snapshot):
            yield f"waypoint snapshot {snapshot}"


# -- commands ---------------------------------------------------------------------------------------------------------


def _result(outcome: Outcome) -> ExecResult:
    return ExecResult(
        exit_code=outcome.exit_code,
        stdout_bytes=outcome.stdout,
        stderr_bytes=outcome.stderr,
        output_bytes=outcome.output,
        cwd=outcome.cwd,
        timed_out=outcome.timed_out,
        truncated=outcome.truncated,
        shell_restarted=outcome.shell_died or outcome.shell_fresh,
    )


def _source(stdin: bytes | IO[bytes] | None) -> Any:
    """The engine reads a file by its descriptor: what Python has buffered of it must go back first."""
    if stdin is None or isinstance(stdin, bytes):
        return stdin
    try:
        stdin.fileno()
        if stdin.seekable():
            stdin.seek(stdin.tell())
    except OSError:
        return stdin.read()
    return stdin


# -- probe ------------------------------------------------------------------------------------------------------------

_SETTING = "cd /tmp && echo {mark} >probe && probe={mark} && stty -F /dev/tty rows 43 cols 97 && {{ sleep 1000 & }}"
_ASKING = "cat /tmp/probe; echo $probe; kill -0 $! && echo runs; stty -F /dev/tty size; pwd"


def _probe() -> Capabilities:
    try:
        used = [tools.criu_argv()[-1], str(tools.launch_path()), str(tools.init_path())]
        return remembered("waypoint", used, _try)
    except HostUnsupported as error:
        raise HostUnsupported(error.message, **{"fix": "waypoint doctor", **error.details}) from error


def _try() -> Capabilities:
    """Snapshot a session, change everything in it, and look what a fork of the snapshot still knows."""
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="statefork-probe-") as scratch, Engine(Path(scratch) / "store") as engine:
        try:
            session = engine.new()
            session.exec(_SETTING.format(mark=mark), timeout=20)
            taken = session.snapshot()
            session.exec("rm probe; probe=; kill $!; wait; stty -F /dev/tty rows 24 cols 80; cd /", timeout=20)
            (fork,) = engine.fork(taken, 1)
            said = fork.exec(_ASKING, timeout=20).text.splitlines()
        except WaypointError as error:
            if isinstance(error, HostUnsupported):
                raise
            raise HostUnsupported(
                f"Waypoint cannot bring a session back here: {error}", fix="waypoint doctor"
            ) from error
        finally:
            for record in engine.sessions():
                engine.session(record.id).remove()
    expected = {
        Capability.FILES: mark,
        Capability.MEMORY: mark,
        Capability.PROCESSES: "runs",
        Capability.TERMINAL: "43 97",
        Capability.SHELL: "/tmp",
    }
    found = [capability for (capability, word), line in zip(expected.items(), said, strict=False) if word == line]
    if len(found) < len(expected):
        raise HostUnsupported(f"a restored session answers {said}, not as it should", fix="waypoint doctor")
    return Capabilities(
        backend=WaypointDriver.name,
        restores=frozenset(found),
        pause_releases_memory=True,
        snapshot_during_exec=True,
        versions={"criu": tools.criu_version()},
    )


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
    _STORE,
)
_ATTACH_ARGUMENTS = (Argument("session_id", text, "a live session, by id, name or unique prefix"), _STORE)

BACKEND = Backend(
    name=WaypointDriver.name,
    summary="files, processes, memory, shell, terminal",
    driver=WaypointDriver,
    probe=_probe,
    methods=tuple(
        method
        for family in ("waypoint", "ckpt")
        for method in (
            Method(f"{family}_build", _build, _BUILD_ARGUMENTS),
            Method(f"{family}_attach", _attach, _ATTACH_ARGUMENTS, required=(("session_id",),), attach=True),
        )
    ),
)
