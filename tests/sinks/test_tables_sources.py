"""Delta tables equal their tables in MariaDB and in a PostgreSQL captured by triggers, through DDL.

The servers' side is read with SELECT, and told as Python's own values.
"""

import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.change.event import Op
from headrace.testing import Place, reading, session
from tests.deltas import stored
from tests.formats.other_sources import place_of
from tests.sinks.lake import Lake, ordered

Row = dict[str, Any]
Told = Callable[[Any], Any]

COLUMNS = {
    "mysql": """id int PRIMARY KEY, flag tinyint(1), big bigint unsigned, price decimal(12,2),
        ratio double, at datetime(6), stamp timestamp NULL, day date, clock time,
        label enum('a','b'), labels set('x','y'), doc json, photo blob, note varchar(50)""",
    "postgres_events": """id int PRIMARY KEY, flag boolean, big numeric(20,0), price numeric(12,2),
        ratio float8, at timestamp, stamp timestamptz, day date, clock time, label text,
        labels text[], doc jsonb, photo bytea, note varchar(50)""",
}
PHOTO = {"mysql": "x'00ff'", "postgres_events": r"'\x00ff'"}
LABELS = {"mysql": "'x,y'", "postgres_events": "'{x,y}'"}
TYPES = {
    "flag": pa.bool_(),
    "big": pa.decimal128(20, 0),
    "price": pa.decimal128(12, 2),
    "ratio": pa.float64(),
    "at": pa.timestamp("us"),
    "stamp": pa.timestamp("us", tz="UTC"),
    "day": pa.date32(),
    "clock": pa.string(),
    "label": pa.string(),
    "labels": pa.list_(pa.string()),
    "doc": pa.string(),
    "photo": pa.binary(),
}


def values(kind: str, number: int, note: str = "NULL") -> str:
    flag = {"mysql": "1", "postgres_events": "true"}[kind]
    return f"""({number}, {flag}, 18446744073709551615, {number}.50, 0.1,
        '2024-02-29 01:02:03.5', '2025-01-15 10:30:00', '2024-02-29', '23:59:59', 'b',
        {LABELS[kind]}, '{{"n": [{number}, null]}}', {PHOTO[kind]}, {note})"""


def first(kind: str) -> list[str]:
    """What is there before the capture."""
    return [
        f"CREATE TABLE things ({COLUMNS[kind]})",
        "CREATE TABLE parts (thing int, part varchar(20), n int, PRIMARY KEY (thing, part))",
        f"INSERT INTO things VALUES {values(kind, 1)}, {values(kind, 2)}",
        "INSERT INTO parts VALUES (1, 'a', 1), (1, 'b', 2), (2, 'a', 3)",
    ]


def then(kind: str) -> list[str]:
    """What happens while it is captured; each is a session with one transaction."""
    nulls = ", ".join(["NULL"] * 12)
    number = "MODIFY n bigint" if kind == "mysql" else "ALTER COLUMN n TYPE bigint"
    # MySQL then tells of a row only its key and what has changed.
    in_part = "SET SESSION binlog_row_image = 'MINIMAL'; " if kind == "mysql" else ""
    return [
        f"INSERT INTO things VALUES {values(kind, 3)}, (4, {nulls}, 'x')",
        "UPDATE things SET price = price + 1, note = 'é 水' WHERE id < 3",
        "UPDATE things SET id = 10 WHERE id = 1",
        f"{in_part}UPDATE things SET price = 7, doc = NULL WHERE id = 2",
        # In parts it might be a REPLACE: a server whose global image is FULL sends no text of it.
        "UPDATE things SET id = 30 WHERE id = 3",
        f"{in_part}DELETE FROM things WHERE id = 4",
        "DELETE FROM parts WHERE thing = 2",
        "UPDATE parts SET part = 'c' WHERE part = 'b'",
        "ALTER TABLE things ADD COLUMN more varchar(20)",
        f"INSERT INTO things VALUES ({values(kind, 5)[1:-1]}, 'more')",
        "ALTER TABLE things DROP COLUMN note",
        "UPDATE things SET more = 'seen' WHERE id = 2",
        f"ALTER TABLE parts {number}",
        "INSERT INTO parts VALUES (9, 'z', 9000000000)",
    ]


EXACT: Mapping[str, Mapping[str, Told]] = {
    "mysql": {
        "flag": bool,
        "big": Decimal,
        "stamp": lambda value: value.replace(tzinfo=dt.UTC),
        "clock": str,
        "labels": lambda value: value.split(","),
    },
    "postgres_events": {"clock": lambda value: value.isoformat()},
}


def in_database(place: Place, kind: str, table: str) -> list[Row]:
    """The rows of a table, as the server gives them."""
    document = {"postgres_events": "doc::text"}.get(kind, "doc")
    told = EXACT[kind]
    with session(place) as reader:
        names = [
            row[0]
            for row in reader.execute(
                "SELECT column_name FROM information_schema.columns "
                f"WHERE table_schema = '{place.schema}' AND table_name = '{table}' "
                "ORDER BY ordinal_position"
            )
        ]
        asked = ", ".join(document if name == "doc" else name for name in names)
        rows = reader.execute(f"SELECT {asked} FROM {table}")
    return [
        {
            name: value if value is None or name not in told else told[name](value)
            for name, value in zip(names, row, strict=True)
        }
        for row in rows
    ]


@pytest.fixture
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    """Fresh databases."""
    with ExitStack() as stack:
        yield lambda kind: place_of(kind, stack, request, tmp_path)


@pytest.mark.live
@pytest.mark.requirement("S1-01")
@pytest.mark.parametrize("kind", ["mysql", "postgres_events"])
def test_delta_tables_equal_the_servers_tables(
    kind: str,
    places: Callable[[str], Place],
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.sources.postgres_events.stream._WATCH_SECONDS", 0.05)
    place = places(kind)
    with session(place) as writer:
        for statement in first(kind):
            writer.execute(statement)
    with reading(place, tmp_path) as feed:
        feed.catch_up()
        copied = feed.log.latest_sequence
        for statement in then(kind):
            with session(place) as writer:
                for each in statement.split("; "):
                    writer.execute(each)
            feed.catch_up()
        told = feed.changes(Op.UPDATE, table="things")
    assert any(change.unchanged for change in told) == (kind == "mysql")
    lake = Lake(spark, tmp_path)
    lake.write(copied)
    lake.write()
    lake.log.close()
    assert lake.writer.failed_tables() == []
    for table in ("things", "parts"):
        found = stored(lake.path / place.schema / table)
        found = found.drop_columns(["_sequence"])
        assert ordered(found.to_pylist()) == ordered(in_database(place, kind, table)), table
        types = dict(zip(found.schema.names, found.schema.types, strict=True))
        expected = TYPES if table == "things" else {"n": pa.int64()}
        assert {name: types[name] for name in expected} == expected
