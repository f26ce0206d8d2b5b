"""A few clients for a few seconds; the real figure (200 for two minutes) is `python tests/load.py`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from daemon import running
from load import load


@pytest.mark.timeout(180)
def test_many_clients_at_once(tmp_path: Path) -> None:
    clients, seconds = int(os.environ.get("LOAD_CLIENTS", "12")), float(os.environ.get("LOAD_SECONDS", "6"))
    with running(tmp_path / "h") as daemon:
        report = asyncio.run(load(daemon, clients, seconds))
        assert report.errors == [], str(report)
        assert {"exec", "snapshot", "fork", "delete"} <= set(report.counts), str(report)
