"""The Service: every environment that this daemon looks after, found by id, used by callers, kept across its own death.

Its methods are coroutines of one event loop; what blocks runs behind a Gate. State in memory is only touched on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

from statefork.environment import Environment
from statefork.errors import Ambiguous, NotFound, SessionDead, WaypointError
from statefork.family import Family
from statefork.server.guard.install import Guard
from statefork.server.guard.principal import Principal
from statefork.server.service.adoption import adopt_all
from statefork.server.service.answers import Answers
from statefork.server.service.gates import Gate
from statefork.server.service.held import Held
from statefork.server.service.lifecycle import Lifecycle
from statefork.server.service.making import Making
from statefork.server.service.pools import Pools
from statefork.server.service.records import Records
from statefork.server.service.running import Running
from statefork.server.service.usage import Usage
from statefork.server.settings import Settings
from statefork.tree import Node

__all__ = ["Service", "Tree"]

log = logging.getLogger(__name__)
T = TypeVar("T")


class Tree:
    """A snapshot tree and whose it is."""

    def __init__(self, key: str, family: Family, owner: str, method: str) -> None:
        self.key, self.family, self.owner, self.method = key, family, owner, method


class Service:
    def __init__(self, settings: Settings, guard: Guard) -> None:
        self.settings, self.guard = settings, guard
        self.records = Records(settings.directory / "server.db")
        self.held: dict[str, Held] = {}
        self.trees: dict[str, Tree] = {}
        self.work = Gate("work", settings.work_slots, settings.work_queue)
        self.commands = Gate("command", settings.command_slots, settings.command_queue)
        self.terminals = Gate("terminal", settings.terminal_slots, 0)
        self.books = Gate("books", 1, 1 << 30)  # one thread: what is written later is read later
        self.answers = Answers(self)
        self.making = Making(self)
        self.running = Running(self)
        self.usage = Usage(self)
        self.pools = Pools(self)
        self.lifecycle = Lifecycle(self)
        self.ready = False
        self.ending = False
        self._looking: set[asyncio.Future[None]] = set()
        guard.checks["environments"] = lambda: self.ready
        self._gauges()

    async def start(self) -> None:
        """Take over what an earlier process left."""
        await adopt_all(self)
        await self.pools.start()
        self.lifecycle.start()
        self.ready = True

    async def stop(self) -> None:
        """Environments of durable backends go on without us; the others end now, in order."""
        self.ready, self.ending = False, True
        await self.lifecycle.stop()
        await self.pools.stop()
        for held in list(self.held.values()):
            environment = held.environment
            if environment is not None and not environment.family.driver.durable and environment.state != "destroyed":
                why = f"{held.backend} environments end with the daemon, and it was stopped"
                with contextlib.suppress(WaypointError):
                    await self.work.run(lambda environment=environment, why=why: environment.abandon(why))  # type: ignore[misc]
        self.records.put_environments(*(held.row for held in self.held.values()))
        for gate in (self.work, self.commands, self.terminals, self.books):
            gate.close()
        for tree in self.trees.values():
            tree.family.leave()
        self.records.close()

    # -- finding ------------------------------------------------------------------------------------------------------

    def seen_by(self, principal: Principal) -> Iterable[Held]:
        """Oldest first."""
        for held in self.held.values():
            if held.row.pool is None and not held.gone and principal.sees(held.row.owner, held.id):
                yield held

    def find(self, reference: str, principal: Principal) -> Held:
        """By id or by a prefix of it that fits only one that the caller may see."""
        held = self.held.get(reference)
        if held is not None and held.row.pool is None and not held.gone and principal.sees(held.row.owner, held.id):
            return held
        fits = [one for one in self.seen_by(principal) if reference and one.id.startswith(reference)]
        if len(fits) > 1:
            raise Ambiguous(f"{reference!r} fits {', '.join(one.id for one in fits[:5])}; write more of it")
        if not fits:
            raise NotFound(f"there is no environment {reference!r}")
        return fits[0]

    def trees_seen_by(self, principal: Principal) -> list[Tree]:
        inhabited = {held.row.tree for held in self.seen_by(principal)}
        return [
            tree
            for key, tree in self.trees.items()
            if key in inhabited or (tree.owner == principal.token_id) or principal.may("admin")
        ]

    def find_snapshot(self, reference: str, principal: Principal) -> tuple[Tree, Node]:
        """In all trees that the caller may see, by id or unique prefix."""
        fits: list[tuple[Tree, Node]] = []
        for tree in self.trees_seen_by(principal):
            for snapshot in tree.family.tree.snapshots():
                if snapshot.id == reference:
                    return tree, tree.family.tree.find(reference)
                if reference and snapshot.id.startswith(reference):
                    fits.append((tree, tree.family.tree.find(snapshot.id)))
        if len(fits) > 1:
            raise Ambiguous(
                f"{reference!r} fits {', '.join(node.snapshot.id for _, node in fits[:5])}; write more of it"
            )
        if not fits:
            raise NotFound(f"there is no snapshot {reference!r}")
        return fits[0]

    def owned(self, principal: Principal) -> int:
        return sum(held.row.owner == principal.token_id and held.row.pool is None for held in self.held.values())

    # -- using --------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def use(self, held: Held, *, awake: bool = True) -> AsyncIterator[Environment]:
        """While inside it is not idle. One that was paused for idleness is brought back first, if `awake`."""
        held.active += 1
        held.row.used = time.time()
        try:
            if awake and held.row.paused_by == "idle":
                await self.lifecycle.wake(held)
            yield held.live
        finally:
            held.active -= 1
            held.row.used = time.time()

    async def do(self, held: Held, verb: str, call: Callable[[], T], *, gate: Gate | None = None) -> T:
        """Run a blocking call, and count it."""
        began, outcome = time.perf_counter(), "ok"
        try:
            with self.guard.tracing.span(verb, backend=held.backend, environment=held.id):
                return await (gate or self.work).run(call)
        except WaypointError as error:
            outcome = error.code
            self.notice(held, error)
            raise
        except asyncio.CancelledError:
            outcome = "disconnected"
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            self.guard.metrics.operation(held.backend, verb, outcome, time.perf_counter() - began)

    def notice(self, held: Held, error: BaseException | None) -> None:
        """A call found it dead: look at once, and not at the next round."""
        if isinstance(error, SessionDead) and held.state == "live" and not self.ending:
            looking = asyncio.ensure_future(self.usage.sample(held))
            self._looking.add(looking)
            looking.add_done_callback(self._looking.discard)

    def _gauges(self) -> None:
        metrics = self.guard.metrics
        metrics.gauge("environments", "Environments, by backend and state.", self._states, ["backend", "state"])
        metrics.gauge("snapshot_bytes", "What snapshots store.", self._stored)
        metrics.gauge(
            "queue_length",
            "Calls that wait for a thread.",
            lambda: {(g.name,): float(g.waiting) for g in (self.work, self.commands, self.terminals)},
            ["gate"],
        )
        metrics.gauge(
            "under_way",
            "Calls that go on.",
            lambda: {(g.name,): float(g.running) for g in (self.work, self.commands, self.terminals)},
            ["gate"],
        )
        metrics.gauge("memory_bytes", "What live environments held at the last look.", lambda: self.usage.memory_bytes)

    def _states(self) -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for held in list(self.held.values()):
            key = (held.backend, "pooled" if held.row.pool else held.state)
            found[key] = found.get(key, 0) + 1
        return found

    def _stored(self) -> float:
        return float(
            sum(
                s.files_bytes + s.memory_bytes
                for tree in list(self.trees.values())
                for s in tree.family.tree.snapshots()
            )
        )
