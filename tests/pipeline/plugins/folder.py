"""A sink for tests: a folder with a file of JSON a batch, and faults on demand."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from headrace import errors
from headrace.sinks import FailedTable, Progress, Sink, SinkWriter

FAULT = "fault"  # a file in the folder with the name of an error, or `hang`, or `exit`


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder(Sink):
    """A folder of batches."""

    name: str
    path: str
    tables: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """What it keeps."""
        return ("sequence", "op", "table", "key", "after", "epoch")

    def open(self, writer: str, *, adopt: bool = False) -> "FolderWriter":
        """Begin to write."""
        folder = Path(self.path)
        folder.mkdir(parents=True, exist_ok=True)
        owner = folder / "writer"
        if owner.exists() and owner.read_text() != writer and not adopt:
            raise errors.SinkFenced(f"{owner.read_text()} writes to {folder}")
        owner.write_text(writer)
        return FolderWriter(folder, writer)


class FolderWriter(SinkWriter[DataFrame]):
    """A folder in use."""

    def __init__(self, folder: Path, writer: str) -> None:
        self._folder = folder
        self._writer = writer

    def write(self, batch: DataFrame, batch_id: int) -> int:
        """Store a batch."""
        self._fail("write")
        rows = [row.asDict() for row in batch.collect()]
        if rows:
            file = self._folder / f"{self._writer}.{batch_id:06}.json"
            fresh = file.with_suffix(".new")
            fresh.write_text(json.dumps(rows))
            fresh.replace(file)
        return len(rows)

    def maintain(self) -> None:
        """Note that it was called."""
        self._fail("maintain")
        with (self._folder / "maintained").open("a") as file:
            file.write("maintained\n")

    def progress(self) -> Progress | None:
        """The last change in the folder."""
        rows = stored(self._folder)
        return Progress(rows[-1]["epoch"], rows[-1]["sequence"]) if rows else None

    def failed_tables(self) -> list[FailedTable]:
        """What the file `failed` names."""
        file = self._folder / "failed"
        names = file.read_text().split() if file.exists() else []
        return [FailedTable(name, 1, "the file names it", "Remove the file.") for name in names]

    def _fail(self, where: str) -> None:
        file = self._folder / f"{FAULT}-{where}"
        if not file.exists():
            return
        fault = file.read_text()
        if fault == "hang":
            (self._folder / "hanging").touch()
            time.sleep(600)
        if fault == "exit":
            file.unlink()
            os._exit(9)
        if fault == "os":
            raise OSError(28, "No space left on device")
        kind = getattr(errors, fault, None)
        raise kind(f"{fault} was asked for") if kind else RuntimeError(fault)


def stored(folder: Path) -> list[dict[str, Any]]:
    """Everything in a folder, in the order of the log; a batch stored twice shows twice."""
    batches = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return sorted((row for rows in batches for row in rows), key=lambda row: row["sequence"])
