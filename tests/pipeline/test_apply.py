"""`apply_changes`: tables kept equal to their source by a Spark job of one's own."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from headrace.change.event import BeforeKind, Change, Column, Op, Table
from headrace.errors import ConfigError, SinkFenced
from headrace.pipeline import apply_changes
from headrace.pipeline.checkpoint import writer_of
from headrace.sinks.tables.sink import Tables
from tests.sinks.lake import Lake, Row, change, put, remove

NOTES = (Column("author", "text"), Column("at", "integer"), Column("line", "text"))
ALL = {"availableNow": True}


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[Lake]:
    made = Lake(spark, tmp_path)
    yield made
    made.log.close()


def stream(lake: Lake, **options: Any) -> DataFrame:
    reader = lake.spark.readStream.format("headrace").option("path", str(lake.log.path))
    return reader.options(**options).load()


def applied(lake: Lake, changes: DataFrame | None = None, **more: Any) -> None:
    """Apply all there is."""
    more = {"checkpoint": lake.folder / "checkpoint", "trigger": ALL, **more}
    apply_changes(
        stream(lake) if changes is None else changes, into=lake.path, **more
    ).awaitTermination()


def order(number: int, status: str = "new") -> Row:
    return {"id": number, "status": status, "amount": "1.00", "note": "-"}


def note(table: Table, op: Op, row: Row | None, old: Row | None = None, absent: str = "") -> Change:
    """A change as a table without a key sends it, with REPLICA IDENTITY FULL."""
    row = {name: value for name, value in row.items() if name != absent} if row else None
    return change(
        op,
        table,
        after=json.dumps(row).encode() if row else None,
        before=json.dumps(old).encode() if old else None,
        before_kind=BeforeKind.FULL if old else BeforeKind.NONE,
        unchanged=(absent,) if absent else (),
    )


def line(author: str | None, at: int, text: str) -> Row:
    return {"author": author, "at": at, "line": text}


def test_tables_equal_their_source_and_go_on_from_the_checkpoint(lake: Lake) -> None:
    orders, customers = lake.table("orders"), lake.table("customers")
    lake.commit(*(put(orders, **order(n)) for n in range(5)), put(customers, **order(7)))
    lake.commit(put(orders, **(order(5) | {"amount": "NaN"})))
    applied(lake, stream(lake, maxChangesPerBatch=1))
    lake.commit(put(orders, Op.UPDATE, **order(1, "paid")), remove(orders, id=2))
    applied(lake)
    assert lake.rows() == lake.expected()
    assert lake.rows("customers") == lake.expected("customers")
    assert {row["_rescued"] for row in lake.rows(own=True)} == {None, '{"amount":"NaN"}'}


def test_a_lost_checkpoint_applies_nothing_twice(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)), put(orders, **order(2)))
    applied(lake)
    lake.commit(remove(orders, id=1))
    applied(lake)
    version = lake.delta().version()
    shutil.rmtree(lake.folder / "checkpoint")
    applied(lake)
    assert lake.delta().version() == version
    assert lake.rows() == lake.expected()


def test_one_table_alone_and_every_version_of_its_rows(lake: Lake) -> None:
    orders, customers = lake.table("orders"), lake.table("customers")
    lake.commit(put(orders, **order(1)), put(customers, **order(7)))
    lake.commit(put(orders, Op.UPDATE, **order(1, "paid")))
    applied(lake, table="public.orders", keep="history", as_text=("public.orders.amount",))
    assert not (lake.path / "public" / "customers").exists()
    rows = sorted(lake.rows(own=True), key=lambda row: row["_sequence"])
    assert [(row["status"], row["amount"], row["_current"]) for row in rows] == [
        ("new", "1.00", False),
        ("paid", "1.00", True),
    ]


def test_chosen_keys_make_a_table_without_a_key_follow_its_source(lake: Lake) -> None:
    notes = lake.table("notes", NOTES)
    first, second, third = line("ann", 1, "a"), line("bob", 1, "b"), line(None, 2, "c")
    lake.commit(*(note(notes, Op.INSERT, row) for row in (first, second, third)))
    keys = ["author", "at"]
    applied(lake, table="public.notes", keys=keys)
    lake.commit(note(notes, Op.UPDATE, line("ann", 1, "A"), first))
    lake.commit(note(notes, Op.UPDATE, line("eve", 3, "-"), second, absent="line"))
    lake.commit(note(notes, Op.DELETE, None, third))
    lake.commit(note(notes, Op.INSERT, line("dan", 4, "d")))
    applied(lake, table="public.notes", keys=keys)
    found = {(row["author"], row["at"]): row["line"] for row in lake.rows("notes")}
    assert found == {("ann", 1): "A", ("eve", 3): "b", ("dan", 4): "d"}
    assert Tables(name="notes", path=str(lake.path)).failed_tables() == []


def test_chosen_keys_need_the_old_values(lake: Lake) -> None:
    orders, customers = lake.table("orders"), lake.table("customers")
    lake.commit(put(orders, **order(1)), put(customers, **order(7)))
    lake.commit(put(orders, Op.UPDATE, **order(1, "paid")))
    keys = {"public.orders": ["status"], "public.customers": ["id", "nmae"]}
    applied(lake, keys=keys)
    troubled = {
        each.table: each for each in Tables(name="lake", path=str(lake.path)).failed_tables()
    }
    assert "without the value of status" in troubled["public.orders"].reason
    assert "REPLICA IDENTITY FULL" in troubled["public.orders"].hint
    assert "keys names column nmae" in troubled["public.customers"].reason


def test_part_of_a_key_needs_no_old_row(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)), put(orders, **order(2)))
    lake.commit(put(orders, Op.UPDATE, **order(1, "paid")), remove(orders, id=2))
    applied(lake, keys={"public.orders": ["id"]})
    assert lake.rows() == lake.expected()


def test_an_error_in_a_batch_says_what_happened_and_what_to_do(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)))
    applied(lake)
    lake.commit(put(orders, **order(2)))
    query = apply_changes(stream(lake), into=lake.path, checkpoint=lake.folder / "checkpoint")
    try:
        query.processAllAvailable()
        other = lake.open("another", adopt=True)
        lake.commit(put(orders, **order(3)))
        other.write(lake.changes(2, 3), 0)
        lake.commit(put(orders, **order(4)))
        with pytest.raises(StreamingQueryException) as raised:
            query.awaitTermination(60)
    finally:
        query.stop()
    assert "headrace.errors.SinkFenced: another pipeline" in str(raised.value)
    assert "Stop the other one" in str(raised.value)
    with pytest.raises(SinkFenced):
        applied(lake)
    applied(lake, adopt=True)
    assert lake.rows() == lake.expected()


def test_what_cannot_be_applied_is_refused_before_a_query_starts(lake: Lake) -> None:
    lake.commit(put(lake.table("orders"), **order(1)))
    with pytest.raises(ConfigError, match="no stream"):
        applied(lake, lake.spark.read.format("headrace").load(path=str(lake.log.path)))
    with pytest.raises(ConfigError, match="no column row_schema"):
        applied(lake, stream(lake).drop("row_schema"))
    with pytest.raises(ConfigError, match="keys without table"):
        applied(lake, keys=["id"])
    with pytest.raises(ConfigError, match="a list of columns"):
        applied(lake, table="public.orders", keys="id")
    with pytest.raises(ConfigError, match="names no column"):
        applied(lake, keys={"public.orders": []})
    assert not lake.path.exists() or not list(lake.path.rglob("*.parquet"))


def test_the_writer_follows_from_where_the_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: list[str | Path] = [
        tmp_path / "point",
        "point",
        f"{tmp_path}/point/",
        (tmp_path / "point").as_uri(),
    ]
    assert len({writer_of(name) for name in names}) == 1
    assert writer_of("s3://bucket/point") == writer_of("s3://bucket/point/")
    assert writer_of("s3://bucket/point") != writer_of("s3://bucket/other")
