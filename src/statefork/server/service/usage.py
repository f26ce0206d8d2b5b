"""What environments use: CPU seconds and memory over time, while they are live; what they store, always.

A look at /proc every few seconds. While an environment is paused nothing is looked at and nothing grows.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statefork.errors import SessionDead, WaypointError
from statefork.model import Usage as Reading
from statefork.server.service.held import Held
from statefork.server.service.records import UsageRow

if TYPE_CHECKING:
    from statefork.server.service.service import Service

__all__ = ["Total", "Usage"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Total:
    cpu_seconds: float
    memory_byte_seconds: float
    live_seconds: float
    stored_bytes: int
    snapshots: int
    environments: int


class Usage:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._memory: dict[str, int] = {}

    @property
    def memory_bytes(self) -> float:
        return float(sum(self._memory.values()))

    async def sample(self, held: Held) -> None:
        """Add what was used since the last look. Called before a pause, a restore and the end, too."""
        environment = held.environment
        if environment is None or held.gone or environment.state != "live":
            self._memory.pop(held.id, None)
            return
        place = environment.place
        try:
            reading = await self._service.commands.run(environment.usage)
        except SessionDead as error:
            why = error.message
            log.warning("environment %s is lost: %s", held.id, why)
            await self._service.work.run(lambda: environment.abandon(why, place))
            self._memory.pop(held.id, None)
            return
        except (WaypointError, OSError) as error:
            log.debug("environment %s: no usage: %s", held.id, error)
            return
        if environment.place == place and not held.gone:
            self._count(held, place, reading)

    def _count(self, held: Held, place: str, reading: Reading | None) -> None:
        now = time.time()
        row, used = held.row, held.row.usage
        before, cpu = row.sampled_place, row.sampled_cpu_seconds
        elapsed = max(0.0, now - row.sampled) if row.sampled else 0.0
        used.live_seconds += elapsed
        row.sampled_place, row.sampled_cpu_seconds, row.sampled = place, reading.cpu_seconds if reading else 0.0, now
        if reading is None:
            return
        fresh = before != place or reading.cpu_seconds < cpu
        used.cpu_seconds += reading.cpu_seconds - (0.0 if fresh else cpu)
        used.memory_byte_seconds += reading.memory_bytes * elapsed
        self._memory[held.id] = reading.memory_bytes

    def restarted(self, held: Held) -> None:
        """It has come up anew: the time in between is not its own, and its processes begin at zero."""
        place = held.environment.place if held.environment is not None else ""
        held.row.sampled_place, held.row.sampled_cpu_seconds, held.row.sampled = place, 0.0, time.time()

    def stopped(self, held: Held) -> None:
        self._memory.pop(held.id, None)

    def of(self, held: Held) -> Total:
        mine = [s for s in self._snapshots(held) if s.environment == held.id]
        stored = sum(s.files_bytes + s.memory_bytes for s in mine)
        used = held.row.usage
        return Total(used.cpu_seconds, used.memory_byte_seconds, used.live_seconds, stored, len(mine), 1)

    def _snapshots(self, held: Held):  # type: ignore[no-untyped-def]
        tree = self._service.trees.get(held.row.tree)
        return tree.family.tree.snapshots() if tree is not None else []

    def by_owner(self, past: dict[str, UsageRow]) -> dict[str, Total]:
        """Of all tokens; what was deleted counts too, but for what it stored."""
        owners: dict[str, list[Total]] = {}
        for owner, row in past.items():
            owners.setdefault(owner, []).append(
                Total(row.cpu_seconds, row.memory_byte_seconds, row.live_seconds, 0, 0, 0)
            )
        for held in self._service.held.values():
            if held.row.pool is None:
                owners.setdefault(held.row.owner, []).append(self.of(held))
        return {owner: _sum(totals) for owner, totals in owners.items()}


def _sum(totals: list[Total]) -> Total:
    return Total(
        cpu_seconds=sum(t.cpu_seconds for t in totals),
        memory_byte_seconds=sum(t.memory_byte_seconds for t in totals),
        live_seconds=sum(t.live_seconds for t in totals),
        stored_bytes=sum(t.stored_bytes for t in totals),
        snapshots=sum(t.snapshots for t in totals),
        environments=sum(t.environments for t in totals),
    )
