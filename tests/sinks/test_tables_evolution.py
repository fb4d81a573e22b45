"""Columns that are renamed, dropped and added again, or added with a value in every row."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from headrace.change.event import Column, Op
from headrace.transforms.rules import TableTransform
from tests.effort import times
from tests.random_columns import STEPS, VALUES
from tests.sinks.lake import Lake, Row, ordered, put, schema, truncate

ID = Column("id", "bigint", key=True, number=1)
NAME = Column("name", "text", number=2)
SIZE = Column("size", "integer", number=3)


@pytest.fixture(params=["rows", "history"])
def lake(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Iterator[Lake]:
    made = Lake(spark, tmp_path, keep=request.param)
    yield made
    made.log.close()


def current(lake: Lake, name: str = "orders") -> list[Row]:
    """The rows as they are now, with the source's columns of now."""
    columns = [c.name for c in lake.log.read(0, limit=1_000_000)[-1].table.columns]
    rows = [row for row in lake.rows(name, own=True) if row.get("_current", True)]
    return ordered([{column: row[column] for column in columns} for row in rows])


def three_rows(lake: Lake) -> None:
    table = lake.table("orders", (ID, NAME, SIZE))
    lake.commit(*(put(table, id=n, name=f"n{n}", size=n) for n in range(3)))
    lake.write()


@pytest.mark.requirement("P-03")
@pytest.mark.parametrize(
    "columns",
    [
        pytest.param((ID, msgspec.structs.replace(NAME, name="title"), SIZE), id="renamed"),
        pytest.param(
            (
                ID,
                msgspec.structs.replace(NAME, name="size", type="text"),
                msgspec.structs.replace(SIZE, name="name", type="integer"),
            ),
            id="names exchanged",
        ),
        pytest.param((ID, SIZE, Column("name", "text", number=4)), id="dropped and added"),
        pytest.param((ID, SIZE, Column("name", "integer", number=4)), id="as another type"),
        pytest.param((ID, SIZE, Column("NAME", "text", number=4)), id="in other letters"),
        pytest.param(
            (ID, NAME, SIZE, Column("note", "text", number=4, initial_default='"n"')),
            id="added with a default",
        ),
        pytest.param(
            (ID, NAME, SIZE, Column("price", "numeric(6,2)", number=4, initial_default='"1.50"')),
            id="added with a number",
        ),
        pytest.param(
            (
                ID,
                Column("no", "boolean", number=4, initial_default="false"),
                Column("none", "integer[]", number=5, initial_default="[]"),
                Column("zero", "integer", number=6, initial_default="0"),
                Column("empty", "text", number=7, initial_default='""'),
            ),
            id="added with defaults that count as false",
        ),
        pytest.param(
            (
                ID,
                msgspec.structs.replace(NAME, name="title"),
                SIZE,
                Column("name", "text", number=4, initial_default='"new"'),
            ),
            id="renamed and the old name given to another",
        ),
        pytest.param(
            (msgspec.structs.replace(ID, name="number"), NAME, SIZE), id="the key renamed"
        ),
    ],
)
def test_rows_that_nobody_touches_follow_the_columns(
    lake: Lake, columns: tuple[Column, ...]
) -> None:
    three_rows(lake)
    later = lake.table("orders", columns)
    lake.commit(schema(later))
    lake.write()
    assert current(lake) == lake.expected()
    # And the key finds them.
    row: dict[str, Any] = {column.name: None for column in columns}
    row[columns[0].name] = 1
    lake.commit(put(later, Op.UPDATE, **row))
    lake.write()
    assert current(lake) == lake.expected()
    assert len(current(lake)) == 3


def test_a_default_reaches_rows_of_the_same_batch_that_came_before_it(lake: Lake) -> None:
    three_rows(lake)
    before = lake.table("orders", (ID, NAME, SIZE))
    lake.commit(put(before, id=7, name="seven", size=7))
    note = Column("note", "text", number=4, initial_default='"n"')
    after = lake.table("orders", (ID, NAME, SIZE, note))
    lake.commit(put(after, id=8, name="eight", size=8, note=None))
    lake.write()
    assert {row["id"]: row["note"] for row in current(lake)} == {
        **dict.fromkeys((0, 1, 2, 7), "n"),
        8: None,
    }


def test_a_table_of_an_earlier_version_goes_on_by_names(lake: Lake) -> None:
    unnumbered = tuple(msgspec.structs.replace(each, number=0) for each in (ID, NAME, SIZE))
    table = lake.table("orders", unnumbered)
    lake.commit(*(put(table, id=n, name=f"n{n}", size=n) for n in range(3)))
    lake.write()
    lake.commit(schema(lake.table("orders", (ID, NAME, SIZE))))
    lake.write()
    lake.commit(schema(lake.table("orders", (ID, msgspec.structs.replace(NAME, name="t"), SIZE))))
    lake.write()
    assert [row["t"] for row in current(lake)] == ["n0", "n1", "n2"]


@pytest.mark.parametrize("name", ["name", "NAME"])
def test_what_the_past_held_stays_beside_a_column_of_its_name(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    lake = Lake(spark, tmp_path, keep="history")
    three_rows(lake)
    lake.commit(schema(lake.table("orders", (ID, SIZE, Column(name, "integer", number=4)))))
    lake.write()
    rows = ordered(lake.rows())
    assert [(row[name], row["name_dropped"]) for row in rows] == [
        (None, "n0"),
        (None, "n1"),
        (None, "n2"),
    ]
    lake.log.close()


@pytest.mark.parametrize("seed", range(times(2, nightly=20)))
def test_random_columns_and_rows_equal_the_replay(lake: Lake, seed: int) -> None:
    chance = random.Random(seed)
    columns = [ID, Column("a", "text", number=2), Column("b", "integer", number=3)]
    known: set[int] = set()
    for number in range(4, 16):
        columns = chance.choice(STEPS)(chance, list(columns), number)
        table = lake.table("orders", columns)
        if chance.random() < 0.5:
            lake.commit(schema(table))
        for _ in range(chance.randrange(4)):
            row = {c.name: chance.choice(VALUES[c.type]) for c in columns[1:]}
            row_id = chance.randrange(6)
            op = Op.UPDATE if row_id in known else Op.INSERT
            known.add(row_id)
            lake.commit(put(table, op, id=row_id, **row))
        if chance.random() < 0.4:
            lake.write()
            if chance.random() < 0.3:
                lake.open()
    lake.commit(schema(lake.table("orders", columns)))
    lake.write()
    assert current(lake) == lake.expected()


@pytest.mark.parametrize(
    "rule",
    [
        TableTransform(where="size < 2"),
        TableTransform(sql="SELECT *, size + 1 AS s FROM changes"),
    ],
)
def test_what_a_transform_has_made_of_other_values_is_not_kept(
    spark: SparkSession, tmp_path: Path, rule: TableTransform
) -> None:
    lake = Lake(spark, tmp_path, transforms={"public.orders": rule})
    three_rows(lake)
    again = (ID, NAME, Column("size", "integer", number=4, initial_default="7"))
    table = lake.table("orders", again)
    lake.commit(schema(table))
    lake.write()
    (failed,) = lake.writer.failed_tables()
    assert "size has another value now" in failed.reason
    lake.commit(truncate(table, snapshot=True), put(table, Op.READ, id=1, name="n", size=1))
    lake.write()
    assert not lake.writer.failed_tables()
    assert len(lake.rows()) == 1
    lake.log.close()
