"""A log with files of it, batch by batch."""

from __future__ import annotations

import functools
import gzip
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from headrace.change.event import Batch, Change, Op, Transaction
from headrace.formats.catalogue import Formats
from headrace.formats.facts import Facts, SourceServer
from headrace.log import Log
from headrace.model import Model
from headrace.sinks.files.sink import Files, FilesWriter
from headrace.sinks.lake.shape import renderer
from headrace.sources.postgres.position import PostgresPosition
from tests.sinks.archive import ACCOUNTS, account
from tests.sinks.lake import SOURCE, Row, Shop, put

DAY = 86_400_000_000  # microseconds
NOON = 1_794_657_600_000_000  # of 2026-11-14
FORMATS = Formats(Facts(servers=(SourceServer("shop", "db.example"),)), Model(tenant="tenant_id"))


class Cabinet(Shop):
    """A log whose transactions have the time one wants, and the files that are made of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = folder / "files"
        self.clock = NOON

    def at(self, moment: int, *changes: Change) -> None:
        """One transaction at a moment, in microseconds since 1970."""
        self.clock = moment
        self.commit(*changes)

    def commit(self, *changes: Change) -> None:
        """One transaction, at the clock."""
        number = next(self._numbers)
        transaction = Transaction(str(number), self.clock, self.clock)
        position = PostgresPosition(number * 16, number * 16 - 8)
        placed = [
            msgspec.structs.replace(
                change,
                transaction=transaction,
                position=position,
                ordinal=at,
                last=at == len(changes),
            )
            for at, change in enumerate(changes, 1)
        ]
        self.log.append(SOURCE, Batch(placed, b"resume"))

    @property
    def accounts(self) -> Any:
        """A version of the table's columns."""
        return self.table("accounts", ACCOUNTS)

    def fill(self, count: int, op: Op = Op.INSERT) -> None:
        """So many transactions of one change."""
        table = self.accounts
        for number in range(count):
            self.commit(put(table, op, **account(number, f"tenant {number % 2}")))

    def events(
        self, name: str = "savegress", upto: int | None = None, formats: Formats = FORMATS
    ) -> list[str]:
        """What the log's server writes of its changes, transaction by transaction."""
        render = renderer(formats.of_log(self.log.epoch).named(name))
        upto = self.log.latest_sequence if upto is None else upto
        events: list[str] = []
        transaction: list[Change] = []
        for change in self.log.read(0, limit=100_000, upto=upto):
            transaction.append(change)
            if change.last:
                events += [event.decode() for _, event in render(transaction)]
                transaction = []
        return events

    def names(self) -> list[str]:
        """Every file that a reader may find, by its name in the folder."""
        return names(self.path)

    def lines(self) -> list[str]:
        """What the files hold, taken by their names."""
        return [line for name in self.names() for line in lines(self.path / name)]

    def left(self) -> list[str]:
        """What is left of files and entries that never counted."""
        own = self.path / "_headrace"
        return [str(file) for file in (*own.glob("staging/*"), *own.glob(".*"))]


class Drawer(Cabinet):
    """Changes go into a log, and batches of it into files."""

    def __init__(self, spark: SparkSession, folder: Path, **chosen: Any) -> None:
        super().__init__(folder)
        self.spark = spark
        self.chosen: dict[str, Any] = {"formats": FORMATS, **chosen}
        self.written = 0  # the last sequence that a batch has brought to the sink
        self.batches = 0
        self.writer = self.open()

    def open(self, writer: str = "query-1", *, adopt: bool = False) -> FilesWriter:
        """The sink as a query that starts would open it."""
        sink = Files(**({"name": "drawer", "path": str(self.path)} | self.chosen))
        self.writer = sink.open(writer, adopt=adopt)
        return self.writer

    def changes(self, after: int, upto: int, parts: int = 1) -> DataFrame:
        """A piece of the log, read by so many tasks."""
        cuts = [after + (upto - after) * at // parts for at in range(parts + 1)]
        reader = self.spark.read.format("headrace").option("path", str(self.log.path))
        pieces = [
            reader.options(startingSequence=begin + 1, endingSequence=end).load()
            for begin, end in itertools.pairwise(cuts)
        ]
        return functools.reduce(DataFrame.unionAll, pieces)

    def write(self, upto: int | None = None, *, parts: int = 1) -> int:
        """The next batch; returns how many changes it held."""
        upto = self.log.latest_sequence if upto is None else upto
        count = self.writer.write(self.changes(self.written, upto, parts), self.batches)
        self.written, self.batches = upto, self.batches + 1
        return count

    def replace_log(self, name: str) -> None:
        """Go on with another log, of the same source."""
        self.log.close()
        self.log = Log.open(self.folder / name)
        self.written = 0


def names(path: Path) -> list[str]:
    """The files below a folder, but for our own, in the order of sequences."""
    found = (str(file.relative_to(path)) for file in path.glob("day=*/**/*") if file.is_file())
    return sorted(found, key=lambda name: (name.rpartition("/")[2], name))


def lines(file: Path) -> list[str]:
    """The events of a file, of either kind."""
    if file.suffix == ".parquet":
        return [row["event"] for row in parquet(file)]
    content = file.read_bytes()
    if file.suffix == ".gz":
        content = gzip.decompress(content)
    elif file.suffix == ".zst":
        with pa.input_stream(pa.py_buffer(content), compression="zstd") as stream:
            content = stream.read()
    assert content.endswith(b"\n")
    return content.decode().removesuffix("\n").split("\n")


def rows(path: Path) -> list[Row]:
    """The rows of Parquet files, taken by their names."""
    return [row for name in names(path) for row in parquet(path / name)]


def parquet(file: Path) -> list[Row]:
    """What a file itself holds, without what its folder says."""
    with pq.ParquetFile(file) as opened:
        return list(opened.read().to_pylist())


@contextmanager
def opened_drawer(spark: SparkSession, folder: Path, **chosen: Any) -> Iterator[Drawer]:
    """A drawer that is closed in the end."""
    drawer = Drawer(spark, folder, **chosen)
    try:
        yield drawer
    finally:
        drawer.log.close()
