"""What a sandbox is made from: a snapshot, a template that the daemon's owner put down, or `base`.

Templates are `<home>/templates/NAME/Dockerfile` (with what it copies beside it), or `<home>/templates/NAME.json` with a
`method` and `arguments` as in `POST /v1/environments`. Without one of that name, `base` is the host's own root, copy-on-write.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from statefork.errors import NotFound, StoreError
from statefork.server.guard.principal import Principal
from statefork.server.service.making import Wanted
from statefork.server.service.service import Service, Tree
from statefork.tree import Node

__all__ = ["Snapshotted", "find_template", "pinned_snapshot", "template_names"]

BASE = "base"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

Snapshotted = tuple[Tree, Node]


def find_template(service: Service, principal: Principal, name: str) -> Wanted | Snapshotted:
    """Raises: NotFound."""
    wanted = _written_down(service.settings.home / "templates", name)
    if wanted is not None:
        return wanted
    found = pinned_snapshot(service, principal, name)
    if found is not None:
        return found
    if name == BASE:
        return Wanted("waypoint_build", {})
    raise NotFound(f"template '{name}' not found; there are: {', '.join(template_names(service))}, and your snapshots")


def pinned_snapshot(service: Service, principal: Principal, reference: str) -> Snapshotted | None:
    """By id or name, among those that were made to stay."""
    for tree in service.trees_seen_by(principal):
        for snapshot in tree.family.tree.snapshots():
            if reference in (snapshot.id, snapshot.name) and tree.family.tree.is_pinned(snapshot.id):
                return tree, tree.family.tree.find(snapshot.id)
    return None


def template_names(service: Service) -> list[str]:
    directory = service.settings.home / "templates"
    found = {path.stem for path in directory.glob("*.json")} | {
        path.parent.name for path in directory.glob("*/Dockerfile")
    }
    return sorted(found | {BASE})


def _written_down(directory: Path, name: str) -> Wanted | None:
    if not _NAME.fullmatch(name):
        return None
    if (directory / name / "Dockerfile").is_file():
        return Wanted("waypoint_build", {"dockerfile_dir": str(directory / name)}, trusted=True)
    path = directory / f"{name}.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
        return Wanted(str(values["method"]), dict(values.get("arguments", {})), trusted=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"template {path} cannot be read: {error!r}") from error
