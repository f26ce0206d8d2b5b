"""Try every backend on this host, several at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from statefork.errors import UsageError, WaypointError
from statefork.model import Capabilities
from statefork.registry import Backend, backends

__all__ = ["Finding", "survey"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one backend's probe said."""

    backend: Backend
    capabilities: Capabilities | None
    why: str
    fix: str | None

    def to_json(self) -> dict[str, Any]:
        found = self.capabilities
        return {
            "backend": self.backend.name,
            "works": found is not None,
            "restores": sorted(found.restores) if found else [],
            "pause_releases_memory": found.pause_releases_memory if found else None,
            "snapshot_during_exec": found.snapshot_during_exec if found else None,
            "versions": dict(found.versions) if found else {},
            "missing": dict(found.missing) if found else {},
            "why": self.why,
            "fix": self.fix,
            "methods": [method.name for method in self.backend.methods],
        }


def survey(names: Sequence[str] = ()) -> Iterator[Finding]:
    """In the table's order. Raises UsageError for a name that no backend has."""
    known = backends()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no backend {', '.join(unknown)}; there are: {', '.join(known)}")
    chosen = [known[name] for name in names] if names else list(known.values())
    with ThreadPoolExecutor(4, thread_name_prefix="statefork-probe") as pool:
        yield from pool.map(_find, chosen)


def _find(backend: Backend) -> Finding:
    try:
        return Finding(backend, backend.probe(), "", None)
    except WaypointError as error:
        fix = error.details.get("fix")
        return Finding(backend, None, error.message, str(fix) if fix else None)
    except Exception as error:  # noqa: BLE001  another's backend may be broken: that is its finding, not our end
        return Finding(backend, None, f"its probe failed: {type(error).__name__}: {error}", None)
