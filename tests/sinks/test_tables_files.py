"""The files of Delta tables: what a batch writes, how they are laid out and written anew."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deltalake import write_deltalake
from pyspark.sql import SparkSession

from headrace.change.event import BeforeKind, Op
from headrace.errors import PipelineError, SinkUnavailable
from headrace.sinks import Progress
from headrace.sinks.lake.delta import Delta
from headrace.sinks.lake.plan import TableFailure, TableRef
from headrace.sinks.lake.storage import Folder
from headrace.sinks.tables import apply
from headrace.sinks.tables import target as targets
from headrace.sinks.tables.ledger import TablesLedger
from tests.deltas import stored
from tests.sinks.lake import ORDERS, Lake, order, put, remove, truncate
from tests.sinks.plain import PlainLake


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[Lake]:
    made = Lake(spark, tmp_path)
    yield made
    made.log.close()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.requirement("P-20")
@pytest.mark.slow
def test_a_change_of_a_million_rows_writes_little(lake: Lake) -> None:
    orders = lake.table("orders")
    for start in range(0, 1_000_000, 50_000):
        lake.snapshot(orders, block_rows(range(start, start + 50_000)))
    lake.write()
    before = size(lake.path)
    lake.commit(put(orders, Op.UPDATE, **order(777_777, "paid")))
    lake.write()
    assert size(lake.path) - before < 100_000
    assert stored(lake.delta(), ["id"]).num_rows == 1_000_000


@pytest.mark.parametrize("changes", [1, 10, 100])
def test_a_batch_writes_what_it_changes_and_leaves_the_files_alone(
    lake: Lake, changes: int
) -> None:
    lake.fill(range(5_000))
    before, files = size(lake.path), set(lake.delta().file_uris())
    orders = lake.table("orders")
    lake.commit(*(put(orders, Op.UPDATE, **order(n * 7, "paid")) for n in range(changes)))
    lake.write()
    assert files < set(lake.delta().file_uris())
    assert size(lake.path) - before < 20_000 + 100 * changes
    assert lake.rows() == lake.expected()


def test_a_share_larger_than_memory_is_applied_window_by_window(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.fill(range(20))
    monkeypatch.setattr(targets, "WINDOW_KEYS", 1)
    orders = lake.table("orders")
    for status in ("paid", "sent", "back"):
        # A window ends with a piece of the log, and this is more than one.
        large = order(1, status) | {"note": "x" * 600_000}
        lake.commit(*(put(orders, Op.UPDATE, **order(n, status)) for n in range(0, 20, 3)))
        lake.commit(remove(orders, id=3), put(orders, **order(3, status)))
        lake.commit(put(orders, Op.UPDATE, **large))
    lake.write()
    assert lake.rows() == lake.expected()
    versions = lake.delta().history()
    assert versions[0]["version"] == 2  # created, filled, and all of this at once


@pytest.mark.requirement("P-21")
def test_with_deletes_rewrite_every_reader_of_delta_reads_the_table(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(spark, tmp_path, deletes="rewrite")
    lake.fill(range(50))
    orders = lake.table("orders")
    lake.commit(put(orders, Op.UPDATE, **order(7, "paid")), remove(orders, id=8))
    lake.commit(put(orders, Op.UPDATE, was={"id": 9}, **order(109)))
    lake.write()
    assert lake.delta().protocol().min_reader_version == 1
    assert len(lake.delta().to_pyarrow_table()) == 49
    assert lake.rows() == lake.expected()
    lake.log.close()


def test_an_empty_text_is_no_partition(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path, partition_by={"public.orders": ("status",)})
    lake.commit(put(lake.table("orders"), **order(1, "")))
    lake.write()
    [failed] = lake.writer.failed_tables()
    assert "Delta cannot tell it from null" in failed.reason
    lake.log.close()


def test_a_partition_column_that_is_dropped_fails_its_table_alone(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(spark, tmp_path, partition_by={"public.orders": ("status",)})
    lake.fill(range(3))
    without = [column for column in ORDERS if column.name != "status"]
    lake.commit(put(lake.table("orders", without), id=9, amount="1.00", note=None))
    lake.commit(put(lake.table("other"), **order(1)))
    lake.write()
    [failed] = lake.writer.failed_tables()
    assert "column status is gone" in failed.reason
    assert len(lake.rows("other")) == 1
    lake.log.close()


def test_a_column_to_sort_by_must_be_there(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path, cluster_by={"public.orders": ("nothing",)})
    lake.fill(range(3))
    [failed] = lake.writer.failed_tables()
    assert "cluster_by names nothing" in failed.reason
    lake.log.close()


@pytest.mark.requirement("P-22")
def test_what_another_tool_adds_stops_its_table_alone_also_while_the_sink_writes(
    lake: Lake,
) -> None:
    lake.fill(range(3))
    lake.commit(put(lake.table("other"), **order(1)))
    lake.write()
    write_deltalake(str(lake.path / "public" / "orders"), lake.delta().scan(), mode="append")
    lake.commit(put(lake.table("orders"), **order(4)), put(lake.table("other"), **order(2)))
    lake.write()
    [failed] = lake.writer.failed_tables()
    assert "added or changed rows" in failed.reason
    assert len(lake.rows("other")) == 2
    # A new snapshot makes up for it, and so does a reset.
    orders = lake.table("orders")
    lake.commit(truncate(orders, snapshot=True), put(orders, **order(5)))
    lake.write()
    assert not lake.writer.failed_tables()
    assert lake.rows() == lake.expected()


def test_a_reset_empties_a_table_that_another_tool_has_changed(lake: Lake) -> None:
    lake.fill(range(3))
    write_deltalake(str(lake.path / "public" / "orders"), lake.delta().scan(), mode="append")
    lake.sink.reset("query-1")
    assert lake.rows() == []


def test_a_row_that_is_dead_already_costs_nothing(lake: Lake) -> None:
    lake.fill(range(100))
    orders = lake.table("orders")
    for turn in range(3):
        lake.commit(put(orders, Op.UPDATE, **order(7, f"turn {turn}")))
        lake.write()
    vectors = {file.vector.file for file in lake.target.delta.files.values() if file.vector}
    assert len(vectors) == 1
    assert len(list(lake.path.rglob("*.bin"))) == 1
    assert lake.rows() == lake.expected()


def test_a_table_made_without_vectors_gets_them(spark: SparkSession, tmp_path: Path) -> None:
    before = Lake(spark, tmp_path, deletes="rewrite")
    before.fill(range(30))
    before.sink = before.sink.__class__(name="lake", path=str(before.path))
    before.open()
    orders = before.table("orders")
    before.commit(put(orders, Op.UPDATE, **order(7, "paid")), remove(orders, id=8))
    before.write()
    assert before.rows() == before.expected()
    delta = Delta.open(before.sink.folder.within("public", "orders"), "query-1")
    assert delta is not None
    assert delta.has_vectors
    before.log.close()


# --- snapshots in columns ------------------------------------------------------------------------


def block_rows(numbers: range, status: str = "new") -> list[dict[str, Any]]:
    return [order(number, status) for number in numbers]


def test_the_blocks_of_a_snapshot_are_appended_as_columns(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(truncate(orders, snapshot=True))
    for start in range(0, 100, 10):
        lake.snapshot(orders, block_rows(range(start, start + 10)))
    lake.write(upto=61)
    lake.write()
    assert lake.rows() == lake.expected()
    assert len(lake.rows()) == 100
    assert len(lake.delta().file_uris()) == 4  # one of each task and batch


def test_blocks_of_large_rows_are_written_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "_MOST_APPENDED", 2_000)
    lake = PlainLake(monkeypatch, tmp_path)
    orders = lake.table("orders")
    for start in range(0, 200, 10):
        lake.snapshot(orders, block_rows(range(start, start + 10)))
    lake.write(200, parts=2)
    assert lake.rows() == lake.expected()
    assert len(lake.delta().file_uris()) == 4


def test_a_row_that_a_resumed_snapshot_reads_again_replaces_the_first(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.snapshot(orders, block_rows(range(30)))
    lake.write()
    lake.snapshot(orders, block_rows(range(20, 50), "later"), point=2)
    lake.write()
    assert lake.rows() == lake.expected()
    # Both in one batch: they may share keys, so they are looked at row by row.
    lake.snapshot(orders, block_rows(range(100, 120)), point=2)
    lake.snapshot(orders, block_rows(range(110, 130), "later"), point=3)
    lake.write()
    assert lake.rows() == lake.expected()
    assert len(lake.rows()) == 80


def test_changes_among_the_blocks_of_a_batch_are_applied_in_order(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.snapshot(orders, block_rows(range(20)))
    lake.commit(put(orders, Op.UPDATE, **order(3, "paid")), remove(orders, id=4))
    lake.snapshot(orders, block_rows(range(20, 30)))
    lake.commit(put(orders, Op.UPDATE, id=5, amount="7.00"))
    lake.write()
    assert lake.rows() == lake.expected()


def test_a_key_of_ones_own_may_come_twice_in_a_block(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path, keys={"public.orders": ("status",)})
    lake.snapshot(lake.table("orders"), [order(n, f"status {n % 3}") for n in range(9)])
    lake.write()
    assert [(row["id"], row["status"]) for row in lake.rows()] == [
        (6, "status 0"),
        (7, "status 1"),
        (8, "status 2"),
    ]
    lake.log.close()


def test_every_version_of_a_row_from_a_block_is_kept(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path, keep="history")
    orders = lake.table("orders")
    lake.snapshot(orders, block_rows(range(5)))
    lake.commit(put(orders, Op.UPDATE, **order(3, "paid")))
    lake.write()
    found = sorted((row["id"], row["status"], row["_current"]) for row in lake.rows(own=True))
    assert [row for row in found if row[0] == 3] == [(3, "new", False), (3, "paid", True)]
    assert len(found) == 6
    lake.log.close()


# --- partitions ----------------------------------------------------------------------------------

BY_STATUS = {"public.orders": ("status",)}


@pytest.mark.parametrize(("first", "then"), [({}, BY_STATUS), (BY_STATUS, {})])
def test_partition_by_counts_when_a_table_is_made(
    spark: SparkSession, tmp_path: Path, first: Any, then: Any
) -> None:
    lake = Lake(spark, tmp_path, partition_by=first)
    lake.fill(range(5))
    lake.sink = lake.sink.__class__(name="lake", path=str(lake.path), partition_by=then)
    lake.open()
    lake.fill(range(5, 10))
    assert lake.writer.failed_tables() == []
    assert lake.rows() == lake.expected()
    lake.log.close()


def test_what_was_put_back_from_an_older_copy_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = PlainLake(monkeypatch, tmp_path)
    orders, other = lake.table("orders"), lake.table("other")

    def fill(*numbers: int) -> None:
        lake.commit(*(put(table, **order(n)) for n in numbers for table in (orders, other)))
        lake.write(lake.log.latest_sequence, 1)

    fill(1, 2)
    shutil.copytree(lake.path, tmp_path / "copy")
    fill(3)
    shutil.rmtree(lake.path / "public" / "orders")
    shutil.copytree(tmp_path / "copy" / "public" / "orders", lake.path / "public" / "orders")
    lake.open()
    fill(4)
    [failed] = lake.writer.failed_tables()
    assert "has changes up to 3, but had them up to 5" in failed.reason
    assert lake.rows("other") == lake.expected("other")
    lake.commit(truncate(orders, snapshot=True), put(orders, **order(5)))
    lake.write(lake.log.latest_sequence, 1)
    assert not lake.writer.failed_tables()
    shutil.rmtree(lake.path)
    shutil.copytree(tmp_path / "copy", lake.path)
    lake.open()
    with pytest.raises(PipelineError, match=r"has changes up to 4, but .* up to 10") as raised:
        fill(6)
    assert "headrace reset lake" in raised.value.hint
    lake.log.close()


def test_a_job_does_not_forget_what_another_beside_it_has_noted(tmp_path: Path) -> None:
    folder, orders = Folder(str(tmp_path)), TableRef("shop", "public", "orders")
    one, other = (TablesLedger.open(folder, "jobs", adopt=False) for _ in range(2))
    one.note(orders, TableFailure(7, "it cannot be followed"))
    one.save()
    other.note(TableRef("shop", "public", "customers"), None)
    with pytest.raises(SinkUnavailable, match="another job with this writer has just written"):
        other.save()
    again = TablesLedger.open(folder, "jobs", adopt=False)
    assert again.failure(orders)
    again.reach(Progress("epoch", 9))
    again.save()
    again.save()


@pytest.mark.parametrize("keep", ["rows", "history"])
def test_rows_that_all_take_the_key_of_the_next_one_stay_however_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    """A deferrable key, and more rows in a transaction than are applied at once."""
    extend = apply.TableShare.extend
    monkeypatch.setattr(targets, "WINDOW_KEYS", 3)
    monkeypatch.setattr(  # as pieces of a large transaction come
        apply.TableShare, "extend", lambda share, some: [extend(share, [each]) for each in some]
    )
    lake = PlainLake(monkeypatch, tmp_path, keep=keep)
    orders = lake.table("orders")
    lake.commit(*(put(orders, **order(n)) for n in range(20)))
    lake.write(lake.log.latest_sequence, 1)
    shifted = []
    for n in range(20):
        was, row = order(n), {**order(n), "id": n + 1}
        made = put(orders, Op.UPDATE, was=was, **row)
        shifted.append(msgspec.structs.replace(made, before_kind=BeforeKind.FULL))
    lake.commit(*shifted)
    lake.write(lake.log.latest_sequence, 2)
    rows = [row for row in lake.rows(own=True) if row.get("_current", True)]
    assert sorted((row["id"], row["note"]) for row in rows) == [(n + 1, f"n{n}") for n in range(20)]
    lake.log.close()
