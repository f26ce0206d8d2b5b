"""The verbs of a client as steps: make environments, find them, look around."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statefork.client import parsing
from statefork.client.handle import path_of
from statefork.client.parsing import EnvironmentInfo
from statefork.client.steps import Call, Request
from statefork.client.verbs import pages
from statefork.model import Snapshot

__all__ = ["backends", "create", "create_env_manager", "environment", "environments", "remove_snapshot", "snapshots"]


def create_env_manager(method: str, **arguments: Any) -> Call[EnvironmentInfo]:
    """Make or attach to an environment, as the function of the library does. Files are those of the daemon's host."""
    return (yield from create(method, arguments))


def create(
    method: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    snapshot: str | None = None,
    metadata: Mapping[str, str] | None = None,
    ttl_seconds: float | None = None,
    idle_pause_seconds: float | None = None,
) -> Call[EnvironmentInfo]:
    """The same with what only a daemon has. `snapshot` is instead of a method: the new one joins that snapshot's tree."""
    given = {
        "method": method,
        "arguments": {name: _plain(value) for name, value in (arguments or {}).items()} or None,
        "snapshot": snapshot,
        "metadata": metadata,
        "ttl_seconds": ttl_seconds,
        "idle_pause_seconds": idle_pause_seconds,
    }
    body = {name: value for name, value in given.items() if value is not None}
    answer = yield Request("POST", path_of("environments"), body=body, once=True)
    return parsing.environment_info(answer.json())


def environment(identifier: str) -> Call[EnvironmentInfo]:
    """Come back to one, by its id or a prefix that fits only one. Raises: NotFound."""
    return parsing.environment_info((yield Request("GET", path_of("environments", identifier))).json())


def environments(
    *,
    state: str | None = None,
    backend: str | None = None,
    tree: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Call[list[EnvironmentInfo]]:
    """Those that this token may see, oldest first."""
    query: dict[str, Any] = {"state": state, "backend": backend, "tree": tree}
    query["metadata"] = [f"{name}={value}" for name, value in (metadata or {}).items()]
    chosen = {name: value for name, value in query.items() if value}
    return [parsing.environment_info(one) for one in (yield from pages(path_of("environments"), **chosen))]


def snapshots() -> Call[list[Snapshot]]:
    """Of all trees, oldest first; pinned ones outlive their environments."""
    return [parsing.snapshot(one) for one in (yield from pages(path_of("snapshots")))]


def remove_snapshot(snapshot: str, *, recursive: bool = False) -> Call[None]:
    """One whose environments are gone."""
    query = {"cascade": "true" if recursive else "false"}
    yield Request("DELETE", path_of("snapshots", snapshot), query=query)


def backends() -> Call[dict[str, dict[str, list[str]]]]:
    """Each backend's methods, with the names of their arguments."""
    items = (yield Request("GET", path_of("backends"))).json()["items"]
    return {one["name"]: one["methods"] for one in items}


def _plain(value: Any) -> Any:
    """A Path is of this host; where the daemon is on another, give its own paths as text."""
    return str(value.absolute()) if isinstance(value, Path) else value
