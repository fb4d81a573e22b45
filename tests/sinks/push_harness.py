"""A log with a push sink on it, batch by batch, and the office that it sends to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headrace.change.event import Column, Op
from headrace.pipeline.options import Options
from headrace.pipeline.query import RangesBatch
from headrace.pipeline.reading import DiskLog, PipelineLog
from headrace.sinks import LogBatch
from headrace.sinks.push.writer import PushWriter
from tests.sinks.lake import Row, Shop, put
from tests.sinks.socket_sink import Courier, Office, opened_office

USERS = (Column("id", "bigint", key=True), Column("name", "text"))


class Post(Shop):
    """Changes go into a log, and batches of it to an office."""

    def __init__(self, spark: SparkSession, folder: Path, office: Office, **chosen: Any) -> None:
        super().__init__(folder)
        self.spark = spark
        self.office = office
        self.written = 0  # the last sequence that a batch has brought to the sink
        self.batches = 0
        self.reopen(**chosen)

    def reopen(self, writer: str = "query-1", *, adopt: bool = False, **chosen: Any) -> PushWriter:
        """The sink as a query that starts would open it."""
        given: dict[str, Any] = {
            "name": "post",
            "port": self.office.port,
            "folder": str(self.folder / "post"),
            "retry_first_seconds": 0.002,
            "batch_size": 10,
        }
        self.sink = Courier(**(given | chosen))
        self.writer = self.sink.open(writer, adopt=adopt)
        return self.writer

    def users(self, *rows: tuple[int, str], op: Op = Op.INSERT) -> None:
        """Users as they are now, each in a transaction."""
        table = self.table("users", USERS)
        for number, name in rows:
            self.commit(put(table, op, id=number, name=name))

    def batch(self, after: int, upto: int, parts: int = 1) -> LogBatch:
        """A piece of the log as the source hands it to so many tasks."""
        path = str(self.log.path)
        ranges = [(self.log.epoch, after, upto, part, parts) for part in range(parts)]
        rows = self.spark.sparkContext.parallelize(ranges, parts)
        columns = "epoch string, after long, upto long, part int, parts int"
        frame = self.spark.createDataFrame(rows, columns)
        log = PipelineLog(DiskLog(path), Options(path=path))
        return RangesBatch(frame, log, address={"path": path})

    def write(self, upto: int | None = None, *, parts: int = 1) -> int:
        """The next batch; returns how many changes it held."""
        upto = self.log.latest_sequence if upto is None else upto
        count = self.writer.write(self.batch(self.written, upto, parts), self.batches)
        self.written, self.batches = upto, self.batches + 1
        return count

    def letters(self) -> list[Row]:
        """The dead letters, in order."""
        folder = self.folder / "post" / "dead_letters"
        if not folder.exists():
            return []
        rows = DeltaTable(str(folder)).to_pyarrow_table()
        return list(rows.sort_by([("sequence", "ascending"), ("at", "ascending")]).to_pylist())


@contextmanager
def opened_post(spark: SparkSession, folder: Path, **chosen: Any) -> Iterator[Post]:
    """A post with an office of its own."""
    with opened_office() as office:
        post = Post(spark, folder, office, **chosen)
        try:
            yield post
        finally:
            post.log.close()
