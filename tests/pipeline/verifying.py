"""A source that is captured, and a lake that follows it, while a test writes to both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headrace.capture import Capture
from headrace.change.path import split_path
from headrace.log import Log
from headrace.pipeline.options import Options
from headrace.pipeline.query import RangesBatch
from headrace.pipeline.reading import DiskLog, PipelineLog, close_reader
from headrace.pipeline.verify_tables import TablesVerifier, VerifiedTables
from headrace.sinks import LogRange
from headrace.sinks.tables.sink import Tables
from headrace.sources import Source
from headrace.testing import Place, session, wait_until
from tests.formats.other_sources import place_of
from tests.sources.capturing import postgres
from tests.sources.places import PostgresPlace
from tests.sources.redacting import Redacting

PATIENCE = 120.0  # seconds; far more than anything here takes, also on a busy machine


def places_of(
    stack: ExitStack, request: pytest.FixtureRequest, folder: Path
) -> Callable[[str], Place]:
    """What gives fresh databases of a kind."""

    def place(kind: str) -> Place:
        if kind == "postgres":
            servers = request.getfixturevalue("servers")
            return PostgresPlace(stack.enter_context(servers[16].database()), postgres)
        return place_of(kind, stack, request, folder)

    return place


def run(place: Place, *statements: str) -> None:
    """Transactions, one each."""
    for statement in statements:
        with session(place) as writer:
            writer.execute(statement)


class FollowingLake:
    """A capture, and a thread that carries the log into Delta tables, batch by batch."""

    def __init__(
        self,
        spark: SparkSession,
        folder: Path,
        source: Source,
        *,
        log: type[Log] = Log,
        **settings: Any,
    ) -> None:
        self.spark = spark
        self.folder = folder
        self.source = source
        self.path = folder / "lake"
        self.sink = Tables(**{"name": "lake", "path": str(self.path), **settings})
        self.log = log.open(folder / "log")
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
        finally:
            writer.close()

    def until_copied(self) -> None:
        """Wait until the first snapshot is in the lake."""

        def copied() -> bool:
            copies = self.capture.status().copies
            done = bool(copies) and all(copy.done for copy in copies)
            return done and self._written == self.log.latest_sequence

        wait_until(copied, timeout=PATIENCE)

    def until_stored(self, table: str) -> None:
        """Wait until the lake has a table with rows, and all that the log has."""
        folder = self.path.joinpath(*split_path(table))

        def stored() -> bool:
            there = DeltaTable.is_deltatable(str(folder)) and DeltaTable(str(folder)).count() > 0
            return there and self._written == self.log.latest_sequence

        wait_until(stored, timeout=PATIENCE)

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
            close_reader(str(self.log.path))
            self.log.close()
