"""A warm pool: environments of one template that wait, made and ready, for whoever asks for exactly that."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statefork.errors import NotFound, WaypointError
from statefork.server.guard.problems import Refused
from statefork.server.service.held import Held
from statefork.server.service.making import Terms, Wanted, new_identifier
from statefork.server.service.records import PoolRow

if TYPE_CHECKING:
    from statefork.server.service.service import Service

__all__ = ["Pool", "Pools"]

log = logging.getLogger(__name__)
_FAILED_SECONDS = 10.0
_STOP_SECONDS = 20.0


@dataclass(slots=True)
class Pool:
    row: PoolRow
    ready: deque[Held] = field(default_factory=deque)
    problem: str | None = None
    """Why the last one could not be made."""


class Pools:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._pools: dict[str, Pool] = {}
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        service = self._service
        for row in await service.work.run(service.records.pools):
            self._pools[row.name] = Pool(row)
        for held in list(service.held.values()):
            if held.row.pool is None:
                continue
            pool = self._pools.get(held.row.pool)
            if pool is not None and held.state == "live" and len(pool.ready) < pool.row.size:
                pool.ready.append(held)
            else:
                await self._delete(held)
        self._task = asyncio.create_task(self._fill(), name="statefork-pools")
        self._wanted.set()

    async def stop(self) -> None:
        """What is being made is finished first, if that does not take too long: the next process would have to clear it up."""
        self._stopping = True
        self._wanted.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_STOP_SECONDS)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def list(self) -> list[Pool]:
        return [self._pools[name] for name in sorted(self._pools)]

    def find(self, name: str) -> Pool:
        if name not in self._pools:
            raise NotFound(f"there is no pool {name!r}; there are: {', '.join(sorted(self._pools)) or 'none'}")
        return self._pools[name]

    async def put(self, row: PoolRow) -> Pool:
        service = self._service
        await service.work.run(lambda: service.records.put_pool(row))
        old = self._pools.get(row.name)
        pool = self._pools[row.name] = Pool(row)
        if old is not None:
            same = (old.row.method, old.row.arguments) == (row.method, row.arguments)
            while old.ready:
                held = old.ready.popleft()
                if same and len(pool.ready) < row.size:
                    pool.ready.append(held)
                else:
                    await self._delete(held)
        self._wanted.set()
        return pool

    async def remove(self, name: str) -> None:
        pool = self.find(name)
        del self._pools[name]
        await self._service.work.run(lambda: self._service.records.remove_pool(name))
        while pool.ready:
            await self._delete(pool.ready.popleft())

    def take(self, wanted: Wanted) -> Held | None:
        """One that is ready and live, if there is a pool for exactly this."""
        key = _key(wanted)
        for pool in self._pools.values():
            if pool.ready and _key(Wanted(pool.row.method, pool.row.arguments)) == key:
                held = pool.ready.popleft()
                self._wanted.set()
                if held.state == "live" and not held.gone:
                    return held
        return None

    async def _fill(self) -> None:
        """One at a time, and not while callers wait for the same threads."""
        while not self._stopping:
            await self._wanted.wait()
            self._wanted.clear()
            for pool in self.list():
                while not self._stopping and self._pools.get(pool.row.name) is pool and len(pool.ready) < pool.row.size:
                    if self._service.work.waiting:
                        await asyncio.sleep(0.1)
                    elif not await self._add(pool):
                        asyncio.get_running_loop().call_later(_FAILED_SECONDS, self._wanted.set)
                        break

    async def _add(self, pool: Pool) -> bool:
        wanted = Wanted(pool.row.method, pool.row.arguments)
        try:
            held = await self._service.making.make(
                wanted, Terms(), owner=f"pool:{pool.row.name}", identifier=new_identifier(), pool=pool.row.name
            )
        except (WaypointError, Refused, OSError) as error:
            pool.problem = str(error)
            log.warning("pool %s: %s", pool.row.name, error)
            return False
        pool.problem = None
        held.row.expires = None
        if self._pools.get(pool.row.name) is pool:
            pool.ready.append(held)
        else:
            await self._delete(held)
        return True

    async def _delete(self, held: Held) -> None:
        try:
            await self._service.making.delete(held)
        except WaypointError as error:
            log.warning("environment %s of pool %s: %s", held.id, held.row.pool, error)


def _key(wanted: Wanted) -> str:
    return json.dumps([wanted.method, dict(wanted.arguments)], sort_keys=True, default=str)
