"""`format("headrace")` on a real Spark: every change once, in whole transactions."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.query import StreamingQuery

from headrace.change.arrow.frame import FIELDS, schema
from headrace.log import Log
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.testing import wait_until
from tests.changes import Writer, opened_writer

Option = str | int

SEQUENCE = {"columns": "sequence"}


class Stream:
    """A streaming query on a checkpoint of its own, run until there is nothing more."""

    def __init__(self, spark: SparkSession, folder: Path, **options: Option) -> None:
        self._spark = spark
        self._checkpoint = str(folder / "checkpoint")
        self.options = options
        self.batches: dict[int, list[int]] = {}  # the sequences of each
        self.failing = False
        self.progress: list[Any] = []

    def run(self) -> dict[int, list[int]]:
        """The batches of this run."""
        self.batches = {}
        query = self.start(availableNow=True)
        try:
            query.awaitTermination()
            self.progress = query.recentProgress
        finally:
            query.stop()
        return self.batches

    def start(self, **trigger: Any) -> StreamingQuery:
        """The query, running."""
        changes = self._spark.readStream.format("headrace").options(**self.options).load()
        writer = changes.writeStream.foreachBatch(self._take)
        return writer.option("checkpointLocation", self._checkpoint).trigger(**trigger).start()

    def _take(self, batch: DataFrame, number: int) -> None:
        if self.failing:
            raise RuntimeError("the sink broke")
        self.batches[number] = sorted(row.sequence for row in batch.collect())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def writer(folder: Path) -> Iterator[Writer]:
    with opened_writer(folder) as writer:
        yield writer


def batch_read(spark: SparkSession, **options: Option) -> DataFrame:
    return spark.read.format("headrace").options(**options).load()


def serving(log: Log, stack: ExitStack) -> str:
    settings = ServerSettings(port=0)
    app = create_app(log, statuses=list, copy_again=None, settings=settings)
    return stack.enter_context(BackgroundServer(app, settings)).url


def upto(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


@pytest.mark.requirement("S1-40")
def test_a_batch_read_gives_what_the_log_holds(
    spark: SparkSession, writer: Writer, folder: Path
) -> None:
    writer.put("users", "alice", name="Alicë")
    writer.put_many("orders", 6000)
    writer.put_many("orders", 6000)
    writer.delete("users", "alice")
    with ExitStack() as stack:
        near = batch_read(spark, path=str(folder))
        far = batch_read(spark, url=serving(writer.log, stack))
        assert near.rdd.getNumPartitions() == far.rdd.getNumPartitions() == 2
        assert near.columns == list(FIELDS)
        rows = near.orderBy("sequence").collect()
        assert far.orderBy("sequence").collect() == rows
    changes = writer.log.read(0, limit=100_000)
    assert [(row.id, row.op, row.after, row.transaction.last) for row in rows] == [
        (change.id, change.op, change.after and change.after.decode(), change.last)
        for change in changes
    ]


def test_spark_sees_exactly_the_schema_of_a_frame(
    spark: SparkSession, writer: Writer, folder: Path
) -> None:
    writer.put("users", "1")
    everything = batch_read(spark, path=str(folder))
    assert to_arrow_schema(everything.schema, timezone="UTC").equals(schema())
    some = batch_read(spark, path=str(folder), columns="op, sequence")
    assert some.collect() == [("INSERT", 1)]


def test_a_batch_read_takes_a_range_and_tables(
    spark: SparkSession, writer: Writer, folder: Path
) -> None:
    for number in range(4):
        writer.put("users", str(number))
        writer.put("orders", str(number))

    def read(**options: Option) -> list[int]:
        rows = batch_read(spark, path=str(folder), **SEQUENCE, **options).collect()
        return sorted(row.sequence for row in rows)

    assert read(startingSequence=3, endingSequence=5) == [3, 4, 5]
    assert read(tables="public.us*", startingSequence="earliest") == [1, 3, 5, 7]
    assert read(startingSequence="latest") == []
    assert read(startingSequence=9) == []


def test_batches_end_with_transactions_and_a_restart_reads_nothing_twice(
    spark: SparkSession, writer: Writer, folder: Path, tmp_path: Path
) -> None:
    for _ in range(4):
        writer.put_many("users", 3)
    stream = Stream(spark, tmp_path, path=str(folder), maxChangesPerBatch=7, **SEQUENCE)
    assert stream.run() == {0: upto(1, 6), 1: upto(7, 12)}
    ends = [(p.sources[0].endOffset, p.sources[0].latestOffset) for p in stream.progress]
    offset = '{{"epoch": "{}", "sequence": {}, "generation": "0"}}'.format
    epoch = writer.log.epoch
    assert ends[0][0] == offset(epoch, 6)
    assert ends[0][1].startswith(offset(epoch, 12)[:-1])
    assert stream.run() == {}
    writer.put_many("users", 50_000)
    writer.put("users", "1")
    assert stream.run() == {2: upto(13, 50_012), 3: [50_013]}


def test_a_batch_that_failed_comes_again_from_a_server(
    spark: SparkSession, writer: Writer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        url = serving(writer.log, stack)
        writer.put_many("users", 3)
        stream = Stream(spark, tmp_path, url=url, tables="users", **SEQUENCE)
        stream.failing = True
        with pytest.raises(PySparkException, match="the sink broke"):
            stream.run()
        stream.failing = False
        writer.put_many("users", 2)
        writer.put("orders", "1")
        assert stream.run() == {0: [1, 2, 3], 1: [4, 5]}


def test_latest_is_one_place_even_when_the_first_batch_is_killed(
    spark: SparkSession, writer: Writer, folder: Path, tmp_path: Path
) -> None:
    writer.put_many("users", 3)
    stream = Stream(spark, tmp_path, path=str(folder), startingSequence="latest", **SEQUENCE)
    stream.failing = True
    with pytest.raises(PySparkException, match="the sink broke"):
        stream.run()
    stream.failing = False
    writer.put_many("users", 2)
    assert stream.run() == {0: [], 1: [4, 5]}


def test_an_empty_log_is_a_batch_without_changes(
    spark: SparkSession, writer: Writer, folder: Path, tmp_path: Path
) -> None:
    stream = Stream(spark, tmp_path, path=str(folder), **SEQUENCE)
    assert stream.run() == {0: []}
    assert batch_read(spark, path=str(folder)).count() == 0
    writer.put("users", "1")
    assert stream.run() == {1: [1]}


def test_a_running_query_gets_what_comes_and_runs_no_batch_without_it(
    spark: SparkSession, writer: Writer, folder: Path, tmp_path: Path
) -> None:
    stream = Stream(spark, tmp_path, path=str(folder), **SEQUENCE)
    query = stream.start(processingTime="0 seconds")
    try:
        wait_until(lambda: 0 in stream.batches)
        wait_until(lambda: "Waiting" in query.status["message"])
        writer.put_many("users", 2)
        wait_until(lambda: 1 in stream.batches)
        writer.put("users", "1")
        wait_until(lambda: 2 in stream.batches)
    finally:
        query.stop()
    assert stream.batches == {0: [], 1: [1, 2], 2: [3]}


def test_changes_trimmed_before_they_were_read_stop_the_query_unless_told_otherwise(
    spark: SparkSession, writer: Writer, folder: Path, tmp_path: Path
) -> None:
    writer.put_many("users", 3)
    stream = Stream(spark, tmp_path, path=str(folder), **SEQUENCE)
    assert stream.run() == {0: [1, 2, 3]}
    writer.put_many("users", 5)
    writer.log.trim(6)
    lost = r"headrace\.errors\.ChangesLost: changes 4 to 5 are no longer in the log"
    with pytest.raises(PySparkException, match=lost):
        stream.run()
    stream.options["failOnDataLoss"] = "false"
    assert stream.run() == {1: [6, 7, 8]}
    writer.put("users", "1")
    writer.log.trim(10)
    assert stream.run() == {2: []}
    with pytest.raises(PySparkException, match="ChangesLost: changes 1 to 9 are no longer"):
        batch_read(spark, path=str(folder), startingSequence=1).count()


def test_another_log_in_the_same_place_stops_the_query(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    stream = Stream(spark, tmp_path, path=str(folder), **SEQUENCE)
    with opened_writer(folder) as writer:
        writer.put_many("users", 3)
        assert stream.run() == {0: [1, 2, 3]}
    shutil.copytree(folder, tmp_path / "older")
    with opened_writer(folder) as writer:
        writer.put("users", "1")
        assert stream.run() == {1: [4]}
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "older", folder)
    with pytest.raises(
        PySparkException, match=r"LogReplaced: .* up to 4, but .* other changes after 3"
    ):
        stream.run()
    shutil.rmtree(folder)
    with opened_writer(folder) as writer:
        writer.put_many("users", 9)
        with pytest.raises(PySparkException, match=r"headrace\.errors\.LogReplaced: the query"):
            stream.run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pth": "x"}, "there is no option 'pth'; did you mean path?"),
        ({"maxChangesPerbatch": "0"}, "the option maxChangesPerBatch must be a whole number"),
        ({}, "exactly one of the options path and url must be given"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    spark: SparkSession, options: dict[str, str], message: str
) -> None:
    with pytest.raises(PySparkException) as caught:
        batch_read(spark, **options)
    assert f"headrace.errors.ConfigError: {message}" in str(caught.value)
