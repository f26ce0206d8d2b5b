"""After a restart, or a kill -9: find again what an earlier process of the daemon looked after (docs/decisions/daemon.md).

On durable backends nothing ended with it. What it was in the middle of making is removed, what it had told of is taken
over, running commands are followed on. On the others everything ended with it: their environments are listed as lost, with
the reason, until their owner deletes them; what is left of them on this host is swept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from statefork.environment import Environment
from statefork.errors import WaypointError
from statefork.family import Family
from statefork.registry import find_method
from statefork.server.service.held import Held
from statefork.server.service.records import EnvironmentRow, TreeLedger, TreeRow

if TYPE_CHECKING:
    from statefork.server.service.service import Service

__all__ = ["adopt_all"]

log = logging.getLogger(__name__)


async def adopt_all(service: Service) -> None:
    rows = await service.work.run(service.records.environments)
    turn = asyncio.Semaphore(service.settings.work_slots)

    async def adopt(tree: TreeRow) -> None:
        async with turn:
            await _adopt_tree(service, tree, {key: row for key, row in rows.items() if row.tree == tree.id})

    await asyncio.gather(*map(adopt, await service.work.run(service.records.trees)))
    await service.work.run(lambda: _sweep_lost(service))


async def _adopt_tree(service: Service, tree: TreeRow, rows: dict[str, EnvironmentRow]) -> None:
    try:
        family, found = await service.work.run(lambda: _adopt(service, tree, rows))
    except WaypointError as error:
        log.error("tree %s of %s cannot be taken over: %s", tree.id, tree.backend, error)
        await _lose(service, tree, rows, f"the daemon could not take it over: {error.message}")
        return
    if family is None:
        why = f"{tree.backend} environments live and die with the daemon's process, and that ended"
        await _lose(service, tree, rows, why)
        return
    await _take_in(service, tree, family, rows, found)


def _adopt(
    service: Service, tree: TreeRow, rows: dict[str, EnvironmentRow]
) -> tuple[Family | None, dict[str, Environment]]:
    """On a thread."""
    if not tree.durable:
        return None, {}
    settings, records = service.settings, service.records
    driver = find_method(tree.method).driver(tree.arguments)
    ledger = TreeLedger(records, tree.id)
    family = Family(driver, settings.home, ledger=ledger, tree=tree.id, most_history=settings.history)
    notes = records.stands(tree.id)
    nodes = records.nodes(tree.id)
    known = {note.place for note in notes if note.place} | {note.snapshot.id for note, _ in nodes}
    for name in family.clear_strays(known):
        log.warning("tree %s: removed %s, which an earlier process was making when it ended", tree.id, name)
    for note, pinned in nodes:
        family.recall(note)
        if pinned:
            family.tree.pin(note.snapshot.id, True)
    found: dict[str, Environment] = {}
    for standing in notes:
        environment = Environment.adopt(family, standing)
        if standing.id in rows:
            found[standing.id] = environment
        else:  # a fork that nobody was told of any more
            environment.destroy()
    return family, found


async def _take_in(
    service: Service, tree: TreeRow, family: Family, rows: dict[str, EnvironmentRow], found: dict[str, Environment]
) -> None:
    from statefork.server.service.service import Tree

    if not family.closed:
        service.trees[tree.id] = Tree(tree.id, family, tree.owner, tree.method)
    for key, row in rows.items():
        if key not in found:  # deleted, but for the last line of it
            await service.work.run(lambda row=row: service.records.remove_environment(row))  # type: ignore[misc]
            continue
        held = Held(row, found[key], tree.backend)
        if row.sampled_place != found[key].place or held.state != "live":
            service.usage.restarted(held)  # else it was live all the time, and is counted on
        row.used, row.lost = time.time(), None
        if row.paused_by and held.state != "paused":
            row.paused_by = None
        elif held.state == "paused" and not row.paused_by:
            row.paused_by = "idle"  # it was being paused, and nobody had asked for it by name
        service.held[key] = held
        if held.lost:
            log.warning("environment %s is lost: %s", key, held.lost)
        await service.running.adopt(held)
    await service.making.close_tree(tree.id)


async def _lose(service: Service, tree: TreeRow, rows: dict[str, EnvironmentRow], why: str) -> None:
    for row in rows.values():
        if row.pool is not None:
            await service.work.run(lambda row=row: service.records.remove_environment(row))  # type: ignore[misc]
            continue
        row.lost = row.lost or why
        service.held[row.id] = Held(row, None, tree.backend)
        log.warning("environment %s is lost: %s", row.id, row.lost)
    await service.work.run(lambda: service.records.put_environments(*rows.values()) if rows else None)
    await service.making.close_tree(tree.id)


def _sweep_lost(service: Service) -> None:
    """What the trees of other backends left on this host. Trees that are kept, or have an owner, are not touched."""
    from statefork.home import collect
    from statefork.registry import backends

    lost = {held.backend for held in service.held.values() if held.environment is None}
    drivers = [backend.driver for name, backend in backends().items() if name in lost]
    if not drivers:
        return
    try:
        for line in collect(service.settings.home, drivers):
            log.info("swept %s", line)
    except (WaypointError, OSError) as error:
        log.warning("sweeping what was lost: %s", error)
