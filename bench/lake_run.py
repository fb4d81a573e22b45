"""One run of a streaming query from a log into a Delta table, timed batch by batch.

The clock runs from the end of the last batch of the warm-up to the end of the last batch: reading,
reducing, merging, committing, maintaining the table, and all that Spark does between two batches.
"""

import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import DataFrame, SparkSession

from headrace.pipeline.checkpoint import QueryCheckpoint
from headrace.pipeline.query import Batches, PipelineInput, QueryPlan, Stored
from headrace.pipeline.session import opened_session
from headrace.sinks import SinkWriter
from headrace.sinks.tables.sink import Tables
from headrace.testing import SparkCluster
from headrace.transforms import TableTransform

from . import delta
from .lake_task import Lap, Task, outcome
from .orders import NAME, SCHEMA
from .process import MeasurementFailed, Outcome, answer

MASTER = "local[2]"


class Timed(Batches):
    """What Spark calls with each batch; notes when each had ended."""

    def __init__(self, plan: QueryPlan, writer: SinkWriter[Any], table: Path) -> None:
        super().__init__(writer, plan.sink.name, self._note, plan.batch_of())
        self._table = table
        self._last = Stored(-1, 0, 0.0, (), {})
        self.laps = [self._lap()]

    def __call__(self, changes: DataFrame, batch_id: int) -> None:
        """Store a batch, and look after the table."""
        super().__call__(changes, batch_id)
        self.laps.append(self._lap())

    def _note(self, stored: Stored) -> None:
        self._last = stored

    def _lap(self) -> Lap:
        at, stored = time.perf_counter(), self._last
        return Lap(at, stored.changes, delta.version(self._table), stored.seconds)


def apply(spark: SparkSession, task: Task) -> Outcome:
    """All that the log has, from where the last run ended."""
    plan = QueryPlan(
        sink=Tables(name="lake", path=str(task.lake), keep=task.keep, transforms=_transforms(task)),
        feed=PipelineInput(address={"path": task.log}, max_changes_per_batch=task.batch),
        checkpoint=QueryCheckpoint("lake", Path(task.folder, "checkpoints")),
        once=True,
    )
    writer = plan.sink.open(plan.checkpoint.writer())
    batches = Timed(plan, writer, task.table)
    query = plan.start(spark, batches, plan.starting(writer))
    query.awaitTermination()
    writer.finish()  # or the next run would pay for what this one has left
    if writer.failed_tables():
        raise MeasurementFailed(f"the sink gave up: {writer.failed_tables()}")
    return outcome(task, batches.laps)


def _transforms(task: Task) -> dict[str, TableTransform]:
    if not (task.select or task.where or task.sql):
        return {}
    transform = TableTransform(select=task.select, where=task.where, sql=task.sql)
    return {f"{SCHEMA}.{NAME}": transform}


@contextmanager
def clustered_session(executors: int, *, journal: Path) -> Iterator[SparkSession]:
    """Spark on a standalone cluster of its own, as many tasks a batch as there are executors."""
    secret = secrets.token_hex()
    settings = {
        "spark.authenticate.secret": secret,
        "spark.driver.host": "127.0.0.1",
        "spark.default.parallelism": str(executors),
    }
    with SparkCluster(workers=executors, secret=secret) as cluster:
        with opened_session(cluster.url, settings, journal=journal) as spark:
            yield spark
        if (ran := len(cluster.executors())) != executors:
            raise MeasurementFailed(f"{ran} executors ran, not {executors}")


def main(encoded: str) -> None:
    """Do one task with a Spark of its own, and answer."""
    task = msgspec.json.decode(encoded, type=Task)
    journal = Path(task.folder, "spark.log")
    session = (
        clustered_session(task.executors, journal=journal)
        if task.executors
        else opened_session(MASTER, {}, journal=journal, extra_tasks=1)
    )
    with session as spark:
        answer(apply(spark, task))


if __name__ == "__main__":
    main(sys.argv[1])
