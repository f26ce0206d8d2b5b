"""Environments come and go: made, forked, given out of a pool, deleted."""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from statefork.environment import Environment
from statefork.errors import UsageError, WaypointError
from statefork.family import Family
from statefork.home import give_up, new_tree
from statefork.model import ForkFailure
from statefork.registry import find_method
from statefork.server.guard.limits import check_environments
from statefork.server.guard.principal import Principal
from statefork.server.guard.problems import Refused
from statefork.server.service.held import Held
from statefork.server.service.records import EnvironmentRow, TreeLedger, TreeRow
from statefork.tree import mint

if TYPE_CHECKING:
    from statefork.server.service.service import Service, Tree

__all__ = ["Making", "Terms", "Wanted"]

log = logging.getLogger(__name__)

SAFE_ARGUMENTS = frozenset({"network", "memory", "cpus", "pids", "env", "user", "workdir", "base_image", "dockerfile"})
"""What a token without admin may say. The others name files or options of the host, and could show or change it."""
HOST_ROOT_METHODS = frozenset({"waypoint_build", "ckpt_build"})


@dataclass(frozen=True, slots=True)
class Terms:
    """How long it stays, and what its owner writes on it."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    ttl_seconds: float | None = None
    idle_pause_seconds: float | None = None
    at_expiry: str = "delete"
    foreign: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wanted:
    method: str
    arguments: Mapping[str, Any]
    trusted: bool = False
    """The daemon's owner wrote these arguments, not the caller."""


class Making:
    def __init__(self, service: Service) -> None:
        self._service = service

    # -- new ones -----------------------------------------------------------------------------------------------------

    async def create(self, principal: Principal, wanted: Wanted, terms: Terms, identifier: str) -> Held:
        service = self._service
        check_environments(principal, service.owned(principal))
        _permit(principal, wanted, bool(service.settings.open_host_root))
        pooled = service.pools.take(wanted)
        if pooled is not None:
            self._give(pooled, principal.token_id, terms)
            service.usage.restarted(pooled)
            row = pooled.row
            service.trees[row.tree].owner = principal.token_id
            await service.work.run(lambda: self._record_gift(row))
            return pooled
        return await self.make(wanted, terms, owner=principal.token_id, identifier=identifier)

    async def make(self, wanted: Wanted, terms: Terms, *, owner: str, identifier: str, pool: str | None = None) -> Held:
        service = self._service
        began, outcome, backend = time.perf_counter(), "ok", "none"
        row = self._row(identifier, new_tree(), owner, wanted.method, terms)
        row.pool = pool
        try:
            environment = await service.work.run(lambda: self._start(wanted, row))
            backend = environment.backend
        except WaypointError as error:
            outcome = error.code
            raise
        finally:
            service.guard.metrics.operation(backend, "create", outcome, time.perf_counter() - began)
        return self._hold(row, environment)

    def _start(self, wanted: Wanted, row: EnvironmentRow) -> Environment:
        """On a thread. The rows are written in the order in which a killed daemon's successor can make sense of them."""
        settings, records = self._service.settings, self._service.records
        method = find_method(wanted.method)
        arguments = self._with_context(wanted.arguments)
        try:
            driver = method.driver(arguments)
        except (TypeError, ValueError, AttributeError) as error:  # JSON has more kinds of values than arguments take
            raise UsageError(f"{wanted.method}: {error}; {method.signature}") from error
        records.add_tree(TreeRow(row.tree, wanted.method, dict(arguments), driver.name, driver.durable, row.owner))
        try:
            family = Family(
                driver,
                settings.home,
                ledger=TreeLedger(records, row.tree),
                tree=row.tree,
                most_history=settings.history,
            )
            environment = Environment.create(driver, attach=method.attach, identifier=row.id, family=family)
        except BaseException:
            records.remove_tree(row.tree)
            raise
        records.put_environments(row)
        return environment

    def _with_context(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """A Dockerfile that came as text gets a directory, by its content: the same text is built once."""
        given = dict(arguments)
        text = given.pop("dockerfile", None)
        if text is None:
            return given
        if not isinstance(text, str) or given.get("dockerfile_dir"):
            raise UsageError("dockerfile is the text of a Dockerfile, instead of dockerfile_dir")
        directory = self._service.settings.directory / "contexts" / hashlib.sha256(text.encode()).hexdigest()[:24]
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (directory / "Dockerfile").write_text(text)
        return {**given, "dockerfile_dir": str(directory)}

    # -- forks --------------------------------------------------------------------------------------------------------

    async def fork(
        self,
        principal: Principal,
        held: Held,
        n: int,
        terms: Terms,
        *,
        from_snapshot: str | None,
        return_errors: bool,
    ) -> tuple[str, list[Held | WaypointError]]:
        """The snapshot that they came from, and for each the environment or, if asked for, why there is none."""
        service = self._service
        check_environments(principal, service.owned(principal), n)
        async with service.use(held, awake=from_snapshot is None) as environment:

            def call() -> list[Environment | ForkFailure]:
                return environment.fork(n, from_snapshot=from_snapshot, return_errors=True)

            made = await service.do(held, "fork", call)
        failures = [one.error for one in made if isinstance(one, ForkFailure)]
        forks = [one for one in made if isinstance(one, Environment)]
        if failures and not return_errors:
            for fork in forks:
                await service.work.run(fork.destroy)
            raise failures[0]
        origin = forks[0].family.tree.stands(forks[0].id)[0] if forks else from_snapshot
        found = await self._adopted_forks(forks, held.row.tree, principal, held.row.method, terms)
        rest = iter(found)
        results: list[Held | WaypointError] = []
        for one in made:
            if isinstance(one, ForkFailure):
                results.append(one.error if isinstance(one.error, WaypointError) else WaypointError(str(one.error)))
            else:
                results.append(next(rest))
        return origin or "", results

    async def from_snapshot(
        self, principal: Principal, tree: Tree, snapshot: str, terms: Terms, identifier: str
    ) -> Held:
        """One new environment from a stored state, whether or not anything of its tree still lives."""
        service = self._service
        check_environments(principal, service.owned(principal))
        node = tree.family.tree.find(snapshot)
        environment = await service.work.run(lambda: Environment.from_node(tree.family, node, identifier))
        service.trees.setdefault(tree.key, tree)  # its last environment may have left meanwhile
        (held,) = await self._adopted_forks([environment], tree.key, principal, tree.method, terms)
        return held

    async def _adopted_forks(
        self, forks: list[Environment], tree: str, principal: Principal, method: str, terms: Terms
    ) -> list[Held]:
        rows = [self._row(one.id, tree, principal.token_id, method, terms) for one in forks]
        await self._service.work.run(lambda: self._service.records.put_environments(*rows))
        return [self._hold(row, one) for row, one in zip(rows, forks, strict=True)]

    # -- the end ------------------------------------------------------------------------------------------------------

    async def delete(self, held: Held) -> None:
        service = self._service
        async with held.changing:
            if held.gone:
                return
            await service.usage.sample(held)
            held.gone = True
        try:
            if held.environment is not None:
                await service.do(held, "delete", held.environment.destroy)
        finally:
            await service.work.run(lambda: service.records.remove_environment(held.row))
            service.held.pop(held.id, None)
            service.usage.stopped(held)
            await self.close_tree(held.row.tree)

    async def close_tree(self, key: str) -> None:
        """Forget a tree that nobody needs any more; its snapshots went with its last environment, or go now."""
        service = self._service
        tree = service.trees.get(key)
        inhabited = any(held.row.tree == key for held in service.held.values())
        if inhabited or (tree is not None and tree.family.tree.needed):
            return
        service.trees.pop(key, None)

        def close() -> None:
            if tree is None:  # it could not be taken over: from now on it is for `statefork gc`
                give_up(service.settings.home, key)
            elif not tree.family.closed:
                for problem in tree.family.close():
                    log.warning("tree %s: %s", key, problem)
            service.records.remove_tree(key)

        await service.work.run(close)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _row(self, identifier: str, tree: str, owner: str, method: str, terms: Terms) -> EnvironmentRow:
        now, settings = time.time(), self._service.settings
        ttl = settings.ttl_seconds if terms.ttl_seconds is None else terms.ttl_seconds
        idle = settings.idle_pause_seconds if terms.idle_pause_seconds is None else terms.idle_pause_seconds
        return EnvironmentRow(
            id=identifier,
            tree=tree,
            owner=owner,
            method=method,
            created=now,
            metadata=dict(terms.metadata),
            ttl_seconds=ttl,
            expires=now + ttl if ttl is not None else None,
            idle_pause_seconds=idle,
            used=now,
            at_expiry=terms.at_expiry,
            foreign=copy.deepcopy(dict(terms.foreign)),
        )

    def _give(self, held: Held, owner: str, terms: Terms) -> None:
        fresh = self._row(held.id, held.row.tree, owner, held.row.method, terms)
        held.row = fresh

    def _record_gift(self, row: EnvironmentRow) -> None:
        self._service.records.give_tree(row.tree, row.owner)
        self._service.records.put_environments(row)

    def _hold(self, row: EnvironmentRow, environment: Environment) -> Held:
        from statefork.server.service.service import Tree

        service = self._service
        held = Held(row, environment, environment.backend)
        service.usage.restarted(held)
        service.held[row.id] = held
        if row.tree not in service.trees:
            service.trees[row.tree] = Tree(row.tree, environment.family, row.owner, row.method)
        return held


def _permit(principal: Principal, wanted: Wanted, open_host_root: bool) -> None:
    if principal.may("admin") or wanted.trusted:
        return
    risky = sorted(set(wanted.arguments) - SAFE_ARGUMENTS)
    if not wanted.method.endswith("_build"):
        risky.append(wanted.method)
    if wanted.arguments.get("network") == "host":
        risky.append("network=host")
    if wanted.method in HOST_ROOT_METHODS and not wanted.arguments.get("dockerfile") and not open_host_root:
        risky.append("the host's own root (no dockerfile)")  # all that is on it could be read
    if risky:
        raise Refused(
            403,
            "forbidden",
            f"{', '.join(risky)} would reach into the host and needs the scope admin; without it an environment is made "
            f"with a *_build method and any of {', '.join(sorted(SAFE_ARGUMENTS))}",
            scope="admin",
        )


def new_identifier() -> str:
    return mint("e")
