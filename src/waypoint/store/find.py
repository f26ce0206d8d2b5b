"""Find a row by what a person typed, and a live session without the rest of the store.

Light on purpose: `waypoint exec` imports this and not the database with its records (docs/decisions/quick-exec.md).
"""

from __future__ import annotations

import sqlite3

from waypoint.errors import Ambiguous

__all__ = ["DATABASE", "FORMAT_VERSION", "SESSIONS", "SESSION_LOCK", "Finder", "find_rows"]

FORMAT_VERSION = 2
DATABASE = "store.db"
SESSIONS = "s"
SESSION_LOCK = "lock"


def find_rows(connection: sqlite3.Connection, table: str, key: str, tree: str | None = None) -> list[sqlite3.Row]:
    """One row or none: by id, by name, by unique prefix of either, within `tree` first; Ambiguous when several fit."""
    row = connection.execute(f"SELECT * FROM {table} WHERE id=?", (key,)).fetchone()
    if row is not None:
        return [row]
    rows = connection.execute(f"SELECT * FROM {table} WHERE name=?", (key,)).fetchall()
    if not rows and key:
        query = f"SELECT * FROM {table} WHERE substr(id, 1, :length)=:key OR substr(name, 1, :length)=:key"
        rows = connection.execute(query, {"length": len(key), "key": key}).fetchall()
    rows = [row for row in rows if row["tree"] == tree] or rows
    if len(rows) > 1:
        found = ", ".join(row["id"] for row in rows[:5])
        raise Ambiguous(f"{key} fits {len(rows)} {table}: {found}; give more of the id", key=key)
    return rows


class Finder:
    """A store's sessions, looked up and not changed. FileNotFoundError when there is no store of our format."""

    def __init__(self, home: str) -> None:
        self._home = home
        database = f"{home}/{DATABASE}"
        try:
            self._connection = sqlite3.connect(f"file:{_quoted(database)}?mode=rw", uri=True, timeout=30, isolation_level=None)
            self._connection.row_factory = sqlite3.Row
            row = self._connection.execute("SELECT value FROM meta WHERE key='format'").fetchone()
        except sqlite3.Error as error:
            raise FileNotFoundError(database) from error
        if row is None or row[0] != str(FORMAT_VERSION):
            raise FileNotFoundError(database)

    def session(self, key: str) -> sqlite3.Row | None:
        rows = find_rows(self._connection, "sessions", key)
        return rows[0] if rows else None

    def lock(self, session: str) -> str:
        return f"{self._home}/{SESSIONS}/{session}/{SESSION_LOCK}"


def _quoted(path: str) -> str:
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
