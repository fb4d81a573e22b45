"""Tables that Spark computes: a statement or a function between the log and the table."""

import random
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls them

from headrace.change.event import BeforeKind, Column, Op
from headrace.sinks.tables.sink import Tables
from headrace.transforms.rules import TableTransform
from tests.sinks.lake import ORDERS, Lake, Row, change, order, put, remove, schema, truncate

LARGE = "SELECT *, amount * 2 AS twice FROM changes WHERE status <> 'hidden'"
EVERY_TYPE = (
    Column("id", "timestamp with time zone", key=True),
    Column("number", "integer", key=True),
    Column("small", "smallint"),
    Column("real", "real"),
    Column("double", "double precision"),
    Column("exact", "numeric(20,4)"),
    Column("yes", "boolean"),
    Column("day", "date"),
    Column("wall", "timestamp without time zone"),
    Column("bytes", "bytea"),
    Column("names", "text[]"),
    Column("document", "jsonb"),
)

Opened = Callable[..., Lake]


@pytest.fixture
def opened(spark: SparkSession, tmp_path: Path) -> Opened:
    def made(name: str = "", **settings: Any) -> Lake:
        return Lake(spark, tmp_path / (name or "one"), **settings)

    return made


def sql(text: str, table: str = "public.orders") -> dict[str, TableTransform]:
    return {table: TableTransform(sql=text)}


def failed(lake: Lake) -> tuple[str, str]:
    """Why the only table that failed did so, and what to do."""
    [table] = lake.writer.failed_tables()
    return table.reason, table.hint


@pytest.mark.requirement("P-05")
def test_the_text_of_an_unfit_value_is_kept_where_the_statement_keeps_it(opened: Opened) -> None:
    rules = sql("SELECT * FROM changes")
    rules |= sql("SELECT id, amount, _sequence FROM changes", "public.parts")
    lake = opened(transforms=rules)
    for name in ("orders", "parts"):
        table = lake.table(name)
        lake.commit(put(table, **order(1)), put(table, **{**order(2), "amount": "NaN"}))
    lake.write()
    assert {row["id"]: (row["amount"], row["_rescued"]) for row in lake.rows(own=True)} == {
        1: (Decimal("1.00"), None),
        2: (None, '{"amount":"NaN"}'),
    }
    parts = lake.rows("parts", own=True)
    assert {row["id"]: row["amount"] for row in parts} == {1: Decimal("1.00"), 2: None}
    assert "_rescued" not in parts[0]
    assert lake.writer.failed_tables() == []
    lake.log.close()


def test_each_row_is_what_the_statement_makes_of_it(opened: Opened) -> None:
    lake = opened(transforms=sql(LARGE))
    commented = (msgspec.structs.replace(each, comment=f"the {each.name}") for each in ORDERS)
    orders = lake.table("orders", tuple(commented))
    lake.commit(*(put(orders, **order(number)) for number in range(1, 5)))
    lake.commit(put(orders, **order(5, "hidden")), put(orders, Op.READ, **order(6)))
    lake.write()
    fields = {each.name: each.metadata for each in lake.delta().schema().fields}
    assert fields["amount"] == {"comment": "the amount"}, "it is selected as it is"
    assert fields["twice"] == {}, "it is computed"
    stored = lake.rows()
    assert [(row["id"], row["twice"]) for row in stored] == [
        (number, Decimal("2.00")) for number in (1, 2, 3, 4, 6)
    ]
    assert stored[0].keys() == {"id", "status", "amount", "note", "twice"}

    lake.commit(
        put(orders, Op.UPDATE, **order(1, "hidden")),  # leaves
        put(orders, Op.UPDATE, **order(5)),  # comes in
        put(orders, Op.UPDATE, was={"id": 2}, **order(22)),  # moves
        put(orders, Op.UPDATE, was={"id": 3}, **order(33, "hidden")),  # moves away
        remove(orders, id=4),
        put(orders, Op.UPDATE, **(order(6) | {"amount": "7.00"})),
    )
    lake.write()
    assert [(row["id"], row["twice"]) for row in lake.rows()] == [
        (22, Decimal("2.00")),
        (5, Decimal("2.00")),
        (6, Decimal("14.00")),
    ]


def test_tables_without_a_statement_go_their_own_way_in_the_same_batch(opened: Opened) -> None:
    lake = opened(transforms=sql(LARGE))
    orders, other = lake.table("orders"), lake.table("other")
    lake.snapshot(other, [order(number) for number in range(1, 4)])
    lake.commit(put(orders, **order(1, "hidden")), put(other, **order(9, "hidden")))
    lake.write()
    assert lake.rows() == []
    assert lake.rows("other") == lake.expected("other")
    assert len(lake.rows("other")) == 4


@pytest.mark.requirement("P-26")
@pytest.mark.parametrize("keep", ["rows", "history"])
def test_random_changes_end_in_what_the_statement_leaves_of_the_source(
    opened: Opened, keep: str
) -> None:
    chance = random.Random(11)
    lake = opened(transforms=sql(LARGE), keep=keep)
    orders = lake.table("orders")
    there: set[int] = set()
    for _ in range(3):
        for _ in range(24):
            number, status = chance.randrange(15), chance.choice(["new", "hidden"])
            row = order(number, status) | {"amount": f"{chance.randrange(999)}.00"}
            if chance.random() < 0.04:
                lake.commit(truncate(orders))
                there.clear()
            elif number not in there:
                lake.commit(put(orders, **row))
                there.add(number)
            elif chance.random() < 0.3:
                lake.commit(remove(orders, id=number))
                there.remove(number)
            else:
                free = [each for each in range(15) if each not in there]
                moved = chance.choice(free) if free and chance.random() < 0.3 else number
                lake.commit(put(orders, Op.UPDATE, was={"id": number}, **(row | {"id": moved})))
                there.remove(number)
                there.add(moved)
        lake.write()
        if chance.random() < 0.5:
            lake.writer.write(lake.changes(0, lake.written), lake.batches - 1)  # all of it again
        expected = [
            row | {"twice": row["amount"] * 2}
            for row in lake.expected()
            if row["status"] != "hidden"
        ]
        stored = lake.rows(own=True)
        now = [row for row in stored if keep == "rows" or row["_current"]]
        assert sorted(_plain(row) for row in now) == sorted(_plain(row) for row in expected)


def _plain(row: Row) -> list[Any]:
    return sorted((name, str(value)) for name, value in row.items() if not name.startswith("_"))


def test_values_of_every_type_come_through_as_they_are(opened: Opened) -> None:
    lake = opened(transforms=sql("SELECT * FROM changes", "public.kinds"))
    kinds = lake.table("kinds", EVERY_TYPE)
    key: Row = {"id": "2025-01-15T10:30:00.000001Z", "number": 1}
    row: Row = key | {
        "small": -32768,
        "real": "NaN",
        "double": "-Infinity",
        "exact": "1234567890123456.7891",
        "yes": True,
        "day": "0001-01-01",
        "wall": "9999-12-31T23:59:59.999999Z",
        "bytes": "AP8=",
        "names": ["a", None, ""],
        "document": {"n": 1},
    }
    empty: Row = dict.fromkeys(row) | key | {"number": 2}
    lake.commit(put(kinds, **row), put(kinds, **empty), put(kinds, **(empty | {"number": 3})))
    lake.write()
    first, second, _ = sorted(lake.rows("kinds"), key=lambda each: int(each["number"]))
    assert first | {"real": None} == {
        "id": datetime(2025, 1, 15, 10, 30, 0, 1, tzinfo=UTC),
        "number": 1,
        "small": -32768,
        "real": None,
        "double": float("-inf"),
        "exact": Decimal("1234567890123456.7891"),
        "yes": True,
        "day": date(1, 1, 1),
        "wall": datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC).replace(tzinfo=None),
        "bytes": b"\x00\xff",
        "names": ["a", None, ""],
        "document": '{"n":1}',
    }
    assert first["real"] != first["real"]
    assert {name for name, value in second.items() if value is not None} == {"id", "number"}
    lake.commit(remove(kinds, **key), remove(kinds, **(key | {"number": 2})))
    lake.write()
    assert [each["number"] for each in lake.rows("kinds")] == [3]


def test_columns_that_come_and_go_are_followed(opened: Opened) -> None:
    lake = opened(transforms=sql("SELECT *, id + 1 AS next FROM changes"))
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)))
    lake.write()
    grown = lake.table("orders", (*orders.columns, Column("colour", "text")))
    lake.commit(put(orders, **order(2)), schema(grown))
    lake.commit(put(grown, **order(3), colour="red"))
    lake.write()
    assert {(row["id"], row["colour"], row["next"]) for row in lake.rows()} == {
        (1, None, 2),
        (2, None, 3),
        (3, "red", 4),
    }


def marked(changes: DataFrame) -> DataFrame:
    return changes.withColumn("kind", F.upper("_change_type")).drop("note")


def no_frame(_changes: DataFrame) -> int:
    return 7


def broken(_changes: DataFrame) -> DataFrame:
    raise LookupError("no such rule")


def test_a_function_gets_every_table_that_its_pattern_names(opened: Opened) -> None:
    lake = opened(transforms={"*": TableTransform(function=f"{__name__}:marked")})
    one, two = lake.table("orders"), lake.table("two")
    lake.commit(put(one, **order(1)), put(two, **order(2)))
    lake.write()
    lake.commit(put(two, Op.UPDATE, **order(2, "paid")))
    lake.write()
    [first], [second] = lake.rows(), lake.rows("two")
    assert first == {"id": 1, "status": "new", "amount": Decimal("1.00"), "kind": "INSERT"}
    assert (second["status"], second["kind"]) == ("paid", "UPDATE_POSTIMAGE")


HINT = "Correct the transform (`headrace check` tries it), then reset the sink."


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            {"sql": "SELECT id FROM changes"},
            "the column _sequence is missing from the result, which has: id",
        ),
        ({"sql": "SELECT _sequence FROM changes"}, "the column id is missing from the result"),
        ({"sql": "SELECT *, 1 AS id FROM changes"}, "the column id is twice in the result"),
        ({"sql": "SELECT *, 1 AS a, 2 AS a FROM changes"}, "the column a is twice in the result"),
        ({"sql": "SELECT * FROM nowhere"}, "[TABLE_OR_VIEW_NOT_FOUND]"),
        ({"sql": "SELECT nothing FROM changes"}, "[UNRESOLVED_COLUMN.WITH_SUGGESTION]"),
        ({"sql": "SELECT * FROM changes )"}, "[PARSE_SYNTAX_ERROR]"),
        ({"sql": "SELECT *, struct(id) AS s FROM changes"}, "to_json(s)"),
        ({"sql": "SELECT *, CAST(note AS int) AS n FROM changes"}, "CAST_INVALID_INPUT"),
        ({"sql": "SELECT * FROM changes UNION ALL SELECT * FROM changes"}, "comes out 2 times"),
        (
            {"sql": "SELECT _sequence, id + 1 AS id FROM changes"},
            "the key of change 1 comes out as another one",
        ),
        (
            {"sql": "SELECT * EXCEPT (_sequence), 0 AS _sequence FROM changes"},
            "a row comes out whose _sequence no change has",
        ),
        (
            {"sql": "SELECT * EXCEPT (_sequence), CAST(NULL AS bigint) AS _sequence FROM changes"},
            "a row comes out without _sequence",
        ),
        ({"function": f"{__name__}:no_frame"}, "returns int, not a DataFrame"),
        ({"function": f"{__name__}:broken"}, "raises LookupError in broken, line"),
    ],
)
def test_what_does_not_fit_fails_its_table_alone_and_says_why(
    opened: Opened, rule: dict[str, Any], said: str
) -> None:
    lake = opened(transforms={"public.orders": TableTransform(**rule)})
    orders, other = lake.table("orders"), lake.table("other")
    lake.commit(put(orders, **(order(1) | {"note": "s3cret"})), put(other, **order(1)))
    lake.write()
    reason, hint = failed(lake)
    assert reason.startswith("lake.transforms.public.orders: ")
    assert said in reason or said in hint
    assert "s3cret" not in reason + hint
    assert len(lake.rows("other")) == 1


def test_a_row_in_part_fails_its_table_and_says_what_to_do(opened: Opened) -> None:
    lake = opened(transforms=sql(LARGE))
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)))
    lake.write()
    lake.commit(put(orders, Op.UPDATE, id=1, status="new", amount="1.00"))
    lake.write()
    reason, _ = failed(lake)
    assert reason == (
        "lake.transforms.public.orders: sql: change 2 comes without note; "
        "run ALTER TABLE … REPLICA IDENTITY FULL on the server"
    )


def test_a_new_snapshot_makes_up_for_rows_that_failed(opened: Opened) -> None:
    lake = opened(transforms=sql("SELECT *, 1 / (id - 1) AS n FROM changes"))
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)))
    lake.write()
    assert "DIVIDE_BY_ZERO" in failed(lake)[0]
    lake.commit(put(orders, **order(2)))
    lake.write()
    assert failed(lake)
    lake.commit(truncate(orders, snapshot=True))
    lake.commit(put(orders, Op.READ, **order(3)))
    lake.write()
    assert lake.writer.failed_tables() == []
    assert [(row["id"], row["n"]) for row in lake.rows()] == [(3, 0.5)]


def test_another_statement_needs_another_beginning(opened: Opened, spark: SparkSession) -> None:
    lake = opened(transforms=sql(LARGE))
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)))
    lake.write()
    lake.sink = Tables(name="lake", path=str(lake.path), transforms=sql("SELECT * FROM changes"))
    lake.open()
    lake.commit(put(orders, **order(2)))
    lake.write()
    reason, hint = failed(lake)
    assert "was filled with another transform" in reason
    assert hint == "Run `headrace reset lake`: it fills the tables again."


def test_a_key_of_ones_own_is_known_by_its_old_row(opened: Opened) -> None:
    lake = opened(
        transforms=sql("SELECT * FROM changes"), keys={"public.orders": ("status", "note")}
    )
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)))
    lake.write()
    old = order(1)
    new = order(1) | {"note": "other"}
    update = put(orders, Op.UPDATE, was=old, **new)
    lake.commit(update)
    lake.write()
    assert [row["note"] for row in lake.rows()] == ["other"]
    gone = change(
        Op.DELETE, orders, key=b'{"id":1}', before=update.after, before_kind=BeforeKind.FULL
    )
    lake.commit(gone)
    lake.write()
    assert lake.rows() == []


def test_a_key_of_ones_own_fails_where_the_old_one_does_not_come(opened: Opened) -> None:
    lake = opened(transforms=sql("SELECT * FROM changes"), keys={"public.orders": ("note",)})
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)))
    lake.write()
    lake.commit(put(orders, Op.UPDATE, **(order(1) | {"note": "other"})))
    lake.write()
    assert "change 2 comes without note; run ALTER TABLE" in failed(lake)[0]


def test_columns_of_any_name_come_through(opened: Opened) -> None:
    odd = (Column("id", "bigint", key=True), Column("a.b`c", "text"), Column("Grün", "text"))
    row: Row = {"id": 1, "a.b`c": "x", "Grün": "y"}
    lake = opened(transforms=sql("SELECT * FROM changes"))
    orders = lake.table("orders", odd)
    lake.commit(put(orders, **row))
    lake.write()
    assert lake.rows() == [row]


def test_names_that_spark_cannot_tell_apart_fail_their_table_alone(opened: Opened) -> None:
    twice = (Column("id", "bigint", key=True), Column("Name", "text"), Column("name", "text"))
    lake = opened(transforms={"*": TableTransform(sql="SELECT * FROM changes")})
    orders, other = lake.table("orders", twice), lake.table("other")
    lake.commit(put(orders, id=1, Name="x", name="y"), put(other, **order(1)))
    lake.write()
    assert "Delta takes no table with the columns" in failed(lake)[0]
    assert len(lake.rows("other")) == 1


def test_a_table_without_a_key_gets_what_comes_out(opened: Opened) -> None:
    lake = opened(transforms=sql("SELECT * FROM changes WHERE status <> 'hidden'"))
    loose = lake.table("orders", [Column(c.name, c.type) for c in lake.table("orders").columns])
    lake.commit(put(loose, **order(1)), put(loose, **order(2, "hidden")), put(loose, **order(3)))
    lake.write()
    assert [row["id"] for row in lake.rows()] == [1, 3]


def test_what_a_truncate_takes_away_in_the_same_batch_may_fail(opened: Opened) -> None:
    lake = opened(transforms=sql("SELECT *, 1 / (id - 1) AS n FROM changes"))
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)))
    lake.commit(truncate(orders, snapshot=True))
    lake.commit(put(orders, Op.READ, **order(3)))
    lake.write()
    assert lake.writer.failed_tables() == []
    assert [row["id"] for row in lake.rows()] == [3]


def test_a_key_whose_type_changes_within_a_batch_is_followed(opened: Opened) -> None:
    lake = opened(transforms=sql("SELECT * FROM changes"))
    orders = lake.table("orders", (Column("id", "integer", key=True), Column("note", "text")))
    lake.commit(put(orders, id=1, note="a"), put(orders, id=2, note="b"))
    wider = lake.table("orders", (Column("id", "bigint", key=True), Column("note", "text")))
    lake.commit(schema(wider), put(wider, Op.UPDATE, id=2, note="c"), remove(wider, id=1))
    lake.write()
    assert lake.rows() == [{"id": 2, "note": "c"}]
