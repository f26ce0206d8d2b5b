"""A pytest plugin: `waypoint_db` gives each test its own live copy of one warm PostgreSQL server.

The server is started and filled once, in a Waypoint session; a snapshot of the running server is taken; each test gets
a fork of it and the fork is dropped afterwards. Nothing is truncated, rolled back or loaded again, and a test may do what a
transaction around it would forbid: commit, ALTER, VACUUM, crash the server.

    @pytest.fixture(scope="session")
    def waypoint_db_warm():
        return lambda db: db.sql(open("schema.sql").read())

    def test_it(waypoint_db):
        with waypoint_db.connect() as connection:
            ...

The server listens on a unix socket inside only. Programs of the host, the test among them, reach it by the way of
`/proc/PID/root`: a socket in the file system belongs to whoever can open its path, whatever the network. It needs root.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

if TYPE_CHECKING:
    from waypoint.session import Session

__all__ = ["Database", "DatabaseError"]

DIRECTORY = "/var/tmp/waypoint-db"
NAME = "test"
USER = "postgres"
_PORT = 5432
_UP_SECONDS = 60.0

# Durability is the snapshot's matter: the server need not wait for a disk. Forks copy what it has on disk, so its log is small.
_START = f"""
set -e
for bin in /usr/lib/postgresql/*/bin; do PATH=$bin:$PATH; done
command -v initdb >/dev/null || {{ echo 'PostgreSQL is not installed; on Debian: apt-get install postgresql' >&2; exit 3; }}
mkdir -p {DIRECTORY} && cd {DIRECTORY} && chown {USER} .
su {USER} -s /bin/sh -c "PATH='$PATH'; initdb -D data -N -A trust -U {USER} -E UTF8 --no-locale --wal-segsize=1 >initdb.log"
setsid su {USER} -s /bin/sh -c "PATH='$PATH'; exec postgres -D data -k {DIRECTORY} -c listen_addresses='' \\
    -c min_wal_size=2MB -c fsync=off -c full_page_writes=off \\
    -c synchronous_commit=off -c unix_socket_permissions=0777" </dev/null >log 2>&1 &
"""
_PSQL = ["psql", "-qAtX", "-v", "ON_ERROR_STOP=1", "-h", DIRECTORY, "-U", USER]


class DatabaseError(Exception):
    """The server's words about a statement, or why there is no server."""


class Database:
    """One live server, in a session of its own."""

    def __init__(self, session: Session) -> None:
        self.session = session
        """For whatever else a test wants of it: `exec`, `run`, `snapshot`, `restore`."""

    @property
    def socket(self) -> Path:
        """The directory with the server's socket, as this host sees it: libpq's `host`."""
        return Path(f"/proc/{self.session.record.init_pid}/root{DIRECTORY}")

    @property
    def dsn(self) -> str:
        return f"host={self.socket} port={_PORT} user={USER} dbname={NAME}"

    @property
    def url(self) -> str:
        """For those who want a URL, such as SQLAlchemy."""
        return f"postgresql://{USER}@/{NAME}?host={quote(str(self.socket), safe='')}&port={_PORT}"

    def connect(self, **options: Any) -> Any:
        """A new connection by psycopg (3, else 2). It must be closed before a snapshot: it leads out of the session."""
        for name in ("psycopg", "psycopg2"):
            with contextlib.suppress(ImportError):
                return importlib.import_module(name).connect(self.dsn, **options)
        raise DatabaseError("neither psycopg nor psycopg2 is installed; `dsn` and `sql` need none")

    def sql(self, text: str, *, database: str = NAME, timeout: float = 60) -> list[list[str]]:
        """Run statements by `psql` inside; the rows as text. DatabaseError at the first that fails."""
        done = self.session.run([*_PSQL, "-F", "\x1f", "-d", database], stdin=text.encode(), timeout=timeout)
        if done.exit_code != 0:
            raise DatabaseError(done.stderr.decode(errors="replace").strip() or f"psql ended with {done.exit_code}")
        return [line.split("\x1f") for line in done.stdout.decode().splitlines()]

    def wait(self, *, database: str = NAME, timeout: float = _UP_SECONDS) -> None:
        """Until the server answers: it may have to recover first."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                self.sql("select 1", database=database)
                return
            except DatabaseError as error:
                if time.monotonic() > deadline:
                    log = self.session.run(["tail", "-n", "5", f"{DIRECTORY}/log"]).stdout.decode(errors="replace")
                    raise DatabaseError(f"the server does not answer: {error}; its log: {log.strip()}") from None
                time.sleep(0.05)


@pytest.fixture(scope="session")
def waypoint_db_options() -> Mapping[str, Any]:
    """Override it: `rootfs`, a directory or archive to run over instead of the host's own root; or arguments of `Engine.new`."""
    return {}


@pytest.fixture(scope="session")
def waypoint_db_warm() -> Callable[[Database], None]:
    """Override it: gives a function that fills the database before the snapshot."""
    return lambda database: None


@pytest.fixture(scope="session")
def waypoint_db_template(
    waypoint_db_options: Mapping[str, Any], waypoint_db_warm: Callable[[Database], None]
) -> Iterator[tuple[Database, str]]:
    """The warm server, and the snapshot of it that tests are forked from."""
    from waypoint.bases import base_from_rootfs
    from waypoint.engine import Engine

    home = Path(tempfile.mkdtemp(prefix="waypoint-db-", dir="/var/tmp"))
    engine = Engine(home, ahead=True)
    try:
        options = dict(waypoint_db_options)
        rootfs = options.pop("rootfs", None)
        if rootfs is not None:
            options["base"] = base_from_rootfs(engine.store, Path(rootfs))
        session = engine.new(**options)
        database = Database(session)
        _start(database)
        waypoint_db_warm(database)
        database.sql("checkpoint")
        yield database, session.snapshot("warm").id
    finally:
        for record in engine.sessions():
            engine.session(record.id).remove()
        engine.close()  # which waits for the chores that it does behind our back
        with Engine(home) as engine:
            engine.gc()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def waypoint_db(waypoint_db_template: tuple[Database, str]) -> Iterator[Database]:
    """A live copy of the warm server, this test's own."""
    template, snapshot = waypoint_db_template
    (session,) = template.session.fork(1, from_snapshot=snapshot)
    try:
        yield Database(session)
    finally:
        session.remove()


def _start(database: Database) -> None:
    done = database.session.run(["sh", "-c", _START], timeout=_UP_SECONDS)
    if done.exit_code != 0:
        raise DatabaseError(f"no server: {(done.stderr or done.stdout).decode(errors='replace').strip()}")
    database.wait(database=USER)
    database.sql(f"create database {NAME}", database=USER)
