"""Idempotency keys: the same request sent twice is done once, and answered twice.

The key belongs to the token that sent it. While the first is under way the second waits for it; afterwards it gets the same
answer, for a day. Only success is remembered: what failed may be tried again with the same key. A request that was under
way when the daemon died is found again by the id that it was to get (`reference`), where what it made is still there.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from statefork.server.guard.principal import Principal
from statefork.server.guard.problems import Refused

if TYPE_CHECKING:
    from statefork.server.service.service import Service

__all__ = ["Answers", "Reply"]

Reply = tuple[int, bytes]
"""Status and body."""

MOST_BODY_BYTES = 8 << 20


class Answers:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._under_way: dict[tuple[str, str], tuple[str, asyncio.Future[Reply]]] = {}

    async def once(
        self,
        principal: Principal,
        key: str | None,
        request: bytes,
        reference: str,
        do: Callable[[str], Awaitable[Reply]],
        again: Callable[[str], Awaitable[Reply | None]] | None = None,
    ) -> tuple[Reply, bool]:
        """`do(reference)`, unless it has been done; and whether it had been. `again` finds what an earlier process made."""
        if key is None:
            return await do(reference), False
        digest = hashlib.sha256(request).hexdigest()
        name = (principal.token_id, key)
        waiting = self._under_way.get(name)
        if waiting is not None:
            _same(waiting[0], digest, key)
            return await asyncio.shield(waiting[1]), True
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._under_way[name] = (digest, future)
        try:
            reply, replayed = await self._first(name, digest, reference, do, again)
            future.set_result(reply)
            return reply, replayed
        except BaseException as error:
            if not future.done():
                future.set_exception(error if isinstance(error, Exception) else _interrupted())
                future.exception()  # nobody may be waiting
            raise
        finally:
            self._under_way.pop(name, None)

    async def _first(
        self,
        name: tuple[str, str],
        digest: str,
        reference: str,
        do: Callable[[str], Awaitable[Reply]],
        again: Callable[[str], Awaitable[Reply | None]] | None,
    ) -> tuple[Reply, bool]:
        records, run = self._service.records, self._service.commands.run
        known = await run(lambda: records.begin_answer(*name, digest, reference, time.time()))
        if known is not None:
            _same(known.digest, digest, name[1])
            if known.status:
                return (known.status, known.body), True
            found = await again(known.reference) if again is not None else None
            if found is not None:
                await run(lambda: records.end_answer(*name, *found))
                return found, True
            await run(lambda: records.drop_answer(*name))
            await run(lambda: records.begin_answer(*name, digest, reference, time.time()))
        try:
            reply = await do(reference)
        except BaseException:
            if not self._service.ending:
                await run(lambda: records.drop_answer(*name))
            raise
        if len(reply[1]) <= MOST_BODY_BYTES:
            await run(lambda: records.end_answer(*name, *reply))
        else:
            await run(lambda: records.drop_answer(*name))
        return reply, False


def _same(known: str, digest: str, key: str) -> None:
    if known != digest:
        raise Refused(
            422, "idempotency_key_reused", f"the key {key!r} was used for another request; use a new key for each"
        )


def _interrupted() -> Refused:
    return Refused(503, "interrupted", "the first request with this key was interrupted; send it again", retry_after=1)
