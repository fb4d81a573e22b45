"""Changes as rows, as a changelog and reduced to the last of each key: lists in, lists out."""

import datetime as dt
import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.testing import assertDataFrameEqual

from headrace.change.arrow import row_schema
from headrace.change.arrow.frame import FIELDS, schema
from headrace.change.event import Column, Table
from headrace.errors import ConfigError
from headrace.pipeline.transforms import as_changelog, latest_per_key, rows

AT = dt.datetime(2025, 1, 15, 10, 30, tzinfo=dt.UTC)
USERS = Table(
    "shop",
    "postgres",
    "origin-1",
    "shop",
    "public",
    "users",
    (Column("id", "bigint", key=True), Column("name", "text"), Column("doc", "jsonb")),
)
TYPED = (
    ("id", "bigint", "9223372036854775807", 2**63 - 1),
    ("price", "numeric(12,2)", '"12.50"', Decimal("12.50")),
    ("ratio", "double precision", "-0", -0.0),
    ("size", "real", "7.038531e-26", 7.038530691851209e-26),
    ("at", "timestamp with time zone", '"2025-01-15T10:30:00.000001+00:00"', None),
    ("local", "timestamp(3) without time zone", '"2025-01-15T10:30:00Z"', AT.replace(tzinfo=None)),
    ("day", "date", '"2025-01-15"', dt.date(2025, 1, 15)),
    ("ok", "boolean", "true", True),
    ("raw", "bytea", '"AP8="', bytearray(b"\x00\xff")),
    ("tags", "text[]", '["a",null,""]', ["a", None, ""]),
    ("doc", "jsonb", '{"n": 12345678901234567890.10}', '{"n": 12345678901234567890.10}'),
    ("mood", "public.mood", '"so \\"so\\""', 'so "so"'),
)


def change(sequence: int, op: str, key: Any = None, **told: Any) -> dict[str, Any]:
    """A change of `users` in a transaction of its own; images as Python values or JSON text."""
    ordinal = told.pop("ordinal", 1)
    images = {
        name: value
        if isinstance(value, str) or value is None
        else msgspec.json.encode(value).decode()
        for name, value in (("key", key), *told.items())
        if name in ("key", "before", "after")
    }
    given = {
        "sequence": sequence,
        "op": op,
        "source": "shop",
        "connector": "postgres",
        "schema": "public",
        "table": "users",
        "unchanged": [],
        "before_kind": "none",
        "transaction": {"id": "7", "ordinal": ordinal, "last": True, "commit_time": AT},
        "row_schema": row_schema(USERS),
        "epoch": "e",
    }
    return {**dict.fromkeys(FIELDS), **given, **told, **images}


def frame(spark: SparkSession, *changes: Mapping[str, Any]) -> DataFrame:
    return spark.createDataFrame(pa.Table.from_pylist(list(changes), schema()))


def latest(spark: SparkSession, *changes: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """The last change of each key: its sequence, op, key, new image and absent columns."""
    reduced = latest_per_key(frame(spark, *changes))
    assert reduced.schema == frame(spark).schema
    return sorted(
        (
            row.sequence,
            row.op,
            row.key and json.loads(row.key).get("id"),
            row.after and json.loads(row.after),
            row.unchanged,
        )
        for row in reduced.collect()
    )


# --- rows ----------------------------------------------------------------------------------------


def test_rows_have_the_exact_values_of_the_images(spark: SparkSession) -> None:
    columns = tuple(Column(name, type_text) for name, type_text, _, _ in TYPED)
    members = ",".join(f'"{name}":{text}' for name, _, text, _ in TYPED)
    table = rows(
        frame(spark, change(5, "INSERT", {"id": 1}, after=f"{{{members}}}")),
        "public.users",
        columns=columns,
    )
    [row] = table.selectExpr("*", "date_format(at, 'HH:mm:ss.SSSSSS') AS clock").collect()
    assert row.clock == "10:30:00.000001"
    assert {name: row[name] for name, _, _, value in TYPED if value is not None} == {
        name: value for name, _, _, value in TYPED if value is not None
    }
    assert str(row.ratio) == "-0.0"
    assert [field.dataType.simpleString() for field in table.schema.fields[4:]] == [
        "bigint", "decimal(12,2)", "double", "float", "timestamp", "timestamp_ntz", "date",
        "boolean", "binary", "array<string>", "string", "string", "string",
    ]  # fmt: skip


def test_rows_are_those_of_the_table_with_old_values_where_a_row_is_gone(
    spark: SparkSession,
) -> None:
    changes = frame(
        spark,
        change(1, "READ", {"id": 1}, after={"id": 1, "name": "a", "doc": None}),
        change(2, "UPDATE", {"id": 1}, after={"id": 1, "name": "b"}, unchanged=["doc"]),
        change(3, "DELETE", {"id": 1}, before={"id": 1}, before_kind="key"),
        change(4, "DELETE", {"id": 2}, before={"id": 2, "name": "c"}, before_kind="full"),
        change(5, "TRUNCATE", after={"cascade": False}),
        change(6, "INSERT", {"id": 9}, after={"id": 9}, table="orders"),
    )
    expected = [
        Row(_sequence=1, _op="READ", _absent=[], id=1, name="a", doc=None),
        Row(_sequence=2, _op="UPDATE", _absent=["doc"], id=1, name="b", doc=None),
        Row(_sequence=3, _op="DELETE", _absent=[], id=1, name=None, doc=None),
        Row(_sequence=4, _op="DELETE", _absent=[], id=2, name="c", doc=None),
    ]
    table = rows(changes, USERS).drop("_commit_timestamp", "_rescued")
    assertDataFrameEqual(table, spark.createDataFrame(expected, table.schema))


def test_documents_may_come_as_variants(spark: SparkSession) -> None:
    changes = frame(spark, change(1, "INSERT", {"id": 1}, after={"id": 1, "doc": {"n": [7]}}))
    table = rows(changes, USERS, json="variant")
    assert table.selectExpr("doc:n[0]::int AS n").collect() == [Row(n=7)]


@pytest.mark.requirement("P-05")
def test_a_value_without_a_place_is_null_with_its_text_beside_it(spark: SparkSession) -> None:
    columns = (Column("born", "date", key=True),)
    changes = frame(spark, change(1, "INSERT", after={"born": "0044-03-15 BC"}))
    table = rows(changes, "public.users", columns=columns)
    [found] = table.select("born", "_rescued").collect()
    assert found == Row(born=None, _rescued='{"born":"0044-03-15 BC"}')
    kept = rows(changes, "public.users", columns=columns, as_text=frozenset({"born"}))
    assert kept.select("born").collect() == [Row(born="0044-03-15 BC")]


def test_rows_have_the_columns_of_the_last_change_unless_others_are_given(
    spark: SparkSession,
) -> None:
    later = msgspec.structs.replace(USERS, columns=(*USERS.columns, Column("age", "integer")))
    changes = frame(
        spark,
        change(2, "INSERT", {"id": 2}, after={"id": 2, "age": 7}, row_schema=row_schema(later)),
        change(1, "INSERT", {"id": 1}, after={"id": 1, "name": "Ann"}),
        change(3, "INSERT", {"id": 3}, after={"id": 3}, table="others"),
    )
    found = rows(changes, "public.users").orderBy("id").select("id", "name", "age").collect()
    assert [tuple(row) for row in found] == [(1, "Ann", None), (2, None, 7)]


def test_rows_of_unknown_columns_are_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match=r"no change of public\.users is here"):
        rows(frame(spark), "public.users")
    stream = spark.readStream.format("rate").load()
    with pytest.raises(ConfigError, match="a stream has no last change") as raised:
        rows(stream, "public.users")
    assert "log_table(" in raised.value.hint


# --- changelog -----------------------------------------------------------------------------------


def test_a_changelog_has_the_whole_old_row_where_it_is_known(spark: SparkSession) -> None:
    changes = frame(
        spark,
        change(1, "READ", {"id": 1}, after={"id": 1, "name": "a"}),
        change(2, "UPDATE", {"id": 1}, after={"id": 1, "name": "b"}, ordinal=1, unchanged=["doc"]),
        change(
            3,
            "UPDATE",
            {"id": 1},
            before={"id": 1, "name": "b"},
            before_kind="full",
            after={"id": 1, "name": "c"},
            ordinal=2,
        ),
        change(4, "DELETE", {"id": 1}, before={"id": 1}, before_kind="key", ordinal=3),
        change(5, "INSERT", {"id": 2}, after={"id": 2, "name": "d"}),
        change(
            6,
            "UPDATE",
            {"id": 3},
            before={"id": 2},
            before_kind="key",
            after={"id": 3, "name": "d"},
        ),
    )
    table = as_changelog(changes, USERS).drop("_commit_timestamp", "doc", "_rescued")
    names = ("_sequence", "_commit_version", "_change_type", "_absent", "id", "name")
    expected = [
        (1, 1, "insert", [], 1, "a"),
        (2, 2, "update_postimage", ["doc"], 1, "b"),
        (3, 2, "update_preimage", [], 1, "b"),
        (3, 2, "update_postimage", [], 1, "c"),
        (4, 2, "delete", [], 1, None),
        (5, 5, "insert", [], 2, "d"),
        (6, 6, "update_preimage", ["name", "doc"], 2, None),
        (6, 6, "update_postimage", [], 3, "d"),
    ]
    assert table.columns == list(names)
    assertDataFrameEqual(table, spark.createDataFrame(expected, table.schema))


# --- latest per key ------------------------------------------------------------------------------


def test_the_last_change_of_each_key_stays(spark: SparkSession) -> None:
    found = latest(
        spark,
        change(1, "INSERT", {"id": 1}, after={"id": 1, "name": "a"}),
        change(2, "INSERT", {"id": 2}, after={"id": 2, "name": "b"}),
        change(3, "UPDATE", {"id": 1}, after={"id": 1, "name": "c"}),
        change(4, "DELETE", {"id": 2}, before={"id": 2}, before_kind="key"),
        change(5, "MESSAGE", after={"text": "hello"}, table=""),
        change(6, "INSERT", {"id": 1}, after={"id": 1}, table="orders"),
    )
    assert found == [
        (3, "UPDATE", 1, {"id": 1, "name": "c"}, []),
        (4, "DELETE", 2, None, []),
        (6, "INSERT", 1, {"id": 1}, []),
    ]


def test_absent_columns_come_from_earlier_changes_to_the_last_digit(spark: SparkSession) -> None:
    image = '{"id":1,"name":"a","doc":{ "n": 12345678901234567890.10, "é": "\\u00e9/" }}'
    [row] = latest_per_key(
        frame(
            spark,
            change(1, "INSERT", {"id": 1}, after=image),
            change(2, "UPDATE", {"id": 1}, after={"id": 1, "name": "b"}, unchanged=["doc"]),
            change(3, "UPDATE", {"id": 1}, after={"id": 1, "name": "c"}, unchanged=["doc"]),
        )
    ).collect()
    assert row.after == image.replace('"a"', '"c"')
    assert row.unchanged == []


def test_what_no_change_tells_stays_absent(spark: SparkSession) -> None:
    found = latest(
        spark,
        change(1, "UPDATE", {"id": 1}, after={"id": 1, "name": "a"}, unchanged=["doc"]),
        change(2, "UPDATE", {"id": 1}, after={"id": 1}, unchanged=["name", "doc"]),
        change(3, "UPDATE", {"id": 2}, after={"id": 2}, unchanged=["doc"]),
    )
    assert found == [
        (2, "UPDATE", 1, {"id": 1, "name": "a"}, ["doc"]),
        (3, "UPDATE", 2, {"id": 2}, ["doc"]),
    ]


def test_nothing_before_a_delete_or_a_truncate_counts(spark: SparkSession) -> None:
    found = latest(
        spark,
        change(1, "INSERT", {"id": 1}, after={"id": 1, "doc": 1}),
        change(2, "DELETE", {"id": 1}, before={"id": 1}, before_kind="key"),
        change(3, "INSERT", {"id": 1}, after={"id": 1, "doc": None}),
        change(4, "INSERT", {"id": 2}, after={"id": 2, "doc": 2}, table="orders"),
        change(5, "TRUNCATE", after={}, table="orders"),
        change(6, "TRUNCATE", after={}, table="orders"),
        change(7, "INSERT", {"id": 2}, after={"id": 2}, unchanged=["doc"], table="orders"),
    )
    assert found == [
        (3, "INSERT", 1, {"id": 1, "doc": None}, []),
        (6, "TRUNCATE", None, {}, []),
        (7, "INSERT", 2, {"id": 2}, ["doc"]),
    ]


@pytest.mark.parametrize("kind", ["key", "full"])
def test_a_moved_row_leaves_a_delete_and_takes_its_absent_columns_along(
    spark: SparkSession, kind: str
) -> None:
    def moved(sequence: int, old: int, new: int) -> dict[str, Any]:
        return change(
            sequence,
            "UPDATE",
            {"id": new},
            before={"id": old} if kind == "key" else {"id": old, "name": "a"},
            before_kind=kind,
            after={"id": new, "name": "b"},
            unchanged=["doc"],
        )

    found = latest(
        spark,
        change(1, "INSERT", {"id": 1}, after={"id": 1, "name": "a", "doc": [1]}),
        moved(2, 1, 2),
        moved(3, 2, 3),
        change(4, "INSERT", {"id": 1}, after={"id": 1, "name": "new", "doc": None}),
        moved(5, 7, 8),
    )
    assert found == [
        (3, "DELETE", 2, None, []),
        (3, "UPDATE", 3, {"id": 3, "name": "b", "doc": [1]}, []),
        (4, "INSERT", 1, {"id": 1, "name": "new", "doc": None}, []),
        (5, "DELETE", 7, None, []),
        (5, "UPDATE", 8, {"id": 8, "name": "b"}, ["doc"]),
    ]


def test_changes_of_a_table_without_a_key_all_stay(spark: SparkSession) -> None:
    found = latest(
        spark, change(1, "INSERT", after={"name": "a"}), change(2, "INSERT", after={"name": "a"})
    )
    assert [sequence for sequence, *_ in found] == [1, 2]


def test_no_changes_are_no_rows(spark: SparkSession) -> None:
    assert latest(spark) == []
    assert rows(frame(spark), USERS).count() == 0
