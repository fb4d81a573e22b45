"""The Delta tables as others read them: DuckDB, Polars, and Spark without a jar."""

import datetime as dt
from decimal import Decimal

import duckdb
import polars as pl
import pytest

from headrace.change.event import Column, Op
from tests.deltas import stored
from tests.sinks.lake import Lake, Row, put, remove

COLUMNS = (
    Column("id", "bigint", key=True),
    Column("amount", "numeric(12,2)"),
    Column("moment", "timestamp with time zone"),
    Column("local", "timestamp without time zone"),
    Column("day", "date"),
    Column("tags", "text[]"),
    Column("raw", "bytea"),
    Column("ok", "boolean"),
    Column("doc", "jsonb"),
)


def thing(number: int, amount: str = "12.50") -> Row:
    return {
        "id": number,
        "amount": amount,
        "moment": "2025-01-15T10:30:00.000001+00:00",
        "local": "2025-01-15T10:30:00Z",
        "day": "2025-01-15",
        "tags": ["a", None],
        "raw": "AP8=",
        "ok": True,
        "doc": None,
    }


EXPECTED: Row = {
    "amount": Decimal("12.50"),
    "moment": dt.datetime(2025, 1, 15, 10, 30, 0, 1, dt.UTC),
    "local": dt.datetime(2025, 1, 15, 10, 30),  # noqa: DTZ001  # it has no zone
    "day": dt.date(2025, 1, 15),
    "tags": ["a", None],
    "raw": b"\x00\xff",
    "ok": True,
    "doc": None,
}


@pytest.mark.requirement("S2-22", "P-21")
def test_others_read_the_tables_with_their_types(lake: Lake) -> None:
    things = lake.table("things", COLUMNS)
    lake.commit(*(put(things, **thing(number)) for number in range(4)))
    lake.write()
    lake.commit(put(things, Op.UPDATE, **thing(1, "7.25")), remove(things, id=2))
    lake.write()
    path = str(lake.path / "public" / "things")
    names = list(EXPECTED)
    one = pl.scan_delta(path).filter(pl.col("id") == 3).collect().to_dicts()[0]
    assert {name: one[name] for name in names} == EXPECTED
    duck = duckdb.connect()
    duck.execute("SET TimeZone = 'UTC'")
    duck.register("things", stored(path))
    found = duck.sql(f"SELECT {', '.join(names)} FROM things WHERE id = 3")
    assert found is not None
    assert found.to_arrow_table().to_pylist() == [EXPECTED]
    total = "SELECT count(*), sum(amount) FROM things"
    assert duck.execute(total).fetchall() == [(3, Decimal("32.25"))]
    rows = lake.spark.createDataFrame(stored(path))
    assert sorted(row["id"] for row in rows.select("id").collect()) == [0, 1, 3]
