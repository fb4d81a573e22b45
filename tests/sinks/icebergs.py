"""A log with an Iceberg history of it, batch by batch, and those who read it."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pyarrow as pa
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.table import Table
from pyspark import cloudpickle

from headrace.change.arrow.frame import Framing
from headrace.change.event import Column
from headrace.change.event import Table as SourceTable
from headrace.sinks import SinkWriter
from headrace.sinks.iceberg import IcebergHistory
from headrace.testing.iceberg import IcebergServer
from tests.sinks.archive import Archive
from tests.sinks.lake import SOURCE, Row


@dataclass(frozen=True)
class LocalRows:
    """Changes whose tasks run in this process, on copies as Spark would make them."""

    parts: list[list[pa.RecordBatch]]

    def select(self, *names: str) -> "LocalRows":
        """With these columns."""
        return LocalRows([[batch.select(names) for batch in part] for part in self.parts])

    def mapInArrow(self, task: Any, _: str) -> "LocalRows":  # noqa: N802 - as Spark calls it
        """With what a task makes of each part."""
        pickler: Any = cloudpickle  # without types
        copies = [pickle.loads(pickler.dumps(task)) for _ in self.parts]
        made = zip(copies, self.parts, strict=True)
        return LocalRows([list(copy(iter(part))) for copy, part in made])

    def collect(self) -> list[Row]:
        """All rows."""
        return [row for part in self.parts for batch in part for row in batch.to_pylist()]


class Glacier(Archive):
    """A log with an Iceberg history of it, in a namespace of its own."""

    def __init__(self, folder: Path, server: IcebergServer, **chosen: Any) -> None:
        self.server = server
        self.namespace = f"audit_{uuid4().hex[:8]}"
        no_spark: Any = None
        super().__init__(no_spark, folder, **chosen)

    def changes(self, after: int, upto: int, parts: int = 2) -> Any:
        """A piece of the log, in parts."""
        read = self.log.read(after, limit=1_000_000, upto=upto)
        framing = Framing(self.log.epoch, {each.table.version: each.table for each in read})
        records = [record for _, record in self.log.records(after, limit=1_000_000, upto=upto)]
        size = -(-len(records) // parts)
        cuts = [records[at * size : (at + 1) * size] for at in range(parts)]
        return LocalRows(
            [
                [framing.batch(after + at * size + 1, len(cut), b"".join(cut))]
                for at, cut in enumerate(cuts)
            ]
        )

    def given(self) -> list[Row]:
        """All changes of the log as the source gives them."""
        return list(self.changes(0, self.log.latest_sequence).collect())

    def sink_with(self, **chosen: Any) -> IcebergHistory:
        """The sink with other settings."""
        settings = {"uri": self.server.uri, "namespace": self.namespace} | self.chosen | chosen
        return IcebergHistory(name="audit", **settings)

    def open(self, writer: str = "query-1", *, adopt: bool = False) -> SinkWriter[Any]:
        """The sink as a query that starts would open it."""
        self.writer = self.sink_with().open(writer, adopt=adopt)
        return self.writer

    def other(self, name: str, columns: Sequence[Column], schema: str = "public") -> SourceTable:
        """A version of another table's columns."""
        described = SourceTable(
            SOURCE, "postgres", "origin-1", "shop", schema, name, tuple(columns), relation=8
        )
        return self.log.register(described)

    @property
    def catalog(self) -> RestCatalog:
        """The catalog as anybody opens it."""
        return RestCatalog("reader", uri=self.server.uri)

    def iceberg(self, name: str = "public_accounts") -> Table:
        """A table as anybody opens it."""
        found: Table = self.catalog.load_table((self.namespace, name))
        return found

    def rows(self, name: str = "public_accounts", *, own: bool = False) -> list[Row]:
        """The rows of an Iceberg table in the log's order, as pyiceberg reads them."""
        rows = self.iceberg(name).scan().to_arrow()
        return list(rows.sort_by([("epoch", "ascending"), ("sequence", "ascending")]).to_pylist())

    def sequences(self, name: str = "public_accounts") -> list[int]:
        """The numbers of the changes that a table has."""
        return [row["sequence"] for row in self.rows(name)]

    def snapshots(self, name: str = "public_accounts") -> int:
        """How many snapshots a table has."""
        return len(self.iceberg(name).metadata.snapshots)

    def manifests(self, name: str = "public_accounts") -> list[str]:
        """The names of the manifests that a table has now."""
        table = self.iceberg(name)
        snapshot = table.current_snapshot()
        assert snapshot is not None
        return [Path(each.manifest_path).name for each in snapshot.manifests(table.io)]

    def planned_by_java(self, name: str = "public_accounts", **request: Any) -> list[Row]:
        """The files that Iceberg's own library would read, and what it says of them."""
        answer = httpx.post(
            f"{self.server.uri}/v1/namespaces/{self.namespace}/tables/{name}/plan",
            json={"snapshot-id": self.iceberg(name).metadata.current_snapshot_id, **request},
        )
        answer.raise_for_status()
        return [task["data-file"] for task in answer.json().get("file-scan-tasks", [])]

    def files(self, pattern: str = "*.parquet") -> set[Path]:
        """The files that are on the disk."""
        return set((self.server.warehouse / self.namespace).rglob(pattern))
