"""An upgrade to version 2, with a mistake: it renames the column under the running service, and then drops what it should copy."""

from __future__ import annotations

import pathlib
import sqlite3
import sys

directory = pathlib.Path(sys.argv[1])
database = sqlite3.connect(directory / "ledger.db", isolation_level=None)
database.execute("alter table entry rename to old")
database.execute("create table entry (id integer primary key, euros real not null)")
if "--carefully" in sys.argv:
    database.execute("drop table entry")
    database.execute("alter table old rename to entry")
    database.execute("alter table entry add column note text not null default ''")
else:
    database.execute("drop table old")
    (directory / "ledger.py").unlink()
