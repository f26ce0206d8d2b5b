"""What the daemon does by itself: environments end when their time is over, stand still when nobody uses them, and come back
with the next call."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from statefork.errors import WaypointError
from statefork.server.guard.problems import Refused
from statefork.server.service.held import Held

if TYPE_CHECKING:
    from statefork.server.service.service import Service

__all__ = ["Lifecycle"]

log = logging.getLogger(__name__)
_RETRY_SECONDS = 30.0


class Lifecycle:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._task: asyncio.Task[None] | None = None
        self._later: dict[str, float] = {}
        """Environments that could not be paused or ended just now: when to try again."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="statefork-lifecycle")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def pause(self, held: Held, by: str) -> None:
        """Raises what `Environment.pause` raises."""
        service = self._service
        async with held.changing:
            await service.usage.sample(held)
            before, held.row.paused_by = held.row.paused_by, by
            try:
                await service.do(held, "pause", held.live.pause)
            except BaseException:
                held.row.paused_by = before
                raise
            service.usage.stopped(held)
            await service.work.run(lambda: service.records.put_environments(held.row))

    async def resume(self, held: Held) -> None:
        async with held.changing:
            await self._resume(held)

    async def wake(self, held: Held) -> None:
        """Bring back one that was paused for idleness; several callers may ask at once."""
        async with held.changing:
            if held.row.paused_by == "idle" and held.state == "paused":
                await self._resume(held)

    async def _resume(self, held: Held) -> None:
        service = self._service
        await service.do(held, "resume", held.live.resume)
        row = held.row
        row.paused_by = None
        if row.expires is None and row.ttl_seconds is not None:  # its time stood still with it, and begins anew
            row.expires = time.time() + row.ttl_seconds
        service.usage.restarted(held)
        await service.work.run(lambda: service.records.put_environments(row))

    # -- by itself ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        settings, service = self._service.settings, self._service
        sampled = swept = time.monotonic()
        while True:
            await asyncio.sleep(settings.tick_seconds)
            try:
                await self._tick()
                if time.monotonic() - sampled >= settings.sample_seconds:
                    sampled = time.monotonic()
                    await self._sample()
                if time.monotonic() - swept >= 600:
                    swept = time.monotonic()
                    before = time.time() - settings.remembered_seconds
                    await service.work.run(lambda before=before: service.records.forget_answers(before))  # type: ignore[misc]
            except Refused:
                continue  # busy: what is due is due a second later as well
            except Exception:
                log.exception("the daemon's own work failed; it goes on")

    async def _tick(self) -> None:
        now = time.time()
        for held in list(self._service.held.values()):
            if held.gone or self._later.get(held.id, 0) > now:
                continue
            self._later.pop(held.id, None)
            try:
                if held.row.expires is not None and held.row.expires <= now:
                    log.info("environment %s: its time is over", held.id)
                    await self._expire(held)
                elif self._is_idle(held, now):
                    log.info("environment %s: paused, nobody uses it", held.id)
                    await self._pause_idle(held)
            except WaypointError as error:
                self._later[held.id] = now + _RETRY_SECONDS
                log.warning("environment %s: %s", held.id, error)

    async def _expire(self, held: Held) -> None:
        if held.row.at_expiry == "delete" or held.state not in ("live", "paused"):
            await self._service.making.delete(held)
            return
        if held.state == "live":
            await self.pause(held, "idle" if held.row.at_expiry == "sleep" else "caller")
        held.row.expires = None

    def _is_idle(self, held: Held, now: float) -> bool:
        limit, since = held.row.idle_pause_seconds, held.idle_since()
        return (
            limit is not None
            and since is not None
            and now - since >= limit
            and held.state == "live"
            and held.row.pool is None
        )

    async def _pause_idle(self, held: Held) -> None:
        """A call that comes meanwhile sees `paused_by`, waits for the pause to be over, and resumes."""
        if held.idle_since() is not None:
            await self.pause(held, "idle")

    async def _sample(self) -> None:
        service = self._service
        for held in list(service.held.values()):
            if held.environment is not None:
                await service.usage.sample(held)
        rows = [held.row for held in service.held.values() if not held.gone]
        if rows:
            await service.work.run(lambda: service.records.put_environments(*rows))
