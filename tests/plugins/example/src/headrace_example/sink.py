"""A sink: a folder with a file of JSON lines for each batch."""

import json
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame

from headrace.errors import SinkFenced
from headrace.sinks import Progress, Sink, SinkWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches(Sink):
    """A folder of batches; its fields are its settings."""

    name: str
    path: str
    tables: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        return ("epoch", "sequence", "op", "table", "after")

    def open(self, writer: str, *, adopt: bool = False) -> "BatchesWriter":
        folder = Path(self.path)
        folder.mkdir(parents=True, exist_ok=True)
        owner = folder / "writer"
        if owner.exists() and owner.read_text() != writer and not adopt:
            raise SinkFenced(f"another pipeline writes to {folder}")
        owner.write_text(writer)
        return BatchesWriter(folder, writer)


class BatchesWriter(SinkWriter[DataFrame]):
    """The folder, as one query writes to it."""

    def __init__(self, folder: Path, writer: str) -> None:
        self._folder = folder
        self._writer = writer

    def write(self, batch: DataFrame, batch_id: int) -> int:
        rows = [row.asDict() for row in batch.orderBy("sequence").collect()]
        if rows:
            # A batch that comes again has the same name, and replaces the file that is there.
            file = self._folder / f"{self._writer}-{batch_id:09}.jsonl"
            fresh = file.with_suffix(".new")
            fresh.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
            fresh.replace(file)
        return len(rows)

    def progress(self) -> Progress | None:
        lines = [file.read_text().splitlines()[-1] for file in self._folder.glob("*.jsonl")]
        last = max(map(json.loads, lines), key=lambda row: row["sequence"], default=None)
        return Progress(last["epoch"], last["sequence"]) if last else None
