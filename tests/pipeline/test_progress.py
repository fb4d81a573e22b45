"""The numbers that Spark shows of a query are those of the changes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from headrace.config import parse
from headrace.formats.catalogue import Formats
from headrace.pipeline.options import Options
from headrace.pipeline.query import RangesBatch
from headrace.pipeline.reading import DiskLog, PipelineLog
from headrace.pipeline.reload import plans_of
from headrace.pipeline.shaping import shaped_rows
from headrace.pipeline.source import ChangeStreamReader
from headrace.secret import Secret
from headrace.sinks import FailedTable, LogRange, SinkPhase, SinkStatus, report
from headrace.sinks.history import History
from headrace.transforms import Mask, TableTransform
from tests.sinks.lake import Shop, order, put

CHANGES = 12_000


class Counted(msgspec.Struct):
    """What a task has read."""

    part: int
    parts: int
    changes: int


def count(wanted: LogRange) -> Counted:
    """Everything, as the tasks of sinks do."""
    return Counted(wanted.part, wanted.parts, sum(count for _, count, _ in wanted.pieces()))


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    orders = made.table("orders")
    made.commit(*(put(orders, **order(n)) for n in range(CHANGES)))
    made.commit(put(orders, **order(CHANGES)))
    yield made
    made.log.close()


def progress_of(
    spark: SparkSession, shop: Shop, checkpoint: Path, batch: Any, **options: str
) -> list[dict[str, Any]]:
    """What a query that takes all there is reports of its batches."""
    given = {"path": str(shop.log.path), **options}
    query = (
        spark.readStream.format("headrace")
        .options(**given)
        .load()
        .writeStream.option("checkpointLocation", checkpoint.as_uri())
        .foreachBatch(batch)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return [json.loads(each.json) for each in query.recentProgress]


@pytest.mark.requirement("P-28")
@pytest.mark.parametrize("known", [True, False])
def test_input_rows_are_changes_however_often_tasks_run(
    spark: SparkSession, shop: Shop, tmp_path: Path, *, known: bool
) -> None:
    path = str(shop.log.path)
    log = PipelineLog(DiskLog(path), Options(path=path))
    read: list[list[Counted]] = []

    def write(ranges: DataFrame, batch_id: int) -> None:
        whole = LogRange(log, shop.log.epoch, *((0, CHANGES), (CHANGES, CHANGES + 1))[batch_id])
        batch = RangesBatch(ranges, log, whole if known else None)
        assert batch.whole == whole
        for _ in range(2):  # as a sink does whose destination is away
            read.append([msgspec.json.decode(each, type=Counted) for each in batch.run(count)])

    options = {"logRanges": "2", "maxChangesPerTrigger": str(CHANGES)}
    batches = progress_of(spark, shop, tmp_path / "checkpoint", write, **options)
    assert [each["numInputRows"] for each in batches] == [CHANGES, 1]
    assert read == [
        *([[Counted(part, 2, CHANGES) for part in range(2)]] * 2),
        *([[Counted(0, 1, 1)]] * 2),
    ]


def test_the_progress_says_how_far_the_query_is_behind(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    batches = progress_of(
        spark,
        shop,
        tmp_path / "checkpoint",
        lambda changes, _: changes.count(),
        maxChangesPerTrigger=str(CHANGES),
    )
    latest = [each["sources"][0]["latestOffset"] for each in batches]
    assert [each["sequence"] for each in latest] == [CHANGES + 1] * 2
    assert [each["changesBehindLatest"] for each in latest] == [1, 0]
    assert 0 < latest[0]["secondsBehindLatest"] < 600
    assert latest[1]["secondsBehindLatest"] == 0


def test_the_progress_of_a_pipeline_s_query_has_what_its_sink_reports(
    shop: Shop, tmp_path: Path
) -> None:
    lake = {"type": "tables", "path": "lake"}
    content = {
        "data_dir": str(tmp_path),
        "sources": {"shop": {"type": "sqlite", "path": "shop.db"}},
        "pipeline": {"sinks": {"lake": lake}},
    }
    [plan] = plans_of(parse(content, folder=tmp_path, environment={}), Formats())
    given = {name: plan._options(None)[name] for name in ("sinkReport", "sinkName")}
    failed = FailedTable("public.users", 7, "it has no column n", "")
    status = SinkStatus(
        sink="lake", phase=SinkPhase.STREAMING, changes=5, dead_letters=2, failed_tables=(failed,)
    )
    Path(given["sinkReport"]).parent.mkdir(exist_ok=True)
    report.write(Path(given["sinkReport"]).parent, [status])
    reader = ChangeStreamReader(Options.read({"path": str(shop.log.path), **given}))
    reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reported = reader.reportLatestOffset()
    assert reported
    found = reported["sink"]
    assert (found["phase"], found["changes"], found["deadLetters"]) == ("streaming", 5, 2)
    assert found["failedTables"] == {"public.users": "it has no column n"}


def test_rows_for_a_sink_go_through_its_transforms(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    key = "a key of sixteen or more"
    mask = Mask(Secret(key))
    rule = TableTransform(mask={"note": mask}, where="id < 3")
    sink = History(name="archive", path=str(tmp_path / "h"), transforms={"public.orders": rule})
    changes = spark.read.format("headrace").option("path", str(shop.log.path)).load()
    with shaped_rows(changes, sink) as shaped:
        notes = [json.loads(row["after"])["note"] for row in shaped.collect()]
        assert notes == [mask.code(f"n{n}") for n in range(3)]
        plan = shaped._jdf.queryExecution().toString()
    assert key not in plan
