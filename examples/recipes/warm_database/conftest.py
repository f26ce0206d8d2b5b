"""The warm database of these tests: filled once, forked for each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from waypoint.testing.database import Database

SCHEMA = """
create table product (id serial primary key, name text unique not null, stock integer not null check (stock >= 0));
create table sale (id serial primary key, product integer references product, number integer not null);
insert into product (name, stock) select 'product ' || n, n % 10 from generate_series(1, 50000) n;
create index on product (stock);
analyze;
"""


@pytest.fixture(scope="session")
def waypoint_db_warm() -> Callable[[Database], None]:
    def fill(database: Database) -> None:
        database.sql(SCHEMA)

    return fill
