"""Delta tables in a bucket of an S3 server, under the writers that meet there."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headrace.change.event import Op
from headrace.errors import SinkFenced, SinkUnavailable
from headrace.sinks.history import History
from headrace.sinks.tables import compaction
from headrace.sinks.tables import target as targets
from tests.buckets import SECRET, Bucket
from tests.sinks.deltas import expect_one_creator
from tests.sinks.lake import Lake, order, put, remove


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with Bucket() as server:
        yield server


class BucketLake(Lake):
    """Tables in a bucket."""

    def __init__(self, spark: SparkSession, folder: Path, bucket: Bucket, **settings: Any) -> None:
        self._bucket, self._within = bucket, folder.name
        path, storage = bucket.uri(folder.name), bucket.options
        super().__init__(spark, folder, path=path, storage=storage, vacuum_hours=0, **settings)

    def delta(self, name: str = "orders") -> DeltaTable:
        return self._bucket.delta(f"{self._within}/public/{name}")

    def files(self) -> set[str]:
        """The data files in the bucket, whether they count or not."""
        folder = self._bucket.folder(f"{self._within}/public/orders")
        return {each.path for each in folder.objects.entries("") if "_delta_log" not in each.path}


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path, bucket: Bucket) -> Iterator[BucketLake]:
    made = BucketLake(spark, tmp_path, bucket)
    yield made
    made.log.close()


def test_one_of_many_creates_an_object(bucket: Bucket) -> None:
    expect_one_creator(bucket.folder("objects").objects)


def test_a_bucket_keeps_every_version_of_a_row(
    spark: SparkSession, tmp_path: Path, bucket: Bucket
) -> None:
    lake = BucketLake(spark, tmp_path, bucket, keep="history")
    orders = lake.table("orders")
    lake.fill(range(3))
    lake.commit(put(orders, Op.UPDATE, **order(1, "paid")), remove(orders, id=2))
    lake.write()
    versions = [(row["id"], row["status"], row["_valid_to"] is None) for row in lake.rows(own=True)]
    assert sorted(versions) == [
        (0, "new", True),
        (1, "new", False),
        (1, "paid", True),
        (2, "new", False),
    ]
    lake.log.close()


@pytest.mark.faults
@pytest.mark.slow
def test_tables_in_a_bucket_are_compacted_and_vacuumed(
    lake: BucketLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "FILE_ROWS", 40)
    monkeypatch.setattr(compaction, "_FEW_ROWS", 10)
    orders = lake.table("orders")
    for start in range(5):
        lake.commit(*(put(orders, **order(start + 5 * n)) for n in range(10)))
        lake.write()
    lake.commit(*(put(orders, Op.UPDATE, **order(n, "paid")) for n in range(20)))
    lake.write()
    before = set(lake.target.delta.files)
    lake.compact()
    lake.compact()  # the vacuum of one round deletes what the round before has replaced
    after = set(lake.target.delta.files)
    assert len(after) < len(before)
    assert not (before - after) & lake.files()
    assert after <= lake.files()
    assert lake.rows() == lake.expected()
    lake.open()  # a query that starts reads the same
    lake.fill(range(100, 103))
    assert lake.rows() == lake.expected()


@pytest.mark.faults
@pytest.mark.slow
def test_the_stream_and_another_tool_commit_to_a_bucket_at_once(lake: BucketLake) -> None:
    lake.fill(range(5))
    stopping, made = threading.Event(), list[int]()

    def maintain() -> None:
        while not stopping.is_set():
            table = lake.delta()
            table.alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
            made.append(table.version())

    other = threading.Thread(target=maintain)
    other.start()
    try:
        for batch in range(1, 7):
            lake.fill(range(10 * batch, 10 * batch + 5))
    finally:
        stopping.set()
        other.join()
    assert lake.rows() == lake.expected()
    history = lake.delta().history()
    versions = sorted(each["version"] for each in history)
    assert versions == list(range(len(versions)))
    assert made
    assert len(versions) >= 7 + len(set(made))


def test_a_second_pipeline_on_a_bucket_is_refused_and_the_first_one_fenced_off(
    lake: BucketLake,
) -> None:
    lake.fill(range(5))
    first = lake.writer
    with pytest.raises(SinkFenced):
        lake.open("query-2")
    lake.open("query-2", adopt=True)
    lake.fill(range(5, 10))
    lake.writer = first
    with pytest.raises(SinkFenced):
        lake.fill(range(10, 15))
    assert [row["id"] for row in lake.rows()] == list(range(10))


@pytest.mark.faults
@pytest.mark.slow
def test_a_bucket_that_does_not_answer_is_waited_for_and_its_keys_stay_secret(
    spark: SparkSession, tmp_path: Path
) -> None:
    with Bucket() as own:
        lake = BucketLake(spark, tmp_path, own)
        lake.fill(range(3))
        own.stop("immediate")
        options = {
            **own.options,
            "max_retries": "1",
            "retry_timeout": "1s",
            "connect_timeout": "1s",
        }
        audit = History(name="audit", path=own.uri("audit"), storage=options)
        with pytest.raises(SinkUnavailable) as raised:
            audit.open("query-1")
        assert SECRET not in f"{raised.value} {raised.value.hint} {audit!r}"
        lake.log.close()
