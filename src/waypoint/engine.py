"""The engine: sessions over one store. No daemon; any process that opens the same store sees the same sessions."""

from __future__ import annotations

import contextlib
import json
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from waypoint import bringup, faults
from waypoint.ahead import Stock
from waypoint.beginning import Beginning, Recent, beginning
from waypoint.capture import Taken
from waypoint.counting import NOT_YET, Count, counted
from waypoint.deltas import Deltas, Tracking
from waypoint.drafts import Drafting, Drafts
from waypoint.ending import resolve
from waypoint.errors import CriuError, HasChildren, HostUnsupported, KernelError, NotFound, SessionDead, WrongState
from waypoint.forking import fork
from waypoint.guest.commands import BASIC_ENVIRONMENT
from waypoint.guest.links import Links
from waypoint.hostroot import host_base
from waypoint.kernel import capabilities, ksm, processes, syscalls, tools
from waypoint.kernel.chores import Chores
from waypoint.kernel.launch import ID_BASE
from waypoint.model import BaseRecord, Capture, Limits, Network, Process, SessionRecord, SnapshotRecord, Spec, new_id
from waypoint.session import Session, check_name
from waypoint.squash import DEPTH, squash
from waypoint.store.store import Store
from waypoint.surroundings import find_shell, guest_layer, place_files
from waypoint.twins import Budget, Twins
from waypoint.verify import FILES, file_digest

__all__ = ["Engine"]

_SOME_SECONDS = 0.3
"""For what takes a processor for longer than whatever is asked for next."""


def _drafter(engine: weakref.ref[Engine]) -> Callable[[str, int], tuple[Taken, SessionRecord] | None]:
    """An engine that nobody holds any more makes no drafts."""

    def draft(session: str, most_bytes: int) -> tuple[Taken, SessionRecord] | None:
        found = engine()
        return None if found is None else Session(found, session, unseen=True).draft(most_bytes)

    return draft


class Engine:
    def __init__(
        self,
        home: Path,
        *,
        ahead: bool = False,
        twins: Budget | None = None,
        drafts: Drafting | None = None,
        deltas: Tracking | None = None,
    ) -> None:
        """`ahead`: have ready what snapshots and restores need, for a process that lives longer than one of them.

        `twins`: keep copies of the newest snapshots brought up and held, so that a restore or fork only lets one go on.
        `drafts`: save sessions after each command, so that a snapshot only has to name what is there; needs `ahead`.
        `deltas`: of processes with much memory save only what was written since their last snapshot, and copy them while they run
        the first time; on where `ahead` is, unless it says otherwise.
        """
        self.store = Store(home)
        self.boot = processes.boot_id()
        self._recent = Recent()
        self.links = Links()
        weakref.finalize(self, self.links.close)
        self.deltas = Deltas(self.store.paths, deltas or Tracking(on=ahead))
        self.stock = Stock(self.store, on=ahead)
        self.twins = Twins(self.store, twins or Budget(), self.stock)
        weakref.finalize(self, self.deltas.close)
        weakref.finalize(self, self.stock.close)
        weakref.finalize(self, self.twins.close)
        self._soon = Chores("soon", self.store.db.close)
        weakref.finalize(self, self._soon.close)
        self._chores = Chores("chores", self.store.db.close) if ahead else None
        if self._chores is not None:
            weakref.finalize(self, self._chores.close)
        plan = drafts or Drafting()
        self.drafts = Drafts(self.store, plan, _drafter(weakref.ref(self)), self._chores, self.links)
        weakref.finalize(self, self.drafts.close)

    def close(self) -> None:
        self.drafts.close()
        self.links.close()
        self.twins.close()
        self.deltas.close()
        self.stock.close()
        self._soon.close()
        if self._chores is not None:
            self._chores.close()
        self.store.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- looking ----------------------------------------------------------------------------------------------------

    def session(self, key: str) -> Session:
        """By id, name or unique prefix."""
        return Session(self, self.store.db.session(key).id)

    def sessions(self) -> list[SessionRecord]:
        return [self.settle(record) for record in self.store.db.sessions()]

    def snapshots(self, tree: str | None = None) -> list[SnapshotRecord]:
        """Without their manifests."""
        found = []
        for record in self.store.db.snapshots(tree):
            with contextlib.suppress(NotFound):  # removed meanwhile
                found.append(replace(record, files_bytes=counted(self.store, record).files_bytes))
        return found

    def count_later(self, record: SnapshotRecord) -> Count:
        """What its files take: found out a moment later, if this engine lives on, or when somebody asks."""
        count = Count(lambda: counted(self.store, record))
        if self._chores is not None and record.files_bytes == NOT_YET:
            self._chores.later(count, _SOME_SECONDS, lazily=True)
        return count

    def settle(self, record: SessionRecord) -> SessionRecord:
        """The record as it really is: a session whose init died, or whose host was rebooted, is dead."""
        if record.state == "live" and (
            record.boot != self.boot or not processes.alive(Process(record.init_pid, record.init_start))
        ):
            intent = self.store.db.ending(record.id)
            if intent is not None:  # its caller died as it was ended at a snapshot: `resolved` makes sure of it
                return replace(record, state="paused")
            return replace(record, state="dead")
        return record

    def resolved(self, session: str) -> SessionRecord:
        """The record, with whatever a killed caller left half done completed or dropped. The caller holds its lock."""
        record = resolve(self.store, self.store.db.session(session), self.boot)
        if record.state == "creating":
            raise WrongState(
                f"session {session} is being made; if whoever was making it is gone, `waypoint gc` removes it", session=session
            )
        return record

    # -- making -----------------------------------------------------------------------------------------------------

    def new(
        self,
        *,
        name: str | None = None,
        base: BaseRecord | None = None,
        network: Network = "none",
        limits: Limits | None = None,
        env: Sequence[tuple[str, str]] = (),
        auto_snapshot: bool = False,
        files_only: bool = False,
        extra_capabilities: Iterable[str] = (),
        seccomp: bool = True,
        user: str | None = None,
        workdir: str | None = None,
        on_fork: str = "",
        merge: bool = False,
        hide: Sequence[Path] = (),
    ) -> Session:
        """Start a session over `base` (the host's own root by default); it is live when this returns.

        `hide`: of the host's root, beside the store and the configured secrets: what the session must not see.
        `merge`: equal pages of its memory and of other such sessions are shared; the host's KSM must be on.
        A `files_only` session needs no CRIU: its snapshots hold files, and a restore starts a fresh shell over them.
        """
        check_name(name)
        self._require_root()
        if merge:
            ksm.require_merging()
        if not files_only:
            tools.engine_criu()  # without a working CRIU no snapshot could be taken: say so now, not then
        with self.store.operation():
            base = base or self._host_base()
            start = replace(
                base.start,
                env=tuple((dict(base.start.env) | dict(env)).items()),
                user=user or base.start.user,
                workdir=workdir or base.start.workdir,
            )
            spec = Spec(
                network=network,
                limits=limits or Limits(),
                capabilities=tuple(sorted(capabilities.parse_caps(extra_capabilities))),
                seccomp=seccomp,
                start=start,
                shell=find_shell(base),
                idmap=ID_BASE,
                auto_snapshot=auto_snapshot,
                files_only=files_only,
                on_fork=on_fork,
                merge=merge,
            )
            guest = guest_layer(self.store, base, hide)
            session = new_id("s")
            spec = replace(spec, hostname=(name or session).replace("_", "-").replace("@", "-").replace("+", "-"))
            self.new_rows({session: name}, session, base, spec, None)
            try:
                faults.point("new-row")
                upper = bringup.new_upper(self.store, base, (guest,))
                place_files(self.store, base, spec, upper)
                layers = () if base.flat else (guest,)
                live = bringup.start_tree(self.store, base, spec, layers, upper, self.environment(spec))
                faults.point("new-started")
            except BaseException:
                self.unmake(session)
                raise
            try:
                self.store.db.make_live({session: live.columns()})
            except BaseException:
                self.end_live(live)
                self.unmake(session)
                raise
        return Session(self, session)

    def new_rows(
        self, names: Mapping[str, str | None], tree: str, base: BaseRecord, spec: Spec, snapshot: str | None
    ) -> None:
        """Sessions that are being made, by id: rows in one step, then a directory for each."""
        now = time.time()
        records = [
            SessionRecord(
                id=session, name=name, state="creating", tree=tree, base=base.id, spec=spec, snapshot=snapshot, layers=(),
                upper=None, init_pid=0, init_start=0, boot=self.boot, created=now + number * 1e-6,
            )
            for number, (session, name) in enumerate(names.items())
        ]  # fmt: skip
        self.store.db.add_sessions(records)
        try:
            for session in names:
                self.store.make_session_directory(session)
        except OSError:
            for session in names:
                self.unmake(session)
            raise

    def fork_one(self, snapshot: str, name: str) -> Session:
        """Of the snapshot with this id; the quickest way where that has a twin."""
        known = self.twins.known(snapshot) or self._recent.get(snapshot) or self.store.db.snapshot(snapshot)
        (session,) = self.fork(known, 1, [name])
        return session

    def fork(
        self, snapshot: SnapshotRecord, n: int, names: Sequence[str] | None = None, *, verify: bool = False
    ) -> list[Session]:
        """`n` sessions from one snapshot, side by side. All or none, even if the caller is killed half-way.

        `verify`: each is compared with the snapshot's manifest before it runs; VerifyFailed if one differs.
        """
        return fork(self, snapshot, n, names, verify)

    def unmake(self, session: str) -> None:
        """One that was only being made."""
        self.store.db.remove_session(session)
        self.store.forget_session_directory(session)

    def bring_up(
        self,
        base: BaseRecord,
        snapshot: SnapshotRecord,
        spec: Spec,
        session: str,
        *,
        upper: int | None = None,
        verify: bool = False,
        begun: bringup.Restoring | None = None,
    ) -> bringup.Live:
        """`upper`: the number of a layer that is to be made; a twin has its own. `begun`: what `beginning` has given."""
        if verify:  # the digest of its files is in the manifest then
            snapshot = counted(self.store, snapshot)
        adopted = self.adopt(snapshot, verify)
        if adopted is not None:
            self.forget_removed(adopted[0])  # it has a directory already
            return replace(adopted[1], spec=spec)
        bringup.check_base(base, snapshot)
        directory = self.store.paths.session(session)
        env = self.environment(spec)
        return bringup.restore_tree(
            self.store, base, snapshot, spec, directory, env, upper=upper, verify=verify, stock=self.stock, begun=begun
        )

    def beginning(self, snapshot: str, session: str, verify: bool) -> contextlib.AbstractContextManager[Beginning]:
        """A restore of a snapshot that was there a moment ago, while the caller finds out whether it still is.

        `session`: what it is for, which has a directory before it goes on. Inside an operation.
        """
        known = self._recent.get(snapshot)
        if known is not None and (verify or self.twins.has(known)):  # what is verified may have to be counted first
            known = None
        return beginning(self.store, self.stock, known, self.store.paths.session(session))

    def adopt(self, snapshot: SnapshotRecord, verify: bool, *, look: bool = True) -> tuple[str, bringup.Live] | None:
        """The snapshot's twin, which goes on and is the caller's, and the id under which it has a session's directory.

        None: it has no twin, or none of use any more; the snapshot is as good as ever. `snapshot` may have been read long ago:
        unless the caller does, `look` whether its row still says the same.
        """
        twin = self.twins.take(snapshot)
        if twin is None:
            return None
        if look and not self.store.db.is_as(snapshot):
            twin.let_go()
            return None
        try:
            return twin.session, twin.adopt(verify)
        except (CriuError, SessionDead, KernelError):  # it died meanwhile
            self.forget_removed(twin.session)
            return None
        except BaseException:
            self.forget_removed(twin.session)
            raise

    def afterwards(self, snapshot: SnapshotRecord | None = None) -> None:
        """For what may come next: directories, and a twin of the snapshot.

        Where twins and drafts hide what a snapshot or restore takes, nothing of it is begun before the caller is well on its way.
        """
        if snapshot is not None:
            self._recent.note(snapshot)

        def get_ahead() -> None:
            self.stock.refill()
            if snapshot is not None:
                self.twins.want(snapshot)

        if self.twins.on or self.drafts.on:
            self._soon.later(get_ahead, lazily=True)
        else:
            get_ahead()

    # -- ending -----------------------------------------------------------------------------------------------------

    def end_incarnation(self, record: SessionRecord) -> None:
        """Kill what the (old) record names and drop its upper, unless a snapshot or session still names that layer."""
        if record.upper is None:
            return
        live = bringup.Live(Process(record.init_pid, record.init_start), record.upper, record.layers, record.spec)
        if record.boot == self.boot:
            bringup.retire(self.store, live)
        self._discard([record.upper, *record.layers])

    def _discard(self, layers: list[int]) -> None:
        """Layers that no row names any more. An engine that lives on does it when the caller has gone on, too."""
        if self._chores is None:
            self.store.discard_layers(layers)
            return

        def discard() -> None:
            with self.store.operation():
                self.store.discard_layers(layers)

        self._chores.later(discard, lazily=True)

    def some_time(self, work: Callable[[], object]) -> None:
        """What nobody waits for, in an operation of its own; at once, if this engine does not live on."""
        if self._chores is None or not self._chores.later(lambda: self._in_operation(work), _SOME_SECONDS, lazily=True):
            work()

    def _in_operation(self, work: Callable[[], object]) -> None:
        with self.store.operation():
            work()

    def forget_removed(self, session: str) -> None:
        """The directory of a session that has no row any more; see `_discard`."""
        if self._chores is None:
            self.store.forget_session_directory(session)
        else:
            self._chores.later(lambda: self.store.forget_session_directory(session), lazily=True)

    def end_live(self, live: bringup.Live) -> None:
        """End an incarnation that no row names."""
        if live.link is not None:
            live.link.close()
        bringup.retire(self.store, live)
        self.store.discard_layers([live.upper])

    def remove_snapshot(self, key: str, *, recursive: bool = False) -> list[str]:
        """Remove a snapshot, with its descendants if asked; returns the ids that are gone."""
        with self.store.operation():
            target = self.store.db.snapshot(key)
            children: dict[str | None, list[SnapshotRecord]] = {}
            for record in self.store.db.snapshots(target.tree):
                if not record.pinned:  # those belong to paused sessions, and move up the tree
                    children.setdefault(record.parent, []).append(record)
            doomed = [target.id]
            for parent in doomed:
                doomed += [child.id for child in children.get(parent, ())]
            if len(doomed) > 1 and not recursive:
                raise HasChildren(
                    f"snapshot {target.id} has {len(children[target.id])} children; `waypoint rm --recursive {target.id}` "
                    f"removes all {len(doomed)}",
                    snapshot=target.id,
                    descendants=doomed[1:],
                )
            held = {record.pause for record in self.store.db.sessions() if record.pause}
            if held & set(doomed):
                raise WrongState(f"snapshot {target.id} holds a paused session; resume or remove that session first")
            self.drop_snapshots(doomed[::-1])
        return doomed

    def drop_snapshots(self, snapshots: list[str]) -> None:
        """Rows first, then what they named."""
        self.twins.drop(snapshots)
        layers: list[int] = []
        images = set(snapshots)
        for snapshot in snapshots:
            with contextlib.suppress(NotFound):
                record = self.store.db.snapshot(snapshot)
                layers += record.layers
                images.add(record.image)
        self.store.db.remove_snapshots(snapshots)
        faults.point("drop-rows")
        for image in sorted(images):
            self.store.discard_image(image)
        faults.point("drop-images")
        self.store.discard_layers(sorted(set(layers)))

    def gc(self) -> dict[str, int]:
        """Remove what no row names: layers, images, processes, cgroups, links. Returns how many of each."""
        from waypoint.sweep import sweep

        self.drafts.drop()
        self.twins.drop()
        self.stock.spares.drop()
        swept = sweep(self.store, self.boot).as_dict()
        self.snapshots()  # what a process that was killed has not counted
        return swept

    def keep_shallow(self, record: SnapshotRecord) -> SnapshotRecord:
        """Merge the layers of a snapshot whose chain has grown deep; sessions that run over the old ones are not touched."""
        if len(record.layers) <= DEPTH:
            return record
        base = self.store.db.base(record.base)
        if base.flat:
            return record
        record = counted(self.store, record)
        layers = squash(self.store, base, record.layers)
        manifest = record.manifest | {FILES: file_digest(self.store.paths.upper(layers[0]))}
        self.store.db.update_snapshot(record.id, layers=layers, manifest=manifest)
        self._discard(list(record.layers))
        return replace(record, layers=layers, manifest=manifest)

    def prune_automatic(self, session: str, keep: int) -> None:
        """Automatic snapshots beyond the newest `keep` are cut out of the chain; their children move up."""
        mine = [r for r in self.store.db.snapshots() if r.session == session and r.name is None and not r.pinned]
        for record in mine[:-keep]:
            self.cut_out(record)

    def cut_out(self, record: SnapshotRecord) -> None:
        """Remove one snapshot from the middle of a chain; its children move up to its parent."""
        self.store.db.reparent(record.id, record.parent)
        self.drop_snapshots([record.id])

    def keep_files_only(self, record: SnapshotRecord) -> SnapshotRecord:
        """Give up the processes and memory of a snapshot: it comes back with a fresh shell over its files."""
        capture = Capture(("files",), ("processes, memory and terminal: only files were asked for",))
        with self.store.operation():
            self.store.db.update_snapshot(record.id, full=0, memory_bytes=0, capture=json.dumps(asdict(capture)))
            self.store.discard_image(record.image)
        return replace(record, full=False, memory_bytes=0, capture=capture)

    def sync(self) -> None:
        """All that the store holds is on disk when this returns."""
        fd = os.open(self.store.paths.home, os.O_RDONLY | os.O_DIRECTORY)
        try:
            syscalls.sync_file_system(fd)
        finally:
            os.close(fd)

    # -- surroundings -----------------------------------------------------------------------------------------------

    def environment(self, spec: Spec) -> dict[str, str]:
        """The environment that a session's programs begin with."""
        return BASIC_ENVIRONMENT | dict(spec.start.env)

    def _require_root(self) -> None:
        if os.geteuid() != 0:
            raise HostUnsupported(
                "Waypoint needs root to make sessions; run it with sudo", fix="sudo waypoint ...", feature="root"
            )

    def _host_base(self) -> BaseRecord:
        base = host_base(self.store.paths)
        self.store.db.add_base(base)
        return base
