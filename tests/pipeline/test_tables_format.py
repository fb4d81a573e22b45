"""`format("headrace.tables")`: Delta tables as a sink and a source of Spark's own."""

import os
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.datasource import EqualTo

from headrace.change.event import Column, Op
from headrace.errors import ConfigError
from headrace.pipeline.table_options import _KNOWN, _SPARKS, TableOptions
from headrace.pipeline.table_reader import FilteredTableReader, TableReader
from headrace.sinks.lake.storage import Folder
from headrace.sinks.tables.sink import Tables
from headrace.sinks.tables.staged import ChangeStage, StagedInput
from tests.sinks.lake import ORDERS, Lake, Shop, order, put, remove, truncate

CHECKPOINT = "checkpointLocation"


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[Lake]:
    made = Lake(spark, tmp_path)
    yield made
    made.log.close()


def changes(lake: Lake, **options: Any) -> DataFrame:
    reader = lake.spark.readStream.format("headrace").option("path", str(lake.log.path))
    return reader.options(**options).load()


def applied(lake: Lake, stream: DataFrame | None = None, **options: Any) -> None:
    """Apply all there is."""
    given = {CHECKPOINT: str(lake.folder / "checkpoint"), **options}
    writer = (changes(lake) if stream is None else stream).writeStream.format("headrace.tables")
    query = writer.options(**given).trigger(availableNow=True).start(str(lake.path))
    query.awaitTermination()


def staged_files(lake: Shop) -> list[Path]:
    return [each for each in (lake.path / "_headrace" / "staged").glob("*") if each.is_file()]


def read(lake: Lake, **options: Any) -> DataFrame:
    reader = lake.spark.read.format("headrace.tables").option("table", "public.orders")
    return reader.options(**options).load(str(lake.path))


# --- the sink ------------------------------------------------------------------------------------


def test_a_stream_into_the_format_keeps_tables_equal_to_their_source(lake: Lake) -> None:
    orders, customers = lake.table("orders"), lake.table("customers")
    lake.commit(*(put(orders, **order(n)) for n in range(5)), put(customers, **order(7)))
    lake.commit(put(orders, Op.UPDATE, id=1, status="paid"), remove(orders, id=2))
    lake.commit(put(orders, Op.UPDATE, was={"id": 3}, id=30, status="moved"))
    lake.commit(put(orders, Op.UPDATE, id=1, amount="NaN"))
    applied(lake, changes(lake, maxChangesPerTrigger=6))
    assert lake.rows() == lake.expected()
    assert lake.rows("customers") == lake.expected("customers")
    lake.commit(truncate(customers), put(customers, **order(8)))
    applied(lake)
    assert lake.rows("customers") == lake.expected("customers")
    assert staged_files(lake) == []
    # Without its checkpoint the query begins again, and applies nothing twice.
    version = lake.delta().version()
    shutil.rmtree(lake.folder / "checkpoint")
    applied(lake)
    assert lake.delta().version() == version
    # The rows can be read by the same name.
    found = read(lake).orderBy("id").select("id", "status", "_rescued").collect()
    assert [tuple(row) for row in found] == [
        (0, "new", None),
        (1, "paid", '{"amount":"NaN"}'),
        (4, "new", None),
        (30, "moved", None),
    ]


def test_rows_in_any_order_are_applied_in_that_of_the_log(lake: Lake) -> None:
    orders = lake.table("orders")
    for number in range(40):
        op = Op.UPDATE if number > 3 else Op.INSERT
        lake.commit(put(orders, op, **order(number % 4, f"{number}")))
    applied(lake, changes(lake).repartition(3, F.rand(seed=1)))
    assert lake.rows() == lake.expected()


def test_a_batch_write_applies_what_the_tables_do_not_have(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(*(put(orders, **order(n)) for n in range(3)))

    def write(**options: str) -> None:
        log = lake.spark.read.format("headrace").load(path=str(lake.log.path))
        log.write.format("headrace.tables").mode("append").options(**options).save(str(lake.path))

    write()
    lake.commit(remove(orders, id=0))
    write()
    assert lake.rows() == lake.expected()
    with pytest.raises(PySparkException, match="SinkFenced: another pipeline writes"):
        applied(lake)  # a query is another writer …
    assert staged_files(lake) == []
    lake.commit(put(orders, **order(9)))
    applied(lake, adopt="true")  # … which may take over
    assert lake.rows() == lake.expected()
    with pytest.raises(PySparkException, match="not overwritten"):
        lake.spark.read.format("headrace").load(path=str(lake.log.path)).write.format(
            "headrace.tables"
        ).mode("overwrite").save(str(lake.path))


def test_one_table_with_settings(lake: Lake) -> None:
    orders, customers = lake.table("orders"), lake.table("customers")
    lake.commit(put(orders, **order(1)), put(customers, **order(7)))
    lake.commit(put(orders, Op.UPDATE, **order(1, "paid")))
    applied(lake, table="public.orders", keep="history", asText="public.orders.amount", keys="id")
    assert not (lake.path / "public" / "customers").exists()
    rows = sorted(lake.rows(own=True), key=lambda row: row["_sequence"])
    assert [(row["status"], row["amount"], row["_current"]) for row in rows] == [
        ("new", "1.00", False),
        ("paid", "1.00", True),
    ]


def test_what_does_not_fit_is_refused_with_its_name(lake: Lake) -> None:
    lake.commit(put(lake.table("orders"), **order(1)))
    with pytest.raises(PySparkException, match="the changes have no column row_schema"):
        applied(lake, changes(lake).drop("row_schema"))
    with pytest.raises(PySparkException, match="there is no option 'key'; did you mean keys"):
        applied(lake, key="id")
    assert staged_files(lake) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "the option path is missing"),
        ({"path": "lake", "keys": "id"}, "the option keys does not say whose columns they are"),
        ({"path": "lake", "keys": '{"public.orders": "id"}'}, "must be columns between commas, or"),
        ({"path": "lake", "keep": "all"}, "the option keep must be rows or history, not 'all'"),
        ({"path": "lake", "fileMb": "x"}, "the option fileMb must be a number, not 'x'"),
        ({"path": "lake", "columns": "id"}, "the option columns is for reading"),
        ({"path": "lake", "table": "orders"}, "must be schema.table"),
    ],
)
def test_options_are_checked(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        str(TableOptions.read(given).sink)


def test_options_have_the_names_of_settings() -> None:
    given = {"path": "s3://lake/shop/", "keys": '{"a.b": ["x", "y"]}', "vacuumHours": "2"}
    assert TableOptions.read(given).sink == Tables(
        name="tables", path="s3://lake/shop", keys={"a.b": ("x", "y")}, vacuum_hours=2.0
    )
    with pytest.raises(ConfigError, match="the option checkpointLocation is missing"):
        assert TableOptions.read(given).stream_writer
    with pytest.raises(ConfigError, match="the option keys is for writing"):
        TableOptions.read(given).expect_reading()


def staged_rows(sequences: list[int], table: str = "orders") -> pa.RecordBatch:
    """Changes as a task gets them."""
    count = len(sequences)
    texts = {"source": "shop", "schema": "public", "table": table, "connector": "postgres"}
    texts |= {"epoch": "e", "op": "INSERT", "row_schema": '[{"name":"id","type":"bigint"}]'}
    columns: dict[str, Any] = {name: [text] * count for name, text in texts.items()}
    columns |= {"sequence": sequences, "schema_version": pa.array([1] * count, pa.int32())}
    columns |= {name: pa.nulls(count, pa.string()) for name in ("key", "before", "after")}
    columns["unchanged"] = pa.array([[]] * count, pa.list_(pa.string()))
    return pa.RecordBatch.from_pydict(columns)


def test_runs_are_as_few_as_the_order_allows_and_merged_in_order(tmp_path: Path) -> None:
    folder = Folder.of(str(tmp_path), {})
    stage = ChangeStage(folder, "query")
    first = stage.store(iter([staged_rows([1, 2]), staged_rows([3]), staged_rows([9, 7, 8])]))
    second = stage.store(iter([staged_rows([5]), staged_rows([4]), staged_rows([6, 10])]))
    other = stage.store(iter([staged_rows([20], "customers")]), table="public.orders")
    assert [(run.first, run.last) for run in first.runs] == [(1, 9)]
    assert [(run.first, run.last) for run in second.runs] == [(5, 5), (4, 10)]
    assert other.runs == []
    batch = StagedInput(folder, [first, second, other])
    assert [sequence for sequence, _, _ in batch._merged()] == list(range(1, 11))
    (seen,) = batch.scan().values()
    assert (seen.first_sequence, seen.last_sequence, seen.changes) == (1, 10, 10)


def test_files_of_a_killed_driver_are_deleted_and_those_of_others_when_old(tmp_path: Path) -> None:
    folder = Folder.of(str(tmp_path), {})
    for name in ("query", "query-2", "job"):
        ChangeStage(folder, name).store(iter([staged_rows([1])]))
    kept = tmp_path / "_headrace" / "staged"
    old = next(kept.glob("job.*"))
    os.utime(old, (time.time() - 90_000,) * 2)
    ChangeStage(folder, "query").clear()
    assert [each.name.partition(".")[0] for each in kept.iterdir()] == ["query-2"]


# --- the source ----------------------------------------------------------------------------------


def test_a_table_is_read_without_its_dead_rows(lake: Lake) -> None:
    lake.fill(range(10))
    lake.commit(*(remove(lake.table("orders"), id=n) for n in (2, 5)))
    lake.commit(put(lake.table("orders"), Op.UPDATE, id=7, status="paid"))
    lake.write()
    rows = read(lake).drop("_sequence").collect()
    assert sorted((row.asDict() for row in rows), key=lambda row: row["id"]) == sorted(
        lake.expected(), key=lambda row: row["id"]
    )
    assert read(lake, columns="status,id").columns == ["status", "id"]
    one = lake.spark.read.format("headrace.tables").load(str(lake.path / "public" / "orders"))
    assert one.count() == 8
    with pytest.raises(PySparkException, match="there is no Delta table in"):
        read(lake, table="public.nothing")
    with pytest.raises(PySparkException, match="the option columns names 'ids'"):
        read(lake, columns="ids")


def test_columns_partitions_and_types_come_as_delta_has_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(spark, tmp_path, partition_by={"public.orders": ("day",)})
    dated = (*ORDERS, Column("day", "date"), Column("seen", "timestamp with time zone"))
    orders = lake.table("orders", dated)
    when = "2026-01-31T10:30:00+00:00"
    lake.commit(put(orders, **order(1), day="2026-01-01", seen=when))
    lake.commit(put(orders, **order(2), day=None, seen=None))
    lake.write()
    lake.commit(put(lake.table("orders", (*dated, Column("late", "integer"))), **order(3),
                    day="2026-01-02", seen=when, late=4))  # fmt: skip
    lake.write()
    rows = read(lake).orderBy("id").collect()
    assert [(row.id, row.day, row.late) for row in rows] == [
        (1, date(2026, 1, 1), None),
        (2, None, None),
        (3, date(2026, 1, 2), 4),
    ]
    assert [row.day for row in read(lake, columns="day").where("day > '2026-01-01'").collect()] == [
        date(2026, 1, 2)
    ]
    assert read(lake).schema["seen"].dataType.simpleString() == "timestamp"
    lake.log.close()


def test_filters_pass_over_files_where_they_are_pushed(lake: Lake) -> None:
    for begin in (0, 100, 200):
        lake.fill(range(begin, begin + 3))
    files = sorted(lake.path.rglob("*.parquet"))
    gone = next(file for file in files if pa.parquet.read_table(file)["id"][0].as_py() == 100)
    gone.unlink()  # whoever reads it fails
    lake.spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        for condition, ids in {
            "id >= 200": [200, 201, 202],
            "id = 1": [1],
            "id IN (0, 2)": [0, 2],
            "id < 100 AND status = 'new'": [0, 1, 2],
        }.items():
            assert sorted(row.id for row in read(lake).where(condition).collect()) == ids, condition
        with pytest.raises(PySparkException, match="cannot be read"):
            read(lake).where("id > 50").collect()
    finally:
        lake.spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_a_filter_finds_decimals_whose_bounds_another_tool_has_rounded(tmp_path: Path) -> None:
    most = Decimal(2**64 - 1)
    rows = pa.table({"id": pa.array([Decimal(1), most], pa.decimal128(20))})
    write_deltalake(str(tmp_path), rows)
    reader = FilteredTableReader(TableOptions.read({"path": str(tmp_path)}))
    list(reader.pushFilters([EqualTo(("id",), most)]))
    found = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert most in pa.Table.from_batches(found)["id"].to_pylist()


def test_times_that_spark_wrote_in_its_own_way_are_read(tmp_path: Path) -> None:
    times = [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)]
    rows = pa.table({"at": pa.array(times, pa.timestamp("us", tz="UTC"))})
    write_deltalake(str(tmp_path), rows)
    [file] = tmp_path.glob("*.parquet")
    pa.parquet.write_table(rows, file, use_deprecated_int96_timestamps=True)
    reader = TableReader(TableOptions.read({"path": str(tmp_path)}))
    found = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert pa.Table.from_batches(found) == rows


def test_every_option_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name.strip(" `") for cell in cells for name in cell.split(",")}
    assert set(_KNOWN) - _SPARKS <= named
