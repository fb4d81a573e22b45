"""A source that is captured, and a lake that follows it, while a test writes to both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from pyspark.sql import SparkSession

from headrace.capture import Capture
from headrace.log import Log
from headrace.pipeline.options import Options
from headrace.pipeline.query import RangesBatch
from headrace.pipeline.reading import DiskLog, PipelineLog
from headrace.pipeline.verify_tables import TablesVerifier, VerifiedTables
from headrace.sinks import LogRange
from headrace.sinks.tables.sink import Tables
from headrace.sources import Source
from headrace.testing import wait_until
from tests.sources.redacting import Redacting

PATIENCE = 120.0  # seconds; far more than anything here takes, also on a busy machine


class FollowingLake:
    """A capture, and a thread that carries the log into Delta tables, batch by batch."""

    def __init__(self, spark: SparkSession, folder: Path, source: Source, **settings: Any) -> None:
        self.spark = spark
        self.folder = folder
        self.source = source
        self.path = folder / "lake"
        self.sink = Tables(**{"name": "lake", "path": str(self.path), **settings})
        self.log = Log.open(folder / "log")
        self.capture = Capture(cast("Source", Redacting(source)), self.log)
        self.failure: BaseException | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._written = self._batches = 0

    def _follow(self) -> None:
        path = str(self.log.path)
        log = PipelineLog(DiskLog(path), Options(path=path))
        writer = self.sink.open("query-1")
        try:
            while not self._stopping.wait(0.02):
                upto = self.log.latest_sequence
                if upto == self._written:
                    continue
                wanted = LogRange(log, self.log.epoch, self._written, upto)
                address = {"path": path}
                batch = RangesBatch.of_range(self.spark, wanted, parts=2, address=address)
                writer.write(batch, self._batches)
                self._written, self._batches = upto, self._batches + 1
        except BaseException as error:
            self.failure = error
            raise

    def until_copied(self) -> None:
        """Wait until the first snapshot is in the lake."""

        def copied() -> bool:
            copies = self.capture.status().copies
            done = bool(copies) and all(copy.done for copy in copies)
            return done and self._written == self.log.latest_sequence

        wait_until(copied, timeout=PATIENCE)

    def verify(self, *tables: str) -> VerifiedTables:
        """Compare."""
        verifier = TablesVerifier(
            sink=self.sink,
            sources=[self.source],
            log_dir=self.log.path,
            folder=self.folder / "work",
            session=lambda: nullcontext(self.spark),
            patience=PATIENCE,
        )
        found = verifier.verify(tables)
        assert self.failure is None
        assert list((self.folder / "work").glob("rows-*")) == []  # nothing is left behind
        return found

    @contextmanager
    def running(self) -> Iterator[FollowingLake]:
        """Capture and follow while the block runs."""
        self.capture.start()
        self._thread.start()
        try:
            self.until_copied()
            yield self
        finally:
            self.capture.stop()
            self._stopping.set()
            self._thread.join()
            self.log.close()
