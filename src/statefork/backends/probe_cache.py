"""Keep what a costly probe found out until the next boot, or until one of the tools that it tried changes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from statefork.home import default_home
from statefork.model import Capabilities, Capability

__all__ = ["remembered"]

_known: dict[str, Capabilities] = {}


def remembered(name: str, tools: Sequence[str], attempt: Callable[[], Capabilities]) -> Capabilities:
    """Only success is kept: what failed may have been mended since. `tools` are programs, by path or by name."""
    key = f"{name} {_identity(tools)}"
    if key not in _known:
        path = default_home() / "probes" / f"{name}.json"
        found = _load(path, key)
        if found is None:
            found = attempt()
            _save(path, key, found)
        _known[key] = found
    return _known[key]


def _identity(tools: Sequence[str]) -> str:
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.uname().release]
    for tool in tools:
        path = shutil.which(tool)
        if path is None:
            parts.append(f"{tool}:none")
            continue
        facts = Path(path).stat()
        parts.append(f"{path}:{facts.st_ino}:{facts.st_size}:{facts.st_mtime_ns}")
    return " ".join(parts)


def _load(path: Path, key: str) -> Capabilities | None:
    try:
        saved = json.loads(path.read_text())
        if saved["key"] != key:
            return None
        return Capabilities(
            backend=saved["backend"],
            restores=frozenset(Capability(word) for word in saved["restores"]),
            pause_releases_memory=saved["pause_releases_memory"],
            snapshot_during_exec=saved["snapshot_during_exec"],
            versions=saved["versions"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save(path: Path, key: str, found: Capabilities) -> None:
    row = {
        "key": key,
        "backend": found.backend,
        "restores": sorted(found.restores),
        "pause_releases_memory": found.pause_releases_memory,
        "snapshot_during_exec": found.snapshot_during_exec,
        "versions": dict(found.versions),
    }
    with contextlib.suppress(OSError):  # the next one tries it again, nothing is wrong
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        fresh.write_text(json.dumps(row))
        fresh.replace(path)
