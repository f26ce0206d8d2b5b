"""Environments and snapshots in E2B's words."""

from __future__ import annotations

import os
import shutil
from typing import Any

from statefork.errors import NotFound
from statefork.server.foreign.e2b.access import Access
from statefork.server.guard.principal import Principal
from statefork.server.routes.asking import moment
from statefork.server.service.held import Held
from statefork.server.service.service import Service

__all__ = ["ENVD_VERSION", "given", "sandbox_detail", "sandbox_document", "shown"]

ENVD_VERSION = "0.6.1"
"""The envd whose ways are followed here: 0.6.2 began to keep metadata of files, which is not done."""
_NEVER_SECONDS = 10 * 365 * 86400


def given(held: Held) -> dict[str, Any]:
    """What the sandbox was made with."""
    found: dict[str, Any] = held.row.foreign.get("e2b", {})
    return found


def shown(service: Service, principal: Principal, identifier: str) -> Held:
    """Only by its whole id. Raises: NotFound, for those too whose processes are gone."""
    held = service.held.get(identifier)
    if held is None or held.gone or held.lost or held.row.pool or not principal.sees(held.row.owner, held.id):
        raise NotFound(f"sandbox {identifier} not found")
    return held


def sandbox_document(held: Held, access: Access, principal: Principal) -> dict[str, Any]:
    return {
        "templateID": given(held).get("template", held.row.method),
        "sandboxID": held.id,
        "clientID": "statefork",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": access.key(held.id, principal),
        "domain": None,
        "trafficAccessToken": None,
    }


def sandbox_detail(held: Held, service: Service) -> dict[str, Any]:
    row = held.row
    disk = shutil.disk_usage(service.settings.home)
    expiry = row.expires if row.expires is not None else row.created + _NEVER_SECONDS
    template = given(held).get("template", row.method)
    return {
        "templateID": template,
        "alias": template,
        "sandboxID": held.id,
        "clientID": "statefork",
        "startedAt": moment(row.created),
        "endAt": moment(expiry),
        "envdVersion": ENVD_VERSION,
        "cpuCount": os.cpu_count() or 1,
        "memoryMB": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "diskSizeMB": disk.total >> 20,
        "metadata": row.metadata,
        "state": "paused" if held.state == "paused" else "running",
        "lifecycle": {
            "onTimeout": "kill" if row.at_expiry == "delete" else "pause",
            "autoResume": row.at_expiry == "sleep",
        },
    }
