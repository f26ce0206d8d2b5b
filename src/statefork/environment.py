"""The Environment: one live thing of any backend, and the behaviour that all backends share.

Ids, locks, timing, history, states and "the new one is up before the old one goes" are written here, once (the steps
that forks share are in family.py). What a backend does is in its driver; what a driver owes is written in driver.py.

Threads. `exec_command` calls on one environment take turns; `run` and files go on beside them. Snapshots, restores,
pauses and forks of one environment take turns among themselves. A restore does not wait for a running command: the
command's caller gets SessionDead, because the environment that it ran in is retired.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, overload

from statefork.arguments import check_mode
from statefork.counted import as_given
from statefork.driver import Driver, Live
from statefork.errors import SessionDead, Unsupported, UsageError, WaypointError, WrongState
from statefork.family import Family, Standing, mapped
from statefork.history import History, Stats
from statefork.home import default_home
from statefork.inside import Draft, Inside
from statefork.ledger import EnvironmentNote
from statefork.model import (
    Capabilities,
    Capability,
    Diff,
    ForkFailure,
    Mode,
    RestoreResult,
    Snapshot,
)
from statefork.tree import Node, TreeView, mint

__all__ = ["Environment"]

log = logging.getLogger(__name__)
FORK_THREADS = 16


class Environment(Inside):
    """Make one with `statefork.create_env_manager`, or from a driver of your own with `Environment.create`."""

    def __init__(self, family: Family, identifier: str, standing: Standing | None, origin: Node | None) -> None:
        self.id = identifier
        self.history = History(identifier, family.driver.name, most=family.most_history)
        self._family = family
        self._standing: Standing | None = standing
        self._paused_at: Node | None = None
        self._state: Literal["live", "paused", "lost", "destroyed"] = "live"
        self._lost = ""
        self._shell_anew = origin is not None and Capability.SHELL not in origin.captured.captured
        self._shell_lock = threading.Lock()
        self._state_lock = threading.RLock()  # taken after the shell's, never before
        family.tree.revived(identifier, origin.snapshot.id if origin else None)

    @classmethod
    def create(
        cls,
        driver: Driver,
        *,
        home: Path | None = None,
        attach: bool = False,
        identifier: str | None = None,
        family: Family | None = None,
    ) -> Environment:
        """Probe, start (or attach to) an environment, and wait until it answers.

        `family` is one that the caller has made for it, with a ledger maybe; else it gets its own."""
        started_at, began = datetime.now(UTC), time.perf_counter()
        family = family or Family(driver, home or default_home())
        try:
            standing = family.bring_up(driver.attach if attach else driver.start)
        except BaseException:
            family.close()
            raise
        environment = cls(family, identifier or mint("e"), standing, None)
        environment._tell()
        duration_ms = (time.perf_counter() - began) * 1000
        environment.history.add("attach" if attach else "start", started_at=started_at, duration_ms=duration_ms)
        return environment

    @classmethod
    def adopt(cls, family: Family, note: EnvironmentNote) -> Environment:
        """Go on with an environment that another process looked after; what is gone of it is `lost`, and says why."""
        standing, lost, state = None, "", note.state
        if note.place is not None and note.live is not None:
            try:
                standing = family.adopt(note.live, note.place)
            except WaypointError as error:
                state, lost = "lost", error.message
        environment = cls(family, note.id, standing, None)
        family.tree.stood(note.id, note.origin, note.latest)
        environment._state = state  # type: ignore[assignment]
        environment._lost = lost or ("its processes were gone before" if state == "lost" else "")
        environment._shell_anew = note.shell_anew or not family.capabilities.full
        if note.paused_at is not None:
            environment._paused_at = family.tree.find(note.paused_at)
        environment._tell()
        return environment

    @classmethod
    def from_node(cls, family: Family, node: Node, identifier: str | None = None) -> Environment:
        """A new one from a snapshot, also where no environment of its tree is left."""
        started_at, began = datetime.now(UTC), time.perf_counter()
        environment = cls(family, identifier or mint("e"), family.revive(node), node)
        environment._tell()
        environment.history.add(
            "forked",
            started_at=started_at,
            duration_ms=(time.perf_counter() - began) * 1000,
            snapshot=node.snapshot.id,
        )
        return environment

    def abandon(self, why: str, place: str | None = None) -> None:
        """Its processes are gone, and not by our doing: it is `lost`, and can still be restored to a snapshot.

        `place` is where they were; if something else is live by now, nothing is lost.
        """
        with self._state_lock:
            if self._state != "destroyed" and place in (None, self.place):
                standing, self._standing = self._standing, None
                self._state, self._lost, self._paused_at = "lost", why, None
                if standing is not None:
                    self._retire(standing)
                self._tell()

    def __enter__(self) -> Environment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.destroy()

    def __repr__(self) -> str:
        return f"<Environment {self.id} {self.backend} {self._state}>"

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> str:
        return self._family.driver.name

    @property
    def state(self) -> str:
        """`live`, `paused` or `destroyed`; in the daemon also `lost`: its processes ended without being asked to."""
        return self._state

    def settled(self) -> str:
        """`state`, when whatever is changing it has ended."""
        with self._state_lock:
            return self._state

    @property
    def lost(self) -> str:
        """Why it is `lost`."""
        return self._lost

    @property
    def place(self) -> str:
        """The name of what is live now: another one after a restore. Numbers of commands count in it."""
        standing = self._standing
        return standing.place.name if standing else ""

    @property
    def family(self) -> Family:
        """What it shares with its forks: for those who look after trees."""
        return self._family

    @property
    def capabilities(self) -> Capabilities:
        """What `restore` brings back on this host."""
        return self._family.capabilities

    @property
    def description(self) -> str:
        """What to look for on this host: a container's name, a pid, a VM id; empty unless live."""
        standing = self._standing
        return standing.live.description if standing else ""

    @property
    def stats(self) -> Stats:
        snapshots = self._family.tree.snapshots()
        return Stats(
            operations=self.history.summary(),
            snapshots=len(snapshots),
            environments=self._family.tree.environments,
            files_bytes=sum(snapshot.files_bytes for snapshot in snapshots),
            memory_bytes=sum(snapshot.memory_bytes for snapshot in snapshots),
        )

    def snapshots(self) -> list[Snapshot]:
        """All of the tree, oldest first: forks share it."""
        return self._family.tree.snapshots()

    def tree(self) -> TreeView:
        return self._family.tree.view()

    # -- states -------------------------------------------------------------------------------------------------------

    def snapshot(self, name: str | None = None, *, mode: Mode = "auto") -> str:
        """Store the present state and go on; returns the snapshot's id."""
        check_mode(self.capabilities, mode)
        with self._still():
            return self._capture(name, mode).snapshot.id

    def restore(self, snapshot: str) -> RestoreResult:
        """Go back (or sideways) to a snapshot, given by id, name or unique prefix; the environment keeps its id.

        The target is up and has answered before what is live now is retired; if it does not come up, that goes on.
        """
        with self._state_lock, self._recorded("restore") as draft:
            self._refuse_destroyed("restore")
            node = self._family.tree.find(snapshot)
            draft.snapshot = node.snapshot.id
            began = time.perf_counter()
            old = self._stand_on(node)
            duration_ms = (time.perf_counter() - began) * 1000
            if old is not None:
                self._replaced(old)
            return RestoreResult(
                environment=self.id,
                snapshot=node.snapshot.id,
                duration_ms=duration_ms,
                restored=node.captured.captured,
                shell_restarted=self._shell_anew,
            )

    def become(self, snapshot: str) -> None:
        """Go on as a snapshot, in place where the backend can: what was attached to is then that state for its owner too.

        Elsewhere it is a restore, and what was attached to is left as it is.
        """
        with self._state_lock, self._recorded("become") as draft:
            node = self._family.tree.find(snapshot)
            draft.snapshot = node.snapshot.id
            try:
                self._live("become a snapshot").become(node.captured)
            except Unsupported:
                self.restore(snapshot)
            else:
                self._shell_anew = Capability.SHELL not in node.captured.captured
                self._family.tree.revived(self.id, node.snapshot.id)
                self._tell()

    @overload
    def fork(self, n: int = 1, *, from_snapshot: str | None = None) -> list[Environment]: ...
    @overload
    def fork(
        self, n: int = 1, *, from_snapshot: str | None = None, return_errors: Literal[True]
    ) -> list[Environment | ForkFailure]: ...
    def fork(
        self, n: int = 1, *, from_snapshot: str | None = None, return_errors: bool = False
    ) -> list[Environment] | list[Environment | ForkFailure]:
        """N live, independent environments from a snapshot, or from now (which takes a snapshot first).

        All or none, unless `return_errors`: then a ForkFailure stands where one could not be made.
        """
        if n < 1:
            raise UsageError(f"fork {n}: ask for at least one")
        with self._recorded("fork") as draft:
            if from_snapshot is None:
                with self._still():
                    node = self._capture(None, "auto")
            else:
                self._refuse_destroyed("fork")
                node = self._family.tree.find(from_snapshot)
            draft.snapshot, draft.details["count"] = node.snapshot.id, n
            if n == 1:  # a thread of its own would have to open the backend's database first
                made = [self._fork_one(node)]
            else:
                with ThreadPoolExecutor(min(n, FORK_THREADS), thread_name_prefix="statefork-fork") as pool:
                    made = list(pool.map(lambda _: self._fork_one(node), range(n)))
            failures = [one.error for one in made if isinstance(one, ForkFailure)]
            if failures and not return_errors:
                for one in made:
                    if isinstance(one, Environment):
                        one.destroy()
                raise failures[0]
            return made

    def pause(self) -> None:
        """Release the CPU, and the memory where the backend can (`capabilities.pause_releases_memory`)."""
        if not self.capabilities.pause_releases_memory or self._live("pause").pauses_itself:
            with self._state_lock, self._recorded("pause"):
                self._live("pause").suspend()
                self._state = "paused"
                self._tell()
            return
        with self._still(), self._recorded("pause") as draft:
            node = self._family.capture(self.id, self._live("pause"), None, "auto")
            _note(draft, node)
            old, self._standing = self._standing, None
            self._paused_at, self._state = node, "paused"
            self._tell()
            if old is not None:
                self._retire(old)

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        with self._state_lock, self._recorded("resume") as draft:
            if self._state != "paused":
                raise WrongState(f"environment {self.id} is {self._state}, not paused")
            if self._standing is not None:
                self._standing.live.proceed()
                self._state = "live"
                self._tell()
            elif self._paused_at is not None:
                draft.snapshot = self._paused_at.snapshot.id
                self._stand_on(self._paused_at)

    def remove_snapshot(self, snapshot: str, *, recursive: bool = False) -> None:
        """Free a snapshot's storage. Refused while it has children (unless `recursive`) or a live environment on it."""
        with self._state_lock, self._recorded("remove_snapshot") as draft:
            self._refuse_destroyed("remove a snapshot")
            for node in self._family.tree.branch(snapshot, recursive):
                draft.snapshot = node.snapshot.id
                self._family.discard(node)

    def diff(self, a: str, b: str | None = None) -> Diff:
        """What changed from snapshot `a` to snapshot `b`, or to the present state if `b` is left out."""
        with self._recorded("diff"):
            if Capability.FILES not in self.capabilities.restores:
                raise Unsupported(f"{self.backend} stores no files, so there is nothing to compare")
            first = self._family.tree.find(a)
            second = self._family.tree.find(b) if b is not None else None
            added, changed, removed = self._family.compare(first, second or self._live("compare files"))
            here, there = set(first.snapshot.processes), set(second.snapshot.processes) if second else set()
            return Diff(
                a=first.snapshot.id,
                b=second.snapshot.id if second else self.id,
                added=added,
                changed=changed,
                removed=removed,
                processes_added=tuple(sorted(there - here)) if second else (),
                processes_removed=tuple(sorted(here - there)) if second else (),
            )

    def destroy(self) -> None:
        """End the environment and remove all that was made for it; the last of a tree takes the snapshots along.

        Calling it again does nothing. What was attached to, not made, is left running as it is.
        """
        with self._state_lock:
            if self._state == "destroyed":
                return
            with self._recorded("destroy"):
                standing, self._standing = self._standing, None
                self._state, self._paused_at = "destroyed", None
                if self._family.ledger is not None:
                    self._family.ledger.environment_gone(self.id)
                problems: list[WaypointError] = []
                if standing is not None:
                    try:
                        self._family.take_down(standing)
                    except (WaypointError, OSError) as error:
                        problems.append(mapped(error, f"destroy environment {self.id}"))
                if self._family.tree.leave(self.id):
                    problems += self._family.close()
                if problems:
                    raise problems[0]

    cleanup = destroy

    # -- inside -------------------------------------------------------------------------------------------------------

    def _live(self, what: str) -> Live:
        standing = self._standing
        if self._state == "lost":
            raise SessionDead(
                f"cannot {what}: environment {self.id} is lost: {self._lost}; restore one of its snapshots, or destroy it"
            )
        if self._state != "live" or standing is None:
            hint = "; resume it first" if self._state == "paused" else ""
            raise WrongState(f"cannot {what}: environment {self.id} is {self._state}{hint}")
        return standing.live

    def _refuse_destroyed(self, what: str) -> None:
        if self._state == "destroyed":
            raise WrongState(f"cannot {what}: environment {self.id} is destroyed")

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """Hold what a capture needs: the state, and the shell too where the backend cannot store a running command."""
        waits = contextlib.nullcontext() if self.capabilities.snapshot_during_exec else self._shell_lock
        with waits, self._state_lock:
            yield

    def _capture(self, name: str | None, mode: Mode) -> Node:
        with self._recorded("snapshot") as draft:
            node = self._family.capture(self.id, self._live("take a snapshot"), name, mode)
            _note(draft, node)
            return node

    def _stand_on(self, node: Node) -> Standing | None:
        """Bring a snapshot up and make it what this environment is; gives back what it was until now."""
        fresh = self._family.revive(node)
        old, self._standing = self._standing, fresh
        self._state, self._paused_at = "live", None
        self._shell_anew = Capability.SHELL not in node.captured.captured
        self._family.tree.revived(self.id, node.snapshot.id)
        self._tell()
        return old

    def _tell(self) -> None:
        """To whoever would have to go on if this process were killed now."""
        family = self._family
        if family.ledger is None:
            return
        standing = self._standing
        origin, latest = family.tree.stands(self.id)
        family.ledger.environment(
            EnvironmentNote(
                id=self.id,
                state=self._state,
                place=standing.place.name if standing else None,
                live=standing.live.note() if standing and family.driver.durable else None,
                paused_at=self._paused_at.snapshot.id if self._paused_at else None,
                origin=origin,
                latest=latest,
                shell_anew=self._shell_anew,
            )
        )

    def _fork_one(self, node: Node) -> Environment | ForkFailure:
        try:
            return Environment.from_node(self._family, node)
        except (WaypointError, OSError) as error:
            return ForkFailure(mapped(error, "fork"))

    def _retire(self, old: Standing) -> None:
        """What it was for is done: that it cannot be cleared away must not make that look failed."""
        with self._warned(old):
            self._family.take_down(old)

    def _replaced(self, old: Standing) -> None:
        """The new one has answered; see `_retire`."""
        with self._warned(old):
            self._family.replace(old)

    @contextlib.contextmanager
    def _warned(self, old: Standing) -> Iterator[None]:
        try:
            yield
        except (WaypointError, OSError) as error:
            log.warning("environment %s: %s could not be removed: %s", self.id, old.live.description, error)

    @contextlib.contextmanager
    def _recorded(self, operation: str) -> Iterator[Draft]:
        draft, code = Draft(), None
        started_at, began = datetime.now(UTC), time.perf_counter()
        try:
            yield draft
        except WaypointError as error:
            code = error.code
            raise
        except OSError as error:
            ours = mapped(error, f"{operation} on environment {self.id}")
            code = ours.code
            raise ours from error
        except BaseException:
            code = "internal"
            raise
        finally:
            self.history.add(
                operation,
                started_at=started_at,
                duration_ms=(time.perf_counter() - began) * 1000,
                error=code,
                snapshot=draft.snapshot,
                files_bytes=draft.files_bytes,
                memory_bytes=draft.memory_bytes,
                details=draft.details,
            )


def _note(draft: Draft, node: Node) -> None:
    draft.snapshot = node.snapshot.id
    draft.files_bytes, draft.memory_bytes = as_given(node.captured, "files_bytes"), node.captured.memory_bytes
