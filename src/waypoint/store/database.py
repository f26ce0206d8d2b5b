"""The tree in SQLite. A snapshot, session or base exists when its row commits; what no row names is garbage.

Only this module knows SQL. Rows are the model's dataclasses (rows.py).
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from waypoint.errors import DiskFull, Exists, NotFound, StoreError, WrongState
from waypoint.model import BaseRecord, Process, SessionRecord, SnapshotRecord
from waypoint.store.find import FORMAT_VERSION, find_rows
from waypoint.store.reserve import Reserve
from waypoint.store.rows import (
    SESSION_COLUMNS,
    SNAPSHOT_COLUMNS,
    session_row,
    snapshot_row,
    spec_text,
    to_base,
    to_session,
    to_snapshot,
)

__all__ = ["FORMAT_VERSION", "Database"]

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE bases (
  id TEXT PRIMARY KEY, kind TEXT NOT NULL, source TEXT NOT NULL, layers TEXT NOT NULL, start TEXT NOT NULL,
  digest TEXT NOT NULL, flat INTEGER NOT NULL, notes TEXT NOT NULL, name TEXT UNIQUE) STRICT;
CREATE TABLE layers (id INTEGER PRIMARY KEY AUTOINCREMENT, purpose TEXT NOT NULL) STRICT;
CREATE TABLE snapshots (
  id TEXT PRIMARY KEY, name TEXT, parent TEXT REFERENCES snapshots(id), tree TEXT NOT NULL, session TEXT NOT NULL,
  base TEXT NOT NULL REFERENCES bases(id), spec TEXT NOT NULL, layers TEXT NOT NULL, full INTEGER NOT NULL,
  created REAL NOT NULL, duration_ms REAL NOT NULL, paused_ms REAL NOT NULL, files_bytes INTEGER NOT NULL,
  memory_bytes INTEGER NOT NULL, capture TEXT NOT NULL, manifest TEXT NOT NULL, pinned INTEGER NOT NULL,
  shares TEXT) STRICT;
CREATE INDEX snapshot_images ON snapshots(shares) WHERE shares IS NOT NULL;
CREATE UNIQUE INDEX snapshot_names ON snapshots(tree, name) WHERE name IS NOT NULL;
CREATE TABLE sessions (
  id TEXT PRIMARY KEY, name TEXT UNIQUE, state TEXT NOT NULL, tree TEXT NOT NULL, base TEXT NOT NULL REFERENCES bases(id),
  spec TEXT NOT NULL, snapshot TEXT REFERENCES snapshots(id), layers TEXT NOT NULL, upper INTEGER, init_pid INTEGER NOT NULL,
  init_start INTEGER NOT NULL, boot TEXT NOT NULL, created REAL NOT NULL,
  epoch INTEGER NOT NULL, undo TEXT, pause TEXT REFERENCES snapshots(id)) STRICT;
CREATE TABLE endings (session TEXT PRIMARY KEY, snapshot TEXT NOT NULL, frozen_ns INTEGER NOT NULL) STRICT;
"""

_PRESENT = "(SELECT id FROM snapshots WHERE id=?)"
"""A snapshot's id, or NULL if it has been removed meanwhile."""

@dataclass(frozen=True, slots=True)
class Ending:
    snapshot: str
    frozen_ns: int


class Database:
    """One connection per thread; write transactions are immediate, so writers queue instead of failing half-way."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        self._reserve = Reserve(path.with_name("reserve"))
        self._create_or_check()
        self._reserve.keep()

    # -- connections ------------------------------------------------------------------------------------------------

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            try:
                connection = self._connect()
            except sqlite3.OperationalError:
                if not self._reserve.spend():
                    raise
                connection = self._connect()
            self._local.connection = connection
        return connection

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=30, isolation_level=None)
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()  # needs its files, and so their space, from here on
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Closes the calling thread's connection."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None

    @contextmanager
    def write(self, *, must: bool = False) -> Iterator[sqlite3.Connection]:
        """One transaction. `must`: it frees space or completes what is done already; it may have the store's reserve."""
        connection = self._connection()
        if must and self._reserve.spend():
            with suppress(sqlite3.OperationalError):  # there may be space for the row all the same
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")  # the log can begin anew then, in the space that it has
        try:
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:  # a full disk may have ended it already
                    connection.execute("ROLLBACK")
            if must:
                self._reserve.keep()
        except sqlite3.OperationalError as error:
            if "full" in str(error):
                raise DiskFull(f"the store's disk is full; nothing was changed: {error}") from error
            raise StoreError(f"the store's database refuses: {error}") from error

    def _create_or_check(self) -> None:
        try:
            with self.write() as connection:
                if connection.execute("SELECT 1 FROM sqlite_master WHERE name='meta'").fetchone() is None:
                    for statement in _SCHEMA.split(";"):
                        connection.execute(statement)
                    connection.execute("INSERT INTO meta VALUES ('format', ?)", (str(FORMAT_VERSION),))
                    connection.execute("INSERT INTO meta VALUES ('id', lower(hex(randomblob(4))))")
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self._path} is not a Waypoint store: {error}") from error
        version = self.meta("format")
        if version != str(FORMAT_VERSION):
            raise StoreError(
                f"{self._path.parent} has store format {version}; this version of Waypoint knows {FORMAT_VERSION} only. "
                "Use the version that wrote it, or another WAYPOINT_HOME",
                format=version,
            )

    def meta(self, key: str) -> str | None:
        row = self._connection().execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        with self.write() as connection:
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    # -- layers -----------------------------------------------------------------------------------------------------

    def new_layers(self, purpose: str, n: int) -> list[int]:
        with self.write() as connection:
            cursors = [connection.execute("INSERT INTO layers(purpose) VALUES (?)", (purpose,)) for _ in range(n)]
            return [cursor.lastrowid for cursor in cursors if cursor.lastrowid is not None]

    def forget_layers(self, layers: list[int]) -> None:
        with self.write(must=True) as connection:
            connection.executemany("DELETE FROM layers WHERE id=?", [(layer,) for layer in layers])

    def name_layer(self, layer: int, purpose: str) -> None:
        """From now on the layer is found by its purpose, and kept."""
        with self.write() as connection:
            connection.execute("UPDATE layers SET purpose=? WHERE id=?", (purpose, layer))

    def find_layer(self, purpose: str) -> int | None:
        row = self._connection().execute("SELECT id FROM layers WHERE purpose=?", (purpose,)).fetchone()
        return None if row is None else int(row[0])

    def layers(self) -> list[int]:
        return [int(row[0]) for row in self._connection().execute("SELECT id FROM layers")]

    def layers_in_use(self) -> set[int]:
        rows = self._connection().execute("SELECT id FROM layers WHERE purpose GLOB 'guest*:*'")
        used = {int(row[0]) for row in rows}
        for row in self._connection().execute("SELECT layers, upper FROM sessions"):
            used |= set(json.loads(row["layers"]))
            if row["upper"] is not None:
                used.add(row["upper"])
        for row in self._connection().execute("SELECT layers FROM snapshots"):
            used |= set(json.loads(row["layers"]))
        return used

    def image_in_use(self, image: str) -> bool:
        query = "SELECT 1 FROM snapshots WHERE full AND (id=? OR shares=?) LIMIT 1"
        return self._connection().execute(query, (image, image)).fetchone() is not None

    # -- bases ------------------------------------------------------------------------------------------------------

    def add_base(self, base: BaseRecord, name: str | None = None) -> None:
        with self.write() as connection:
            connection.execute("UPDATE bases SET name=NULL WHERE name=? AND id<>?", (name, base.id))
            connection.execute(
                "INSERT OR IGNORE INTO bases VALUES (?,?,?,?,?,?,?,?,?)",
                (
                    base.id, base.kind, base.source, json.dumps(base.layers), json.dumps(asdict(base.start)), base.digest,
                    int(base.flat), json.dumps(base.notes), name,
                ),
            )  # fmt: skip

    def name_base(self, base: str, name: str) -> None:
        """The name moves: like an image's tag, it says which one is meant now."""
        with self.write() as connection:
            connection.execute("UPDATE bases SET name=NULL WHERE name=?", (name,))
            connection.execute("UPDATE bases SET name=? WHERE id=?", (name, base))

    def base(self, base: str) -> BaseRecord:
        row = self._connection().execute("SELECT * FROM bases WHERE id=? OR name=?", (base, base)).fetchone()
        if row is None:
            raise NotFound(f"no base {base}", base=base)
        return to_base(row)

    def bases(self) -> list[BaseRecord]:
        return [to_base(row) for row in self._connection().execute("SELECT * FROM bases")]

    def base_has_name(self, base: str) -> bool:
        row = self._connection().execute("SELECT name FROM bases WHERE id=?", (base,)).fetchone()
        return row is not None and row["name"] is not None

    def bases_in_use(self) -> set[str]:
        rows = self._connection().execute("SELECT base FROM sessions UNION SELECT base FROM snapshots")
        return {str(row[0]) for row in rows}

    def remove_base(self, base: str) -> None:
        with self.write(must=True) as connection:
            connection.execute("DELETE FROM bases WHERE id=?", (base,))

    # -- sessions ---------------------------------------------------------------------------------------------------

    def add_sessions(self, records: list[SessionRecord]) -> None:
        """All or none."""
        with self.write() as connection:
            for record in records:
                _insert_session(connection, record)

    def add_session_of(self, record: SessionRecord, snapshot: SnapshotRecord) -> bool:
        """If the snapshot `is_as` it was read; else nothing is done."""
        with self.write() as connection:
            if not self.is_as(snapshot):
                return False
            _insert_session(connection, record)
            return True

    def make_live(self, sessions: Mapping[str, Mapping[str, Any]]) -> None:
        """All of these sessions come to life in one step, or none."""
        with self.write() as connection:
            for session, columns in sessions.items():
                values = {**columns, "state": "live"}
                values["layers"] = json.dumps(values["layers"])
                values["spec"] = spec_text(values["spec"])
                sets = ",".join(f"{name}=?" for name in values)
                connection.execute(f"UPDATE sessions SET {sets} WHERE id=?", (*values.values(), session))

    def update_session(self, session: str, **columns: Any) -> None:
        if "layers" in columns:
            columns["layers"] = json.dumps(columns["layers"])
        if "spec" in columns:
            columns["spec"] = spec_text(columns["spec"])
        sets = ",".join(f"{name}={_PRESENT if name == 'snapshot' else '?'}" for name in columns)
        try:
            with self.write() as connection:
                done = connection.execute(f"UPDATE sessions SET {sets} WHERE id=?", (*columns.values(), session))
                if done.rowcount == 0:
                    raise NotFound(f"no session {session}", session=session)
        except sqlite3.IntegrityError as error:
            raise Exists(f"a session named {columns.get('name')} exists already", name=columns.get("name")) from error

    def remove_session(self, session: str) -> None:
        with self.write(must=True) as connection:
            connection.execute("DELETE FROM sessions WHERE id=?", (session,))
            connection.execute("DELETE FROM endings WHERE session=?", (session,))

    def sessions(self) -> list[SessionRecord]:
        return [to_session(row) for row in self._connection().execute("SELECT * FROM sessions ORDER BY created, id")]

    def session(self, key: str) -> SessionRecord:
        """By id, name or unique prefix of an id."""
        rows = self._find("sessions", key, None)
        if not rows:
            raise NotFound(f"no session {key}; `waypoint ls` lists them", session=key)
        return to_session(rows[0])

    # -- snapshots --------------------------------------------------------------------------------------------------

    def add_snapshot(self, record: SnapshotRecord, session_update: dict[str, Any] | None = None) -> None:
        """The snapshot's row and what it changes in its session, in one transaction."""
        try:
            with self.write() as connection:
                _insert_snapshot(connection, dict(zip(SNAPSHOT_COLUMNS, snapshot_row(record), strict=True)))
                if session_update:
                    values = dict(session_update)
                    if "layers" in values:
                        values["layers"] = json.dumps(values["layers"])
                    sets = ",".join(f"{name}=?" for name in values)
                    connection.execute(f"UPDATE sessions SET {sets} WHERE id=?", (*values.values(), record.session))
        except sqlite3.IntegrityError as error:
            raise Exists(f"this tree has a snapshot named {record.name} already", name=record.name) from error

    def add_draft(self, record: SnapshotRecord, manifest: str, init: Process) -> bool:
        """The row of a snapshot that was taken before it was asked for, if its session is still what it was taken of."""
        row = dict(zip(SNAPSHOT_COLUMNS, snapshot_row(record, manifest), strict=True))
        try:
            with self.write() as connection:
                if not _is_at(connection, record, record.parent, init):
                    return False
                _insert_snapshot(connection, row)
                _stands_on(connection, record)
                return True
        except sqlite3.IntegrityError as error:
            raise Exists(f"this tree has a snapshot named {record.name} already", name=record.name) from error

    def add_copy(self, record: SnapshotRecord, of: str, init: Process) -> bool:
        """A second row for what `of` holds, under another id and name; False if that, or the session on it, is there no more.

        Whoever removes a row looks afterwards whether another names its files: so they need not be held meanwhile.
        """
        own = {
            "id": record.id, "name": record.name, "parent": of, "created": record.created, "duration_ms": record.duration_ms,
            "paused_ms": record.paused_ms, "files_bytes": record.files_bytes, "memory_bytes": record.memory_bytes,
            "shares": record.shares,
        }  # fmt: skip
        columns = ",".join("?" if name in own else name for name in SNAPSHOT_COLUMNS)
        values = [own[name] for name in SNAPSHOT_COLUMNS if name in own]
        try:
            with self.write() as connection:
                if not _is_at(connection, record, of, init):
                    return False
                query = f"INSERT INTO snapshots SELECT {columns} FROM snapshots WHERE id=? AND full"
                if connection.execute(query, (*values, of)).rowcount == 0:
                    return False
                _stands_on(connection, record)
                return True
        except sqlite3.IntegrityError as error:
            raise Exists(f"this tree has a snapshot named {record.name} already", name=record.name) from error

    # -- endings: a session that is about to be ended at a snapshot (ending.py) ---------------------------------------

    def add_ending(self, record: SnapshotRecord, frozen_ns: int) -> None:
        """The intent; the snapshot does not exist yet. `frozen_ns`: the session's files have not changed since."""
        row = json.dumps(dict(zip(SNAPSHOT_COLUMNS, snapshot_row(record), strict=True)))
        with self.write() as connection:
            connection.execute("INSERT OR REPLACE INTO endings VALUES (?,?,?)", (record.session, row, frozen_ns))

    def ending(self, session: str) -> Ending | None:
        row = self._connection().execute("SELECT * FROM endings WHERE session=?", (session,)).fetchone()
        return None if row is None else Ending(json.loads(row["snapshot"])["id"], row["frozen_ns"])

    def drop_ending(self, session: str) -> None:
        with self.write(must=True) as connection:
            connection.execute("DELETE FROM endings WHERE session=?", (session,))

    def complete_ending(self, session: str) -> None:
        """The session's processes are gone: from now on the snapshot exists, and the session is paused at it."""
        with self.write(must=True) as connection:
            found = connection.execute("SELECT snapshot FROM endings WHERE session=?", (session,)).fetchone()
            row = json.loads(found["snapshot"])
            _insert_snapshot(connection, row)
            connection.execute(
                "UPDATE sessions SET state='paused', init_pid=0, init_start=0, upper=NULL, layers=?, pause=? WHERE id=?",
                (row["layers"], row["id"], session),
            )
            if not row["pinned"]:
                connection.execute("UPDATE sessions SET snapshot=? WHERE id=?", (row["id"], session))
            connection.execute("DELETE FROM endings WHERE session=?", (session,))

    def update_snapshot(self, snapshot: str, **columns: Any) -> None:
        for name in ("layers", "manifest"):
            if name in columns:
                columns[name] = json.dumps(columns[name])
        sets = ",".join(f"{name}=?" for name in columns)
        try:
            with self.write() as connection:
                connection.execute(f"UPDATE snapshots SET {sets} WHERE id=?", (*columns.values(), snapshot))
        except sqlite3.IntegrityError as error:
            raise Exists(f"this tree has a snapshot named {columns.get('name')} already") from error

    def snapshot(self, key: str, tree: str | None = None) -> SnapshotRecord:
        """By id, name (within `tree` first) or unique prefix of an id."""
        rows = self._find("snapshots", key, tree)
        if not rows:
            raise NotFound(f"no snapshot {key}; `waypoint tree` lists them", snapshot=key)
        return to_snapshot(rows[0])

    def is_as(self, snapshot: SnapshotRecord) -> bool:
        """It is there, and neither were its layers merged nor its processes given up since it was read."""
        row = self._connection().execute("SELECT full, layers FROM snapshots WHERE id=?", (snapshot.id,)).fetchone()
        return row is not None and (bool(row["full"]), row["layers"]) == (snapshot.full, json.dumps(snapshot.layers))

    def has_snapshot_name(self, tree: str, name: str) -> bool:
        query = "SELECT 1 FROM snapshots WHERE tree=? AND name=?"
        return self._connection().execute(query, (tree, name)).fetchone() is not None

    def snapshots(self, tree: str | None = None) -> list[SnapshotRecord]:
        """Without their manifests, which are large; `snapshot` has it."""
        where, values = ("", ()) if tree is None else (" WHERE tree=?", (tree,))
        columns = ",".join("'{}' AS manifest" if name == "manifest" else name for name in SNAPSHOT_COLUMNS)
        rows = self._connection().execute(f"SELECT {columns} FROM snapshots{where} ORDER BY created, id", values)
        return [to_snapshot(row) for row in rows]

    def reparent(self, snapshot: str, parent: str | None) -> None:
        """Children of `snapshot` become children of `parent`: a snapshot's layers and image need no ancestor."""
        with self.write(must=True) as connection:
            connection.execute("UPDATE snapshots SET parent=? WHERE parent=?", (parent, snapshot))

    def remove_snapshots(self, snapshots: list[str]) -> None:
        """Children first; others that have come meanwhile move up. Sessions that grew out of one keep running with no parent."""
        try:
            with self.write(must=True) as connection:
                for snapshot in snapshots:
                    connection.execute("UPDATE sessions SET snapshot=NULL WHERE snapshot=?", (snapshot,))
                    connection.execute("UPDATE sessions SET undo=NULL WHERE undo=?", (snapshot,))
                    above = "(SELECT parent FROM snapshots WHERE id=?)"
                    connection.execute(f"UPDATE snapshots SET parent={above} WHERE parent=?", (snapshot, snapshot))
                    connection.execute("DELETE FROM snapshots WHERE id=?", (snapshot,))
        except sqlite3.IntegrityError as error:
            raise WrongState("a session has just been paused at the snapshot; resume or remove it first") from error

    def _find(self, table: str, key: str, tree: str | None) -> list[sqlite3.Row]:
        return find_rows(self._connection(), table, key, tree)


def _is_at(connection: sqlite3.Connection, record: SnapshotRecord, parent: str | None, init: Process) -> bool:
    """The snapshot's session still is this incarnation, and has had no other snapshot since `parent`."""
    query = "SELECT 1 FROM sessions WHERE id=? AND state='live' AND snapshot IS ? AND init_pid=? AND init_start=?"
    return connection.execute(query, (record.session, parent, init.pid, init.start)).fetchone() is not None


def _stands_on(connection: sqlite3.Connection, record: SnapshotRecord) -> None:
    connection.execute("UPDATE sessions SET snapshot=? WHERE id=?", (record.id, record.session))


def _insert_session(connection: sqlite3.Connection, record: SessionRecord) -> None:
    marks = ",".join("?" * len(SESSION_COLUMNS))
    try:
        connection.execute(f"INSERT INTO sessions VALUES ({marks})", session_row(record))
    except sqlite3.IntegrityError as error:
        if "FOREIGN KEY" in str(error):
            gone = f"the base or snapshot of the new session was removed meanwhile: {record.base}"
            raise NotFound(gone) from error
        raise Exists(f"a session named {record.name} exists already", name=record.name) from error


def _insert_snapshot(connection: sqlite3.Connection, row: dict[str, Any]) -> None:
    """Its parent may have been removed since the snapshot began: then it has none."""
    marks = ",".join(_PRESENT if name == "parent" else "?" for name in row)
    connection.execute(f"INSERT INTO snapshots VALUES ({marks})", list(row.values()))
