"""The daemon's books in SQLite: what its next process has to know. Only this module knows SQL.

An environment is there when its row in `stands` is: that one is written by the library itself, through the ledger, at
the moment when it has answered. The row in `environments` says whose it is; without it nobody asked for it any more.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from statefork.errors import StoreError
from statefork.ledger import EnvironmentNote, SnapshotNote
from statefork.model import Snapshot

__all__ = ["CommandRow", "EnvironmentRow", "PoolRow", "Records", "TreeLedger", "TreeRow", "UsageRow"]

VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS service_meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS trees (
  id TEXT PRIMARY KEY, method TEXT NOT NULL, arguments TEXT NOT NULL, backend TEXT NOT NULL, durable INTEGER NOT NULL,
  owner TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS nodes (
  id TEXT PRIMARY KEY, tree TEXT NOT NULL, body TEXT NOT NULL, handle TEXT NOT NULL, pinned INTEGER NOT NULL DEFAULT 0) STRICT;
CREATE TABLE IF NOT EXISTS stands (id TEXT PRIMARY KEY, tree TEXT NOT NULL, body TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS environments (id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS commands (id TEXT PRIMARY KEY, environment TEXT NOT NULL, body TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS answers (
  owner TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, reference TEXT NOT NULL, status INTEGER NOT NULL,
  body BLOB NOT NULL, created REAL NOT NULL, PRIMARY KEY (owner, key)) STRICT;
CREATE TABLE IF NOT EXISTS usage (owner TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS pools (name TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
"""


@dataclass(frozen=True, slots=True)
class TreeRow:
    id: str
    method: str
    arguments: Mapping[str, Any]
    backend: str
    durable: bool
    owner: str
    """Whose first environment it was made for."""


@dataclass(slots=True)
class UsageRow:
    """What was used up to now; it only grows."""

    cpu_seconds: float = 0.0
    memory_byte_seconds: float = 0.0
    live_seconds: float = 0.0

    def add(self, other: UsageRow) -> None:
        self.cpu_seconds += other.cpu_seconds
        self.memory_byte_seconds += other.memory_byte_seconds
        self.live_seconds += other.live_seconds


@dataclass(slots=True)
class EnvironmentRow:
    """What the daemon knows of an environment beside what the library knows."""

    id: str
    tree: str
    owner: str
    method: str
    created: float
    metadata: dict[str, str] = field(default_factory=dict)
    ttl_seconds: float | None = None
    expires: float | None = None
    idle_pause_seconds: float | None = None
    used: float = 0.0
    paused_by: str | None = None
    """`caller` or `idle`."""
    at_expiry: str = "delete"
    """`delete`; `pause`; or `sleep`: paused, and the next call brings it back."""
    foreign: dict[str, Any] = field(default_factory=dict)
    """What other wire formats keep of it."""
    pool: str | None = None
    """It waits in this pool, and is nobody's."""
    lost: str | None = None
    """It ended with an earlier process of the daemon, and this is why."""
    usage: UsageRow = field(default_factory=UsageRow)
    sampled_place: str = ""
    sampled_cpu_seconds: float = 0.0
    sampled: float = 0.0
    """At the last look at what it uses: the live thing that was looked at, its CPU seconds until then, and when."""


@dataclass(frozen=True, slots=True)
class CommandRow:
    id: str
    environment: str
    kind: str
    number: int
    place: str
    """Where the number counts: the live thing that the command was started in."""
    started: float
    timeout_at: float | None = None


@dataclass(frozen=True, slots=True)
class PoolRow:
    name: str
    method: str
    arguments: dict[str, Any]
    size: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered to a request with an idempotency key; status 0: it was under way."""

    digest: str
    reference: str
    status: int
    body: bytes


class Records:
    """One connection, one lock: the writes are small, and rare beside what they write about."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        path.chmod(0o600)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        with self._write() as connection:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute("INSERT OR IGNORE INTO service_meta VALUES ('version', ?)", (str(VERSION),))
            (found,) = connection.execute("SELECT value FROM service_meta WHERE key='version'").fetchone()
        if found != str(VERSION):
            raise StoreError(
                f"{path} is of version {found}, this is a daemon for version {VERSION}; use the one that made it"
            )

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def _do(self, statement: str, *values: Any) -> None:
        with self._write() as connection:
            connection.execute(statement, values)

    # -- trees --------------------------------------------------------------------------------------------------------

    def add_tree(self, row: TreeRow) -> None:
        values = (row.id, row.method, json.dumps(row.arguments), row.backend, int(row.durable), row.owner)
        self._do("INSERT INTO trees VALUES (?,?,?,?,?,?)", *values)

    def give_tree(self, tree: str, owner: str) -> None:
        self._do("UPDATE trees SET owner=? WHERE id=?", owner, tree)

    def remove_tree(self, tree: str) -> None:
        with self._write() as connection:
            for table in ("nodes", "stands"):
                connection.execute(f"DELETE FROM {table} WHERE tree=?", (tree,))
            connection.execute("DELETE FROM trees WHERE id=?", (tree,))

    def trees(self) -> list[TreeRow]:
        found = self._rows("SELECT id, method, arguments, backend, durable, owner FROM trees ORDER BY rowid")
        return [TreeRow(row[0], row[1], json.loads(row[2]), row[3], bool(row[4]), row[5]) for row in found]

    def nodes(self, tree: str) -> list[tuple[SnapshotNote, bool]]:
        """Oldest first, each with whether it is pinned."""
        found = self._rows("SELECT body, handle, pinned FROM nodes WHERE tree=? ORDER BY rowid", tree)
        return [(SnapshotNote(_snapshot(body), json.loads(handle)), bool(pinned)) for body, handle, pinned in found]

    def pin(self, snapshot: str, pinned: bool) -> None:
        self._do("UPDATE nodes SET pinned=? WHERE id=?", int(pinned), snapshot)

    def stands(self, tree: str) -> list[EnvironmentNote]:
        found = self._rows("SELECT body FROM stands WHERE tree=? ORDER BY rowid", tree)
        return [EnvironmentNote(**json.loads(body)) for (body,) in found]

    def put_node(self, tree: str, note: SnapshotNote) -> None:
        values = (note.snapshot.id, tree, _snapshot_text(note.snapshot), json.dumps(note.handle))
        with self._write() as connection:
            connection.execute(
                "INSERT INTO nodes (id, tree, body, handle) VALUES (?,?,?,?) "
                "ON CONFLICT(id) DO UPDATE SET body=excluded.body, handle=excluded.handle",
                values,
            )
            row = connection.execute("SELECT body FROM stands WHERE id=?", (note.snapshot.environment,)).fetchone()
            if row is not None:
                body = json.dumps({**json.loads(row[0]), "latest": note.snapshot.id})
                connection.execute("UPDATE stands SET body=? WHERE id=?", (body, note.snapshot.environment))

    def rename_node(self, snapshot: Snapshot) -> None:
        self._do("UPDATE nodes SET body=? WHERE id=?", _snapshot_text(snapshot), snapshot.id)

    def remove_node(self, snapshot: str) -> None:
        self._do("DELETE FROM nodes WHERE id=?", snapshot)

    def put_stand(self, tree: str, note: EnvironmentNote) -> None:
        self._do(
            "INSERT INTO stands VALUES (?,?,?) ON CONFLICT(id) DO UPDATE SET body=excluded.body",
            note.id,
            tree,
            json.dumps(asdict(note)),
        )

    def remove_stand(self, environment: str) -> None:
        self._do("DELETE FROM stands WHERE id=?", environment)

    # -- environments -------------------------------------------------------------------------------------------------

    def put_environments(self, *rows: EnvironmentRow) -> None:
        with self._write() as connection:
            for row in rows:
                connection.execute(
                    "INSERT INTO environments VALUES (?,?) ON CONFLICT(id) DO UPDATE SET body=excluded.body",
                    (row.id, json.dumps(asdict(row))),
                )

    def remove_environment(self, row: EnvironmentRow) -> None:
        """What it used stays in its owner's books."""
        with self._write() as connection:
            connection.execute("DELETE FROM environments WHERE id=?", (row.id,))
            connection.execute("DELETE FROM commands WHERE environment=?", (row.id,))
            found = connection.execute("SELECT body FROM usage WHERE owner=?", (row.owner,)).fetchone()
            total = UsageRow(**json.loads(found[0])) if found else UsageRow()
            total.add(row.usage)
            connection.execute("REPLACE INTO usage VALUES (?,?)", (row.owner, json.dumps(asdict(total))))

    def environments(self) -> dict[str, EnvironmentRow]:
        found = {}
        for (body,) in self._rows("SELECT body FROM environments ORDER BY rowid"):
            values = json.loads(body)
            row = EnvironmentRow(**{**values, "usage": UsageRow(**values["usage"])})
            found[row.id] = row
        return found

    def past_usage(self) -> dict[str, UsageRow]:
        """By owner, of environments that are gone."""
        return {owner: UsageRow(**json.loads(body)) for owner, body in self._rows("SELECT owner, body FROM usage")}

    # -- commands -----------------------------------------------------------------------------------------------------

    def put_command(self, row: CommandRow) -> None:
        self._do("REPLACE INTO commands VALUES (?,?,?)", row.id, row.environment, json.dumps(asdict(row)))

    def remove_command(self, command: str) -> None:
        self._do("DELETE FROM commands WHERE id=?", command)

    def commands(self, environment: str) -> list[CommandRow]:
        found = self._rows("SELECT body FROM commands WHERE environment=? ORDER BY rowid", environment)
        return [CommandRow(**json.loads(body)) for (body,) in found]

    # -- idempotency --------------------------------------------------------------------------------------------------

    def begin_answer(self, owner: str, key: str, digest: str, reference: str, now: float) -> Answer | None:
        """What is known of that key; None: nothing was, and from now on it is this request's."""
        with self._write() as connection:
            row = connection.execute(
                "SELECT digest, reference, status, body FROM answers WHERE owner=? AND key=?", (owner, key)
            ).fetchone()
            if row is not None:
                return Answer(*row)
            values = (owner, key, digest, reference, 0, b"", now)
            connection.execute("INSERT INTO answers VALUES (?,?,?,?,?,?,?)", values)
            return None

    def end_answer(self, owner: str, key: str, status: int, body: bytes) -> None:
        self._do("UPDATE answers SET status=?, body=? WHERE owner=? AND key=?", status, body, owner, key)

    def drop_answer(self, owner: str, key: str) -> None:
        self._do("DELETE FROM answers WHERE owner=? AND key=?", owner, key)

    def forget_answers(self, before: float) -> None:
        self._do("DELETE FROM answers WHERE created<?", before)

    # -- pools --------------------------------------------------------------------------------------------------------

    def put_pool(self, row: PoolRow) -> None:
        self._do("REPLACE INTO pools VALUES (?,?)", row.name, json.dumps(asdict(row)))

    def remove_pool(self, name: str) -> None:
        self._do("DELETE FROM pools WHERE name=?", name)

    def pools(self) -> list[PoolRow]:
        return [PoolRow(**json.loads(body)) for (body,) in self._rows("SELECT body FROM pools ORDER BY name")]


class TreeLedger:
    """The ledger of one tree."""

    def __init__(self, records: Records, tree: str) -> None:
        self._records, self._tree = records, tree

    def snapshot(self, note: SnapshotNote) -> None:
        self._records.put_node(self._tree, note)

    def snapshot_gone(self, snapshot: str) -> None:
        self._records.remove_node(snapshot)

    def environment(self, note: EnvironmentNote) -> None:
        self._records.put_stand(self._tree, note)

    def environment_gone(self, environment: str) -> None:
        self._records.remove_stand(environment)


def _snapshot_text(snapshot: Snapshot) -> str:
    values = asdict(snapshot)
    values["created_at"] = snapshot.created_at.isoformat()
    return json.dumps(values)


def _snapshot(text: str) -> Snapshot:
    values = json.loads(text)
    lists = {f.name: tuple(values[f.name]) for f in fields(Snapshot) if isinstance(values.get(f.name), list)}
    return Snapshot(**{**values, **lists, "created_at": datetime.fromisoformat(values["created_at"])})
