"""A log with a history of it, batch by batch."""

from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headrace.change.event import Column
from headrace.log import Log
from headrace.sinks import SinkWriter
from headrace.sinks.history import History
from tests.sinks.lake import Lake, Row, put

ACCOUNTS = (
    Column("id", "bigint", key=True),
    Column("tenant_id", "text"),
    Column("name", "text"),
)


class Archive(Lake):
    """A log with a history of it."""

    writer: SinkWriter[Any]

    def __init__(self, spark: SparkSession, folder: Path, **chosen: Any) -> None:
        self.chosen = chosen
        super().__init__(spark, folder)

    def open(self, writer: str = "query-1", *, adopt: bool = False) -> SinkWriter[Any]:
        """The sink as a query that starts would open it."""
        sink = History(name="audit", path=str(self.path), **self.chosen)
        self.writer = sink.open(writer, adopt=adopt)
        return self.writer

    def changes(self, after: int, upto: int, parts: int = 2) -> Any:
        """A piece of the log, whole."""
        reader = self.spark.read.format("headrace").option("path", str(self.log.path))
        return reader.options(startingSequence=after + 1, endingSequence=upto).load()

    def replace_log(self, name: str) -> None:
        """Go on with another log, of the same source."""
        self.log.close()
        self.log = Log.open(self.folder / name)
        self.written = 0

    @property
    def table(self) -> Any:
        """A version of the table's columns."""
        return super().table("accounts", ACCOUNTS)

    def stored(self) -> list[Row]:
        """The rows of the history, in the log's order."""
        rows = DeltaTable(str(self.path)).to_pyarrow_table()
        return list(rows.sort_by([("epoch", "ascending"), ("sequence", "ascending")]).to_pylist())

    def version(self) -> int:
        """Of the Delta table."""
        return DeltaTable(str(self.path)).version()


def account(number: int, tenant: str | None = "acme", name: str = "-") -> Row:
    return {"id": number, "tenant_id": tenant, "name": name}


def fill(archive: Archive, batches: int, tenant: str | None = "acme") -> None:
    for number in range(batches):
        archive.commit(put(archive.table, **account(number, tenant)))
        archive.write()
        archive.writer.maintain()
