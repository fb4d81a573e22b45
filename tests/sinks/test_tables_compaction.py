"""Compaction of Delta tables: beside the stream, other writers and the vacuum."""

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyroaring import BitMap
from pyspark.sql import SparkSession

from headrace.change.event import Column, Op
from headrace.errors import TableMoved
from headrace.sinks.lake import vectors
from headrace.sinks.lake.deltalog import Action, DeltaCommit, DeltaLog
from headrace.sinks.lake.plan import PlannedFile
from headrace.sinks.lake.vectors import VectorRef
from headrace.sinks.tables import compaction, maintenance, parquet
from headrace.sinks.tables import target as targets
from headrace.sinks.tables.compaction import is_behind
from headrace.sinks.tables.maintenance import run_rewrites
from headrace.sinks.tables.rewrite import RewriteWork, Rewritten
from headrace.sinks.tables.sink import TablesWriter
from tests.sinks.lake import Lake, order, put, remove, truncate
from tests.sinks.plain import PlainLake


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "FILE_ROWS", 40)
    monkeypatch.setattr(compaction, "_FEW_ROWS", 10)


class Held:
    """Compaction that has written files, and waits before it commits them."""

    def __init__(self) -> None:
        self.written = threading.Event()
        self.going_on = threading.Event()
        self._really = maintenance.run_rewrites

    def __call__(
        self, spark: SparkSession, work: Sequence[RewriteWork], *, aside: bool
    ) -> list[Rewritten]:
        done = self._really(spark, work, aside=aside)
        self.written.set()
        assert self.going_on.wait(60)
        return done


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    made = Held()
    monkeypatch.setattr(maintenance, "run_rewrites", made)
    return made


def fill_mixed(lake: Lake, batches: int = 12) -> None:
    """Batches whose keys lie among one another."""
    orders = lake.table("orders")
    for start in range(batches):
        lake.commit(*(put(orders, **order(start + batches * n)) for n in range(20)))
        lake.write()


def ranges(lake: Lake) -> list[tuple[int, int]]:
    """The smallest and the largest key of each file, in order."""
    found = [file.bounds("id") for file in lake.target.delta.files.values()]
    return sorted((low, high) for low, high in filter(None, found))


def writer(lake: Lake) -> TablesWriter:
    assert isinstance(lake.writer, TablesWriter)
    return lake.writer


def test_with_deletes_rewrite_the_last_rows_of_a_file_go_too(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(spark, tmp_path, deletes="rewrite")
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)))
    lake.write()
    lake.commit(remove(orders, id=1))
    lake.write()
    assert lake.rows() == []
    lake.log.close()


def test_only_what_the_stream_has_replaced_is_looked_for_again(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_mixed(lake, batches=30)
    monkeypatch.delattr(targets, "read_rows")  # by which rows are looked for
    lake.compact()
    assert len(lake.target.delta.files) < 30
    assert lake.rows() == lake.expected()


@pytest.mark.requirement("P-22")
def test_rows_that_another_tool_deletes_meanwhile_stay_deleted(lake: Lake) -> None:
    fill_mixed(lake)
    work = lake.target.compaction()
    done = maintenance.run_rewrites(lake.spark, work)
    delta = lake.target.delta
    path, file = next(iter(delta.files.items()))
    gone = delta.folder.read(path)["id"][0].as_py()
    ref = vectors.write(delta.folder, {path: BitMap([0])})[path]
    actions = [
        Action(commit_info={"operation": "DELETE"}),
        Action(remove=file.removed(0, data_change=True)),
        Action(add=file.added(ref, data_change=True)),
    ]
    assert DeltaLog(delta.folder).put(DeltaCommit(delta.version + 1, actions))
    for piece, result in zip(work, done, strict=True):
        try:
            lake.target.compacted([piece], [result])
        except TableMoved:
            continue
    assert lake.rows() == [row for row in lake.expected() if row["id"] != gone]


def test_a_vacuum_leaves_what_compaction_is_about_to_commit(
    spark: SparkSession, tmp_path: Path, held: Held
) -> None:
    lake = Lake(spark, tmp_path, vacuum_hours=0)
    fill_mixed(lake)
    lake.writer.maintain()
    assert held.written.wait(60)
    lake.writer.maintain()
    held.going_on.set()
    lake.writer.finish()
    assert lake.rows() == lake.expected()
    lake.log.close()


def test_compaction_that_a_query_leaves_behind_does_not_fence_off_the_next(
    lake: Lake, held: Held
) -> None:
    fill_mixed(lake)
    lake.writer.maintain()
    assert held.written.wait(60)
    before = writer(lake)
    before.close()
    lake.open()
    orders = lake.table("orders")
    lake.commit(put(orders, **order(-1)), remove(orders, id=-1))
    lake.write()  # opens the table, and commits nothing
    held.going_on.set()
    before.finish()
    lake.commit(put(orders, Op.UPDATE, **order(3, "paid")))
    lake.write()
    assert lake.rows() == lake.expected()


def test_compaction_puts_rows_in_order_over_files_that_do_not_overlap(lake: Lake) -> None:
    orders = lake.table("orders")
    fill_mixed(lake)
    lake.compact()
    found = ranges(lake)
    assert 6 <= len(found) <= 12
    assert all(high < low for (_, high), (low, _) in pairwise(found))
    assert lake.rows() == lake.expected()
    # Later changes are put among them, range by range.
    for turn in range(10):
        for n in range(turn, 240, 9):
            lake.commit(put(orders, Op.UPDATE, **order(n, f"turn {turn}")))
        lake.commit(put(orders, **order(1000 + turn)))
        lake.write()
        lake.compact()
    found = ranges(lake)
    loose = [path for path in lake.target.delta.files if parquet.kind(path) == parquet.LOOSE]
    assert len(loose) < 8
    assert len(found) < 20
    assert lake.rows() == lake.expected()


def test_what_the_stream_changes_meanwhile_is_not_undone(lake: Lake) -> None:
    orders = lake.table("orders")
    for start in range(10):
        lake.commit(*(put(orders, **order(start * 10 + n)) for n in range(10)))
        lake.write()
    work = lake.target.compaction()
    assert work
    done = run_rewrites(lake.spark, work)
    lake.commit(*(put(orders, Op.UPDATE, **order(n, "paid")) for n in range(0, 100, 3)))
    lake.commit(*(remove(orders, id=n) for n in range(1, 100, 10)))
    lake.write()
    for piece, result in zip(work, done, strict=True):
        assert lake.target.compacted([piece], [result])
    assert lake.rows() == lake.expected()
    lake.commit(*(put(orders, Op.UPDATE, **order(n, "sent")) for n in range(0, 100, 2)))
    lake.write()
    assert lake.rows() == lake.expected()


def test_compaction_of_a_table_that_was_emptied_meanwhile_brings_nothing_back(lake: Lake) -> None:
    orders = lake.table("orders")
    for n in range(10):
        lake.commit(put(orders, **order(n)))
        lake.write()
    [work] = lake.target.compaction()
    [done] = run_rewrites(lake.spark, [work])
    lake.commit(truncate(orders), put(orders, **order(99)))
    lake.write()
    assert not lake.target.compacted([work], [done])
    assert [row["id"] for row in lake.rows()] == [99]


def test_a_file_that_the_stream_takes_out_meanwhile_does_not_stop_compaction(lake: Lake) -> None:
    orders = lake.table("orders")
    for n in range(10):
        lake.commit(put(orders, **order(n)))
        lake.write()
    [work] = lake.target.compaction()
    [done] = run_rewrites(lake.spark, [work])
    lake.commit(put(orders, Op.UPDATE, **order(0, "paid")), remove(orders, id=1))
    lake.write()
    assert lake.target.compacted([work], [done])
    assert lake.rows() == lake.expected()
    assert len(lake.delta().file_uris()) == 2  # all of them, and the new one


def test_only_files_with_many_dead_rows_are_written_anew(lake: Lake) -> None:
    orders = lake.table("orders")
    for start in range(0, 240, 20):
        lake.fill(range(start, start + 20))
    lake.compact()
    before = set(lake.target.delta.files)
    lake.commit(*(put(orders, Op.UPDATE, **order(n, "paid")) for n in range(16)))
    lake.write()
    lake.compact()
    after = lake.target.delta.files
    assert len(before - set(after)) == 1  # the file of the first rows
    assert not any(file.vector for file in after.values() if file.path in before)
    assert lake.rows() == lake.expected()


def test_a_range_takes_no_more_rows_than_a_worker_has_room_for(lake: Lake) -> None:
    for start in range(0, 400, 40):
        lake.fill(range(start, start + 40))
    lake.compact()
    for start in range(400, 1400, 40):  # all of them beyond what is in order
        lake.fill(range(start, start + 40))
    plan, files = lake.target.layout()
    work = list(compaction.due(plan, files))
    assert work
    for piece in work:
        assert sum(file.rows for file in (*piece.whole, *piece.parts)) <= 3 * 40
    lake.compact()
    there = lake.target.delta.files
    ordered = [file for path, file in there.items() if parquet.kind(path) == parquet.SORTED]
    found = sorted(file.bounds("id") or (0, 0) for file in ordered)
    assert all(high < low for (_, high), (low, _) in pairwise(found))
    assert sum(file.rows for file in ordered) >= 1400 / 1.25
    assert lake.rows() == lake.expected()


def test_rows_without_a_key_are_joined_and_never_taken_together(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(spark, tmp_path)
    notes = lake.table("orders", [Column("id", "bigint"), Column("status", "text")])
    for n in range(60):
        lake.commit(put(notes, id=n % 3, status="new"))
        lake.write()
        lake.compact()
    assert len(lake.rows()) == 60
    assert all(file.rows <= 40 for file in lake.target.delta.files.values())
    assert len(lake.target.delta.files) < 16
    lake.log.close()


def test_with_deletes_rewrite_compaction_leaves_no_vectors(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(spark, tmp_path, deletes="rewrite")
    orders = lake.table("orders")
    for turn in range(12):
        lake.commit(*(put(orders, **order(turn + 12 * n)) for n in range(20)))
        lake.commit(put(orders, Op.UPDATE, **order(turn, "paid")))
        lake.write()
        lake.compact()
        assert len(lake.delta().to_pyarrow_table()) == 20 * (turn + 1)
    assert parquet.SORTED in {parquet.kind(path) for path in lake.target.delta.files}
    assert not any(file.vector for file in lake.target.delta.files.values())
    assert lake.rows() == lake.expected()
    lake.log.close()


def test_compaction_loses_nothing_of_a_table_that_has_had_vectors(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Somebody has set deletes: rewrite, and that the table gets no more vectors."""
    lake = Lake(spark, tmp_path)
    orders = lake.table("orders")
    for start in range(0, 240, 20):
        lake.fill(range(start, start + 20))
    lake.compact()
    updates = [put(orders, Op.UPDATE, **order(n, "paid")) for n in (30, 100, 150, 200)]
    lake.commit(*updates, *(remove(orders, id=n) for n in range(20)))
    lake.write()
    lake.target.delta.note({"delta.enableDeletionVectors": "false"})
    lake.sink = replace(lake.sink, deletes="rewrite")
    lake.open()
    lake.fill(range(1000, 1001))
    lake.compact()
    assert not any(file.vector for file in lake.target.delta.files.values() if file.live < 30)
    assert lake.rows() == lake.expected()
    lake.log.close()


def test_rows_lie_in_the_order_that_the_config_says(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path, cluster_by={"public.orders": ("note",)})
    orders = lake.table("orders")
    for turn in range(3):  # also when there are files in this order already
        for start in range(10):
            rows = (order(n, f"turn {turn}") for n in range(start, 240, 10))
            lake.commit(*(put(orders, Op.UPDATE if turn else Op.INSERT, **row) for row in rows))
            lake.write()
        lake.compact()
        files = lake.target.delta.files
        ordered = [file for path, file in files.items() if parquet.kind(path) == parquet.SORTED]
        notes = sorted(file.bounds("note") or ("", "") for file in ordered)
        assert len(notes) > 2
        assert all(high < low for (_, high), (low, _) in pairwise(notes))
        assert lake.rows() == lake.expected()
    lake.log.close()


def test_rows_lie_in_the_folders_that_the_config_says(spark: SparkSession, tmp_path: Path) -> None:
    columns = [Column("status", "text", key=True), Column("id", "bigint", key=True)]
    lake = Lake(spark, tmp_path, partition_by={"public.orders": ("status",)})
    orders = lake.table("orders", columns)
    for start in range(10):
        names = ("new", "a/b ü=%", "x")
        lake.commit(*(put(orders, id=n, status=names[n % 3]) for n in range(start, 200, 10)))
        lake.write()
    lake.commit(remove(orders, status="new", id=3))
    lake.write()
    lake.compact()
    assert lake.rows() == lake.expected()
    assert any("/sorted-" in path for path in lake.target.delta.files)
    assert {Path(uri).parent.name for uri in lake.target.delta.files} == {
        "status=new",
        "status=a%2Fb%20%C3%BC%3D%25",
        "status=x",
    }
    reopened = DeltaTable(str(lake.path / "public" / "orders"))
    assert reopened.metadata().partition_columns == ["status"]
    lake.log.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority")
@pytest.mark.parametrize("aside", [True, False])
def test_compaction_gives_way_to_the_other_tasks_of_its_process(
    monkeypatch: pytest.MonkeyPatch, aside: bool
) -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    found: list[int] = []

    def rewritten(_: object) -> Rewritten:
        found.append(priority())
        return Rewritten([], [], {})

    monkeypatch.setattr(maintenance, "rewrite", rewritten)
    before = priority()
    numbers = pa.record_batch({"id": [0, 1]})
    work: Any = ("one", "another")
    assert len(list(maintenance._Rewriting(work, aside)(iter([numbers])))) == 2
    assert found == ([10, 10] if aside else [before, before])
    assert priority() == before < 10


def test_compaction_gives_way_until_too_much_has_gathered() -> None:
    def files(number: int, dead: int = 0, name: str = "rows") -> list[PlannedFile]:
        vector = VectorRef("u", "x", 40, dead) if dead else None
        return [PlannedFile(f"{name}-{at}", 100, 1, vector=vector) for at in range(number)]

    assert not is_behind([])
    assert not is_behind(files(64))
    assert is_behind(files(65))
    assert not is_behind(files(65, name="sorted"))
    assert not is_behind(files(4, dead=50))
    assert is_behind(files(4, dead=51))


@pytest.mark.parametrize("backwards", [False, True])
def test_full_files_of_a_snapshot_in_order_are_not_written_again(
    lake: Lake, *, backwards: bool
) -> None:
    orders, numbers = lake.table("orders"), [range(at, at + 20) for at in range(0, 400, 20)]
    for some in reversed(numbers) if backwards else numbers:
        rows = [order(number) for number in some]
        lake.snapshot(orders, rows[::-1] if backwards else rows)
    lake.write()
    files = set(lake.delta().file_uris())
    assert kinds(lake) == {"rows" if backwards else "filled"}
    lake.compact()
    assert (set(lake.delta().file_uris()) == files) is not backwards
    assert kinds(lake) == {"sorted" if backwards else "filled"}
    assert lake.rows() == lake.expected()


def test_files_in_order_that_lie_across_one_another_are_put_in_order(lake: Lake) -> None:
    orders = lake.table("orders")
    for start in range(6):  # as partitions by hash come, one after the other
        lake.snapshot(orders, [order(start + 6 * number) for number in range(80)])
        lake.write()
    assert kinds(lake) == {"filled"}
    lake.compact()
    files = sorted(bounds(lake))
    assert len(files) > 6
    assert all(high < low for (_, high), (low, _) in pairwise(files))
    assert lake.rows() == lake.expected()


def bounds(lake: Lake) -> list[tuple[int, int]]:
    actions = pa.table(lake.delta().get_add_actions(flatten=True)).to_pylist()
    return [(each["min.id"], each["max.id"]) for each in actions]


def kinds(lake: Lake) -> set[str]:
    return {parquet.kind(uri) for uri in lake.delta().file_uris()}


@pytest.mark.parametrize("deletes", ["vectors", "rewrite"])
def test_compaction_keeps_nan_which_no_statistics_know_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletes: str
) -> None:
    monkeypatch.setattr(targets, "FILE_ROWS", 8)
    lake = PlainLake(monkeypatch, tmp_path, deletes=deletes)
    table = lake.table("orders", [Column("id", "double precision", key=True)])
    for start in range(0, 64, 4):
        last = "NaN" if not start else start + 3  # beside the lowest values
        lake.commit(*(put(table, id=each) for each in (start, start + 1, start + 2, last)))
        lake.write(lake.log.latest_sequence, 1)
    for _ in range(100):
        lake.compact()
    assert len(lake.rows()) == 64
    assert {parquet.kind(path) for path in lake.delta().file_uris()} == {"sorted"}
    lake.log.close()


@pytest.mark.parametrize("deletes", ["vectors", "rewrite"])
@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        ("timestamp with time zone", "2025-01-15T10:30:00.123{:03d}+00:00"),
        ("numeric(38,0)", "9223372036854776{:03d}"),
    ],
)
def test_compaction_keeps_rows_beyond_the_bounds_that_other_tools_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, moment: str, deletes: str
) -> None:
    """They cut times off after the milliseconds, and write decimals as doubles."""
    monkeypatch.setattr(targets, "FILE_ROWS", 8)
    lake = PlainLake(monkeypatch, tmp_path, deletes=deletes)
    table = lake.table("orders", [Column("id", kind, key=True)])
    for start in range(2):
        lake.commit(*(put(table, id=moment.format(n)) for n in range(start, 40, 2)))
        lake.write(lake.log.latest_sequence, 1)
    lake.delta().optimize.compact()
    lake.commit(put(table, id=moment.format(40)))
    lake.write(lake.log.latest_sequence, 1)
    for _ in range(20):
        lake.compact()
    assert lake.rows() == lake.expected()
    assert {parquet.kind(path) for path in lake.delta().file_uris()} == {"sorted"}
    lake.log.close()
