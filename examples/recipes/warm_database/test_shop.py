"""Tests that a transaction around each could not keep apart: they commit, alter tables, break the server. Each has its own."""

from __future__ import annotations

import pytest

from waypoint.testing.database import Database, DatabaseError

PRODUCTS = [["50000"]]


def sell(database: Database, name: str, number: int) -> None:
    database.sql(
        f"begin; update product set stock = stock - {number} where name = '{name}'; "
        f"insert into sale (product, number) select id, {number} from product where name = '{name}'; commit"
    )


@pytest.mark.parametrize("number", range(1, 4))
def test_a_sale_is_committed(waypoint_db: Database, number: int) -> None:
    """The first sale gets number 1 in every test: not even a sequence has gone on."""
    sell(waypoint_db, "product 9", number)
    assert waypoint_db.sql("select id, number from sale") == [["1", str(number)]]
    assert waypoint_db.sql("select stock from product where name = 'product 9'") == [[str(9 - number)]]


def test_nothing_is_sold_that_is_not_there(waypoint_db: Database) -> None:
    with pytest.raises(DatabaseError, match="violates check constraint"):
        sell(waypoint_db, "product 10", 1)
    assert waypoint_db.sql("select count(*) from sale") == [["0"]]


def test_a_migration(waypoint_db: Database) -> None:
    waypoint_db.sql("alter table product drop column stock; vacuum full product")
    assert waypoint_db.sql("select count(*) from product") == PRODUCTS


def test_what_the_migration_dropped_is_here(waypoint_db: Database) -> None:
    assert waypoint_db.sql("select count(stock) from product") == PRODUCTS


def test_a_crash(waypoint_db: Database) -> None:
    waypoint_db.sql("insert into sale (product, number) values (1, 5)")
    waypoint_db.session.run(["pkill", "-KILL", "-f", "postgres: checkpointer"])
    waypoint_db.wait()
    assert waypoint_db.sql("select count(*) from product") == PRODUCTS


def test_a_client_of_the_host(waypoint_db: Database) -> None:
    """Through its own libpq, over the server's socket."""
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(waypoint_db.dsn) as one, psycopg.connect(waypoint_db.url) as other:
        one.execute("delete from product where id > 10")
        assert other.execute("select count(*) from product").fetchone() == (50000,)
        one.commit()
        assert other.execute("select count(*) from product").fetchone() == (10,)
