"""A live session and its verbs. Every method may be called from any thread or process: locks are files, state is in rows."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO

from waypoint import bringup, capture, faults
from waypoint.ahead import Ready
from waypoint.beginning import Beginning
from waypoint.deltas import DeltaLost
from waypoint.errors import CriuError, NotCapturable, UsageError, WrongState
from waypoint.guest import commands, frames
from waypoint.guest.connection import Connection, connect
from waypoint.guest.links import Locked
from waypoint.kernel import inspect, own_tty, processes, usage
from waypoint.manifest import shell_state
from waypoint.model import BaseRecord, ExecResult, Process, SessionRecord, SnapshotRecord, new_id
from waypoint.store import locks
from waypoint.verify import differences

if TYPE_CHECKING:
    from waypoint.engine import Engine

__all__ = ["Session", "check_name"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]{0,62}\Z")
_AUTO_KEEP = 20
_FORK_THREADS = 8
_IN_BETWEEN = "unix: Unix socket"
"""CRIU has met a program that init was just starting, with our connections still open in it: a moment later it is over."""


def check_name(name: str | None) -> str | None:
    if name is not None and (not _NAME.match(name) or ".." in name):
        raise UsageError(
            f"{name!r} cannot be a name: letters, digits and . _ + @ -, beginning with a letter or digit, at most 63, no '..'",
            name=name,
        )
    return name


class Session:
    """A handle. It holds no resources: dropping it does nothing to the session, and any number may exist for one."""

    def __init__(
        self, engine: Engine, session: str, *, unseen: bool = False, shell: str = "", automatic: bool | None = None
    ) -> None:
        """`unseen`: what is done through this handle changes nothing that a caller could see.

        `automatic`: whether it takes a snapshot before each command, if that is known; a session does not change in that.
        """
        self._automatic = automatic
        self.shell = shell
        """What the shell of a new session was doing when the session first answered: idle, busy, starting, ..."""
        self._engine = engine
        self._unseen = unseen
        self._store = engine.store
        self.id = session
        self.session = session

    def __repr__(self) -> str:
        return f"<Session {self.id}>"

    @property
    def record(self) -> SessionRecord:
        return self._store.db.session(self.id)

    @property
    def base(self) -> BaseRecord:
        return self._store.db.base(self.record.base)

    # -- reaching it ------------------------------------------------------------------------------------------------

    def connect(self) -> tuple[Connection, int]:
        """Waits while a snapshot or restore of this session is under way."""
        if not self._unseen:
            self._engine.drafts.stir(self.id)
        with locks.shared(self._store.paths.session_lock(self.id)):
            written = self._store.written(self.id)
            waiting = self._engine.links.take(self.id, written)
            if waiting is not None:
                return waiting
            record = self._live(self.record)
            connection = connect(Process(record.init_pid, record.init_start), self.id)
            connection.written = written
            return connection, record.epoch

    def leave(self, connection: Connection, epoch: int) -> None:
        self._engine.links.keep(self.id, connection, epoch)

    def _live(self, record: SessionRecord) -> SessionRecord:
        record = self._engine.settle(record)
        if record.state == "paused":
            raise WrongState(
                f"session {self.id} is paused; `waypoint resume {self.id}` brings it back", session=self.id
            )
        if record.state != "live":
            raise WrongState(
                f"session {self.id} is {record.state}: its processes are gone. `waypoint restore {self.id} SNAPSHOT` brings it "
                f"back to a snapshot, `waypoint rm {self.id}` removes it",
                session=self.id,
                state=record.state,
            )
        return record

    # -- commands ---------------------------------------------------------------------------------------------------

    def exec(
        self,
        command: str | bytes,
        *,
        timeout: float | None = None,
        stdin: bytes | BinaryIO | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
        on_start: Callable[[int], None] | None = None,
        user: str | None = None,
        wait: bool = True,
        merge: bool = False,
        limit: int = commands.DEFAULT_LIMIT,
        log: BinaryIO | None = None,
    ) -> ExecResult:
        """Evaluate `command` in the persistent shell; with `user`, in a shell of that user's at the same place.

        Raises ExecTimeout (with the partial result), Busy (only if `wait` is false), WrongState, SessionDead.
        """
        if user is None and self._takes_snapshots():
            self._auto_snapshot()
        if user is not None:
            spec = self.record.spec
            cwd = self.state().get("cwd", "") or spec.start.workdir
            request = self._run_request([spec.shell, "-c", command], user=user, cwd=cwd, stdin=stdin, merge=merge)
        else:
            request = commands.exec_request(command, stdin=stdin, no_wait=not wait, merge=merge)
        request.timeout, request.limit, request.log = timeout, limit, log
        request.on_stdout, request.on_stderr, request.on_start = on_stdout, on_stderr, on_start
        return self._execute(request)

    def _takes_snapshots(self) -> bool:
        if self._automatic is None:
            self._automatic = self.record.spec.auto_snapshot
        return self._automatic

    def _execute(self, request: commands.Request) -> ExecResult:
        try:
            return commands.execute(self, request)
        finally:
            self._engine.stock.expect()
            self._engine.drafts.later(self.id)

    def run(
        self,
        argv: Sequence[str | bytes],
        *,
        timeout: float | None = None,
        stdin: bytes | BinaryIO | None = None,
        user: str = "",
        cwd: str = "",
        env: Sequence[tuple[str, str]] = (),
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
        on_start: Callable[[int], None] | None = None,
        merge: bool = False,
        limit: int = commands.DEFAULT_LIMIT,
        log: BinaryIO | None = None,
    ) -> ExecResult:
        """One program of its own, not through the shell; any number at once."""
        request = self._run_request(argv, user=user, cwd=cwd, env=env, stdin=stdin, merge=merge)
        request.timeout, request.limit, request.log = timeout, limit, log
        request.on_stdout, request.on_stderr, request.on_start = on_stdout, on_stderr, on_start
        return self._execute(request)

    def _run_request(
        self,
        argv: Sequence[str | bytes],
        *,
        user: str,
        cwd: str,
        stdin: bytes | BinaryIO | None,
        merge: bool,
        env: Sequence[tuple[str, str]] = (),
    ) -> commands.Request:
        spec = self.record.spec
        variables = dict(self._engine.environment(spec)) | dict(env)
        user = user or spec.start.user
        workdir = "" if spec.start.workdir == "~" else spec.start.workdir
        return commands.run_request(
            argv, env=list(variables.items()), user=user, cwd=cwd or workdir, stdin=stdin, merge=merge
        )

    def wait(
        self,
        command_id: int | None = None,
        *,
        timeout: float | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
        on_start: Callable[[int], None] | None = None,
        limit: int = commands.DEFAULT_LIMIT,
        stdin: BinaryIO | None = None,
        seen: tuple[int, int] = (0, 0),
    ) -> ExecResult:
        """The outcome of a command that somebody started, by default of the one in the shell now.

        A fork of a session that was in the middle of a command goes on with it: here is its exit code. `stdin` goes on
        where its last caller's ended; `seen` bytes of stdout and stderr are left out.
        """
        if command_id is None:
            state = self.state()
            command_id = int(state["current"]) or int(state["last"])
            if command_id <= 0:
                raise WrongState(f"session {self.id} has run no command yet", session=self.id)
        request = commands.Request(b"", b"", stdin, timeout)
        request.on_stdout, request.on_stderr, request.limit = on_stdout, on_stderr, limit
        if on_start is not None:
            on_start(command_id)
        return commands.follow(self, command_id, request, seen)

    def signal(self, number: int, command_id: int | None = None) -> None:
        """Send a signal to the foreground job of the running command (or to the `run` program with that id)."""
        target = command_id if command_id is not None else int(self.state()["current"])
        if target:
            commands.tell(self, frames.SIGNAL, target, bytes([number]))

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the session's terminal."""
        commands.tell(self, frames.RESIZE, 0, frames.SIZE.pack(rows, columns), answered=False)

    def state(self) -> dict[str, str]:
        """What init says: shell_pid, state (idle, busy, prompt, starting), current, cwd, ..."""
        connection, _ = self.connect()
        with connection:
            connection.send(frames.HELLO)
            frame = connection.receive(time.monotonic() + 10)
        if frame is None:
            return self.state()
        return dict(line.partition("=")[::2] for line in frame.payload.decode(errors="surrogateescape").splitlines())

    def background_output(self) -> bytes:
        """What jobs printed after the command that started them had returned (the last 256 KiB)."""
        connection, _ = self.connect()
        with connection:
            connection.send(frames.BACKGROUND)
            frame = connection.receive(time.monotonic() + 10)
        return b"" if frame is None else frame.payload

    # -- snapshots --------------------------------------------------------------------------------------------------

    def snapshot(self, name: str | None = None, *, count: bool = True) -> SnapshotRecord:
        """Save everything. The session runs on; a command in flight goes on here and in every fork.

        `count`: what its files take is in the record that is returned; else it may be NOT_YET, for `Engine.count_later`.
        """
        check_name(name)
        began, created = time.perf_counter(), time.time()
        claimed = self._engine.drafts.claim(self, name, new_id("p"), began)
        if claimed is not None:
            self._engine.afterwards(claimed)
            return claimed
        with self._store.operation():
            with contextlib.closing(self._engine.stock.ready(self.id)) as ready:
                self._engine.drafts.stir(self.id)
                with locks.exclusive_on(ready.lock):
                    taken, record = self._capture(name, began, created, ready, count=count)
            found = self._engine.keep_shallow(taken.record)
            self._engine.drafts.note(record, replace(taken, record=found))
            self._engine.afterwards(found)
            return found

    def draft(self, most_bytes: int) -> tuple[capture.Taken, SessionRecord] | None:
        """A snapshot without a row (drafts.py), and the record of what was saved; None where it is not to be done."""
        began, created = time.perf_counter(), time.time()
        with self._store.operation():
            record = self._live(self.record)
            if record.spec.files_only or usage.tree_usage(record.init_pid)[1] > most_bytes:
                return None
            with contextlib.closing(self._engine.stock.ready(self.id)) as ready:
                with locks.exclusive_on(ready.lock):
                    made = self._capture(None, began, created, ready, draft=True)
            self._engine.afterwards()
            return made

    def _capture(
        self,
        name: str | None,
        began: float,
        created: float,
        ready: Ready,
        *,
        end_session: bool = False,
        draft: bool = False,
        count: bool = True,
    ) -> tuple[capture.Taken, SessionRecord]:
        """And what it was taken of. The caller holds the session's lock."""
        record = self._live(self._engine.resolved(self.id))
        if name is not None and self._store.db.has_snapshot_name(record.tree, name):
            raise UsageError(f"this tree has a snapshot named {name} already", name=name)
        snapshot = new_id("p")
        init = Process(record.init_pid, record.init_start)
        link = Locked(self.id, init, record.epoch, self._store.written(self.id), self._engine.links)

        if record.spec.files_only:
            return capture.take_files(
                self._store, record, snapshot,
                name=name, shell=shell_state(link), began=began, created=created, end_session=end_session,
            ), record  # fmt: skip

        def take(*, whole: bool = False) -> tuple[capture.Taken, SessionRecord]:
            return capture.take(
                self._store, record, snapshot,
                name=name, link=link, began=began, created=created, ready=ready, end_session=end_session,
                draft=draft, count=count, stock=self._engine.stock, deltas=self._engine.deltas,
                some_time=self._engine.some_time, whole=whole,
            ), record  # fmt: skip

        try:
            return take()
        except NotCapturable:
            if draft or not own_tty.reopen_by_name(record.init_pid):
                raise
        except DeltaLost:
            return take(whole=True)
        except CriuError as error:
            if _IN_BETWEEN not in error.message:
                raise
            time.sleep(0.02)
        return take()

    def _auto_snapshot(self) -> None:
        taken = self.snapshot()
        self._store.db.update_session(self.id, undo=taken.id)
        self._engine.prune_automatic(self.id, _AUTO_KEEP)

    def undo(self) -> SnapshotRecord:
        """Back to before the last exec; again, and it goes one further back."""
        record = self.record
        if not record.spec.auto_snapshot:
            raise WrongState(
                f"session {self.id} was not started with --auto-snapshot: there is nothing to undo to", session=self.id
            )
        if record.undo is None:
            raise WrongState(f"session {self.id}: no command to undo", session=self.id)
        target = self._store.db.snapshot(record.undo)
        self.restore(target.id)
        self._store.db.update_session(self.id, undo=target.parent)
        return target

    def restore(self, snapshot: str, *, verify: bool = False) -> SnapshotRecord:
        """This session becomes what the snapshot saved. If that fails, it goes on as it was.

        `verify`: what comes up is compared with the snapshot's manifest before it runs; if it differs, VerifyFailed.
        """
        with (
            self._store.operation(),
            self._engine.beginning(snapshot, self.id, verify) as begun,
            locks.exclusive(self._store.paths.session_lock(self.id)),
        ):
            record = self._engine.resolved(self.id)
            target = self._engine.twins.known(snapshot)
            adopted = self._engine.adopt(target, verify) if target is not None else None
            if target is not None and adopted is not None:
                self._engine.forget_removed(adopted[0])
                spec = replace(target.spec, auto_snapshot=record.spec.auto_snapshot)
                self._take_place(record, target, replace(adopted[1], spec=spec))
            else:
                target = self._bring_back(record, snapshot, verify, begun)
            self._drop_pause(record)
        self._engine.afterwards(target)
        return target

    def _bring_back(self, record: SessionRecord, snapshot: str, verify: bool, begun: Beginning) -> SnapshotRecord:
        with self._store.holding(self._store.db.snapshot(snapshot, record.tree)) as target:
            base = self._store.db.base(target.base)
            live = self._engine.bring_up(base, target, target.spec, self.id, verify=verify, begun=begun.of(target))
            spec = replace(live.spec, auto_snapshot=record.spec.auto_snapshot)
            self._take_place(record, target, replace(live, spec=spec))
        return target

    def _take_place(self, record: SessionRecord, target: SnapshotRecord, live: bringup.Live) -> None:
        """The new incarnation has answered: from this commit on it is the session, and the old one is ended."""
        faults.point("restore-up")
        try:
            written = self._store.mark_written(self.id)
            self._store.db.update_session(
                self.id,
                **live.columns(),
                state="live",
                boot=self._engine.boot,
                snapshot=target.id if not target.pinned else record.snapshot,
                tree=target.tree,
                base=target.base,
                epoch=record.epoch + 1,
                pause=None,
            )
        except BaseException:
            self._engine.end_live(live)
            raise
        faults.point("restore-committed")
        self._engine.end_incarnation(record)
        if live.link is not None:
            live.link.written = written
            self._engine.links.keep(self.id, live.link, record.epoch + 1)
        faults.point("restore-retired")

    def _drop_pause(self, record: SessionRecord) -> None:
        """The snapshot that held a paused session has no other use."""
        if record.pause is not None and self._store.db.snapshot(record.pause).pinned:
            self._engine.drop_snapshots([record.pause])

    def verify(self, snapshot: str | None = None) -> list[str]:
        """What differs between this session now and a snapshot, by default the one that it came from; nothing: equal."""
        record = self._live(self.record)
        key = snapshot or record.snapshot
        if key is None:
            raise WrongState(f"session {self.id} has no snapshot to be compared with", session=self.id)
        target = self._store.db.snapshot(key, record.tree)
        shell = shell_state(self)
        found = inspect.describe(record.init_pid, record.spec.idmap)
        return differences(target.manifest, found, shell, running=True)

    def fork(
        self,
        n: int = 1,
        *,
        from_snapshot: str | None = None,
        names: Sequence[str] | None = None,
        verify: bool = False,
    ) -> list[Session]:
        """`n` new live sessions, from a snapshot or from a new one of this session. All or none; `verify` as in `restore`."""
        if n < 1 or n > 10_000:
            raise UsageError(f"cannot fork {n} sessions; give a number from 1 to 10000")
        record = self.record
        target = (
            self._store.db.snapshot(from_snapshot, record.tree)
            if from_snapshot is not None
            else (self._paused_at(record) or self.snapshot())
        )
        return self._engine.fork(target, n, names, verify=verify)

    def _paused_at(self, record: SessionRecord) -> SnapshotRecord | None:
        if record.state != "paused" and self._engine.settle(record).state == "paused":
            with locks.exclusive(self._store.paths.session_lock(self.id)):
                record = self._engine.resolved(self.id)
        return self._store.db.snapshot(record.pause) if record.state == "paused" and record.pause else None

    def pause(self) -> SnapshotRecord:
        """Save everything and release all processes and memory."""
        began, created = time.perf_counter(), time.time()
        with self._store.operation():
            with contextlib.closing(self._engine.stock.ready(self.id)) as ready:
                self._engine.drafts.stir(self.id)
                with locks.exclusive_on(ready.lock):
                    taken = self._capture(None, began, created, ready, end_session=True)[0].record
                    faults.point("pause-committed")
                    self._engine.sync()
        return taken

    def resume(self) -> None:
        """Bring a paused session back where it was."""
        with self._store.operation(), locks.exclusive(self._store.paths.session_lock(self.id)):
            record = self._engine.settle(self._engine.resolved(self.id))
            if record.state == "live":
                return
            if record.pause is None:
                raise WrongState(f"session {self.id} is {record.state}, not paused", session=self.id)
            with self._store.holding(self._store.db.snapshot(record.pause)) as target:
                base = self._store.db.base(target.base)
                live = self._engine.bring_up(base, target, record.spec, self.id)
                faults.point("resume-up")
                self._take_place(record, target, live)
            self._drop_pause(record)

    def halt(self) -> None:
        """Nothing of it runs any more, now; `remove` does the rest. For whoever has no more use for it, and no time."""
        record = self.record
        if record.state == "live" and record.boot == self._engine.boot:
            processes.kill(Process(record.init_pid, record.init_start))

    def remove(self) -> None:
        """End the session and drop its private files. Its snapshots stay."""
        with self._store.operation(), locks.exclusive(self._store.paths.session_lock(self.id)):
            record = self._engine.resolved(self.id)
            self._engine.deltas.drop(self.id)
            self._engine.drafts.stir(self.id)
            self._engine.links.drop(self.id)
            self._store.db.remove_session(self.id)
            faults.point("remove-row")
            self._engine.end_incarnation(record)
            faults.point("remove-ended")
            self._drop_pause(record)
        self._engine.forget_removed(self.id)


def fork_threads(n: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(n, _FORK_THREADS), thread_name_prefix="fork")
