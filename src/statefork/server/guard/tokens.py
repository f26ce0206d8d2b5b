"""Bearer tokens: made once, shown once, kept as a hash.

A token reads `sft_<id>_<secret>`. The id finds the row, the secret proves it. The secret has 256 random bits, so one SHA-256 is
as good as a slow hash would be: there is nothing to guess. The comparison takes the same time for every wrong secret, and an
unknown id is compared too. Each request asks the database, so a token that was revoked by another process is refused at once.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statefork.errors import Ambiguous, NotFound, StoreError, UsageError
from statefork.server.guard.principal import SCOPES, Principal
from statefork.server.guard.problems import Refused

__all__ = ["TOKEN_PATTERN", "Token", "TokenStore"]

TOKEN_PATTERN = re.compile(r"sft_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_NOBODY = hashlib.sha256(b"no token has this secret").digest()

_SCHEMA = """
CREATE TABLE IF NOT EXISTS tokens (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    digest BLOB NOT NULL,
    scopes TEXT NOT NULL,
    environments TEXT,
    max_environments INTEGER,
    created_at REAL NOT NULL,
    expires_at REAL,
    revoked_at REAL
)
"""


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token; the secret is not."""

    id: str
    name: str
    scopes: tuple[str, ...]
    environments: tuple[str, ...] | None
    max_environments: int | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def state(self, now: float | None = None) -> str:
        """`active`, `expired` or `revoked`."""
        if self.revoked_at is not None:
            return "revoked"
        expired = self.expires_at is not None and self.expires_at <= (time.time() if now is None else now)
        return "expired" if expired else "active"

    @property
    def principal(self) -> Principal:
        return Principal(
            token_id=self.id,
            name=self.name,
            scopes=frozenset(self.scopes),
            environments=None if self.environments is None else frozenset(self.environments),
            max_environments=self.max_environments,
        )


class TokenStore:
    """The table `tokens` of a SQLite file; safe for several threads and processes."""

    def __init__(self, database: Path) -> None:
        self._path = database
        self._lock = threading.Lock()
        try:
            database.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            database.touch(mode=0o600)
            self._db = sqlite3.connect(database, timeout=10, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot open {database}: {error}; is $STATEFORK_HOME a directory of yours?") from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def create(
        self,
        scopes: Iterable[str],
        *,
        name: str = "",
        expires_in: float | None = None,
        environments: Iterable[str] | None = None,
        max_environments: int | None = None,
    ) -> tuple[Token, str]:
        """The record, and the token itself: nobody can read that again."""
        held = tuple(dict.fromkeys(scopes))
        unknown = [scope for scope in held if scope not in SCOPES]
        if unknown or not held:
            raise UsageError(f"no scope {', '.join(unknown) or 'given'}; there are: {', '.join(SCOPES)}")
        if expires_in is not None and expires_in <= 0:
            raise UsageError("a token that has expired already is of no use; give a time in the future")
        if max_environments is not None and max_environments < 0:
            raise UsageError("the number of environments cannot be below 0")
        listed = None if environments is None else tuple(dict.fromkeys(environments))
        identifier, secret, now = secrets.token_hex(6), secrets.token_urlsafe(32), time.time()
        token = Token(
            id=identifier,
            name=name or identifier,
            scopes=held,
            environments=listed,
            max_environments=max_environments,
            created_at=now,
            expires_at=None if expires_in is None else now + expires_in,
            revoked_at=None,
        )
        row = (
            token.id,
            token.name,
            _digest(secret),
            json.dumps(held),
            None if listed is None else json.dumps(listed),
            max_environments,
            now,
            token.expires_at,
        )
        with self._using() as db:
            db.execute("INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)", row)
        return token, f"sft_{identifier}_{secret}"

    def all(self) -> list[Token]:
        """Oldest first, those that are no good any more too."""
        with self._using() as db:
            return [_token(row) for row in db.execute("SELECT * FROM tokens ORDER BY created_at, id")]

    def any_active(self) -> bool:
        return any(token.state() == "active" for token in self.all())

    def find(self, prefix: str) -> Token:
        """By id, unique beginning of an id, or name."""
        every = self.all()
        found = [token for token in every if token.id == prefix] or [
            token for token in every if token.name == prefix or (prefix and token.id.startswith(prefix))
        ]
        if not found:
            raise NotFound(f"there is no token {prefix!r}; `statefork token list` shows them")
        if len(found) > 1:
            raise Ambiguous(f"{prefix!r} fits {', '.join(token.id for token in found)}; give more of the id")
        return found[0]

    def revoke(self, prefix: str) -> Token:
        """From the next request on it is refused. Revoking again changes nothing."""
        token = self.find(prefix)
        with self._using() as db:
            db.execute("UPDATE tokens SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (time.time(), token.id))
        return self.find(token.id)

    def authenticate(self, presented: str) -> Principal:
        """Raises Refused 401; its words tell nothing about tokens that the caller does not have."""
        match = TOKEN_PATTERN.fullmatch(presented)
        identifier, secret = match.groups() if match else ("", presented)
        with self._using() as db:
            row = db.execute("SELECT * FROM tokens WHERE id = ?", (identifier,)).fetchone()
        same = hmac.compare_digest(_digest(secret), row["digest"] if row is not None else _NOBODY)
        if row is None or not same:
            raise Refused(
                401, "unauthenticated", "this token is not known here; make one with `statefork token create`"
            )
        return _active(_token(row)).principal

    def standing_for(self, identifier: str) -> Principal:
        """The bearer of a token that was proven by other means, such as a key that its bearer was given for one purpose.

        Raises Refused 401 if the token is no good any more.
        """
        with self._using() as db:
            row = db.execute("SELECT * FROM tokens WHERE id = ?", (identifier,)).fetchone()
        if row is None:
            raise Refused(401, "unauthenticated", "the token behind this is not known here")
        return _active(_token(row)).principal

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.row_factory = sqlite3.Row
                yield self._db
            except sqlite3.Error as error:
                raise StoreError(f"{self._path}: {error}") from error


def _active(token: Token) -> Token:
    state = token.state()
    if state != "active":  # only its bearer gets here
        raise Refused(401, "unauthenticated", f"token {token.id} is {state}; make one with `statefork token create`")
    return token


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _token(row: Any) -> Token:
    return Token(
        id=row["id"],
        name=row["name"],
        scopes=tuple(json.loads(row["scopes"])),
        environments=None if row["environments"] is None else tuple(json.loads(row["environments"])),
        max_environments=row["max_environments"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )
