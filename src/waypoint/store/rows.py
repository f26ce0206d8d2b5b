"""Rows and the records that they hold. Nested parts are JSON columns."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from waypoint.model import BaseRecord, Capture, Limits, SessionRecord, SnapshotRecord, Spec, StartState

__all__ = [
    "SESSION_COLUMNS",
    "SNAPSHOT_COLUMNS",
    "manifest_text",
    "session_row",
    "snapshot_row",
    "spec_text",
    "to_base",
    "to_session",
    "to_snapshot",
]

SNAPSHOT_COLUMNS = [
    "id",
    "name",
    "parent",
    "tree",
    "session",
    "base",
    "spec",
    "layers",
    "full",
    "created",
    "duration_ms",
    "paused_ms",
    "files_bytes",
    "memory_bytes",
    "capture",
    "manifest",
    "pinned",
    "shares",
]
SESSION_COLUMNS = [
    "id",
    "name",
    "state",
    "tree",
    "base",
    "spec",
    "snapshot",
    "layers",
    "upper",
    "init_pid",
    "init_start",
    "boot",
    "created",
    "epoch",
    "undo",
    "pause",
]


@lru_cache(256)
def spec_text(spec: Spec) -> str:
    return json.dumps(asdict(spec))


@lru_cache(256)
def _spec(text: str) -> Spec:
    """Read for every command; nearly always the same few."""
    read = json.loads(text)
    read["limits"] = Limits(**read["limits"])
    read["start"] = _start(read["start"])
    read["capabilities"] = tuple(read["capabilities"])
    return Spec(**read)


@lru_cache(32)
def _manifest(text: str) -> dict[str, Any]:
    """Nobody changes what was read."""
    read: dict[str, Any] = json.loads(text)
    return read


def _start(read: dict[str, Any]) -> StartState:
    return StartState(
        env=tuple((key, value) for key, value in read["env"]),
        workdir=read["workdir"],
        user=read["user"],
        argv=tuple(read["argv"]),
    )


def to_base(row: sqlite3.Row) -> BaseRecord:
    return BaseRecord(
        id=row["id"],
        kind=row["kind"],
        source=row["source"],
        layers=tuple(json.loads(row["layers"])),
        start=_start(json.loads(row["start"])),
        digest=row["digest"],
        flat=bool(row["flat"]),
        notes=tuple(json.loads(row["notes"])),
    )


def session_row(record: SessionRecord) -> list[Any]:
    values = {name: getattr(record, name) for name in SESSION_COLUMNS}
    values["spec"] = spec_text(record.spec)
    values["layers"] = json.dumps(record.layers)
    return list(values.values())


def to_session(row: sqlite3.Row) -> SessionRecord:
    values = dict(row)
    values["spec"] = _spec(values["spec"])
    values["layers"] = tuple(json.loads(values["layers"]))
    return SessionRecord(**values)


def manifest_text(record: SnapshotRecord) -> str:
    return json.dumps(record.manifest)


def snapshot_row(record: SnapshotRecord, manifest: str | None = None) -> list[Any]:
    values = {name: getattr(record, name) for name in SNAPSHOT_COLUMNS}
    values["spec"] = spec_text(record.spec)
    values["layers"] = json.dumps(record.layers)
    values["capture"] = json.dumps(asdict(record.capture))
    values["manifest"] = manifest_text(record) if manifest is None else manifest
    values["full"] = int(record.full)
    values["pinned"] = int(record.pinned)
    return list(values.values())


def to_snapshot(row: sqlite3.Row) -> SnapshotRecord:
    values = dict(row)
    values["spec"] = _spec(values["spec"])
    values["layers"] = tuple(json.loads(values["layers"]))
    capture = json.loads(values["capture"])
    values["capture"] = Capture(tuple(capture["captured"]), tuple(capture["not_captured"]))
    values["manifest"] = _manifest(values["manifest"])
    values["full"] = bool(values["full"])
    values["pinned"] = bool(values["pinned"])
    return SnapshotRecord(**values)
