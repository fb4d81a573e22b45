"""A log and a tables sink on it, batch by batch, and what the tables should hold."""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from headrace.change import block
from headrace.change.arrow import decode
from headrace.change.columns import schema_payload
from headrace.change.event import Batch, BeforeKind, Change, Column, Op, Table, Transaction
from headrace.change.record import Records
from headrace.change.replay import Replay, TableName
from headrace.log import Log
from headrace.pipeline.options import Options
from headrace.pipeline.query import RangesBatch
from headrace.pipeline.reading import DiskLog, PipelineLog
from headrace.pipeline.source import LOG_RANGES
from headrace.sinks import SinkWriter
from headrace.sinks.tables.sink import Tables, TablesWriter
from headrace.sinks.tables.target import TargetTable
from headrace.sources.postgres.position import PostgresPosition
from tests.deltas import stored

SOURCE = "shop"
ORDERS = (
    Column("id", "bigint", key=True),
    Column("status", "text"),
    Column("amount", "numeric(12,2)"),
    Column("note", "text"),
)

Row = dict[str, Any]


class Shop:
    """A log of changes made by hand, and the Delta tables that are made of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "lake"
        self.log = Log.open(folder / "log")
        self._numbers = itertools.count(1)

    def table(
        self, name: str, columns: Sequence[Column] = ORDERS, *, first: str | None = None
    ) -> Table:
        """A version of a table's columns; `first`: the name that it had at first."""
        number = crc32((first or name).encode())
        described = Table(
            SOURCE, "postgres", "origin-1", "shop", "public", name, tuple(columns), relation=number
        )
        return self.log.register(described)

    def commit(self, *changes: Change) -> None:
        """One transaction."""
        number, now = next(self._numbers), time.time_ns() // 1000
        transaction = Transaction(str(number), now, now)
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

    def snapshot(self, table: Table, rows: Sequence[Row], *, point: int = 1) -> None:
        """Rows that a snapshot has read together, in columns; `point`: which snapshot."""
        number, now = next(self._numbers), time.time_ns() // 1000
        columns = [
            block.json_text([_json(row[column.name]) for row in rows]) for column in table.columns
        ]
        position = PostgresPosition(point * 16, point * 16)
        packed = block.pack(
            table,
            Transaction(f"snapshot-{number}", now, now),
            (position, position),
            [column for column in columns if column],
            len(rows),
        )
        runs = [(table.version, "READ", now, len(rows))]
        self.log.append(SOURCE, Batch(Records([packed], {table.version: table}, runs), b"resume"))

    def delta(self, name: str = "orders") -> DeltaTable:
        """A table as anybody opens it."""
        return DeltaTable(str(self.path / "public" / name))

    def rows(self, name: str = "orders", *, own: bool = False) -> list[Row]:
        """The rows of a Delta table, without our own columns unless asked."""
        table = stored(self.delta(name))
        kept = [each for each in table.column_names if own or not each.startswith("_")]
        return ordered(table.select(kept).to_pylist())

    def expected(self, name: str = "orders", upto: int | None = None) -> list[Row]:
        """The rows that a naive replay of the log adds up to; null is what does not fit."""
        upto = self.log.latest_sequence if upto is None else upto
        changes = self.log.read(0, limit=10_000_000, upto=upto)
        replay = Replay.of(changes)
        assert not replay.surprises
        columns = [c.table.columns for c in changes if c.table.name == name][-1]
        images = [_exact(row) for row in replay.rows(TableName(SOURCE, "public", name))]
        rows = decode(images, columns, connector="postgres", rescue=True)
        return ordered(rows.select([column.name for column in columns]).to_pylist())


def order(number: int, status: str = "new") -> Row:
    """A row of the table of orders."""
    return {"id": number, "status": status, "amount": "1.00", "note": f"n{number}"}


class Lake(Shop):
    """Changes go into a log, and batches of it into Delta tables."""

    def __init__(self, spark: SparkSession, folder: Path, **settings: Any) -> None:
        super().__init__(folder)
        self.spark = spark
        self.sink = Tables(**{"name": "lake", "path": str(self.path), **settings})
        self.written = 0  # the last sequence that a batch has brought to the sink
        self.batches = 0
        self.writer = self.open()

    def open(self, writer: str = "query-1", *, adopt: bool = False) -> SinkWriter[Any]:
        """The sink as a query that starts would open it."""
        self.writer = self.sink.open(writer, adopt=adopt)
        return self.writer

    def changes(self, after: int, upto: int, parts: int = 2) -> Any:
        """A piece of the log as the sink gets it."""
        ranges = [(self.log.epoch, after, upto, part, parts) for part in range(parts)]
        schema = from_arrow_schema(LOG_RANGES)
        rows = self.spark.sparkContext.parallelize(ranges if upto > after else [], parts)
        path = str(self.log.path)
        log = PipelineLog(DiskLog(path), Options(path=path))
        ranged = self.spark.createDataFrame(rows, schema)
        return RangesBatch(ranged, log, address={"path": path})

    def fill(self, numbers: range) -> None:
        """A batch of new orders."""
        orders = self.table("orders")
        self.commit(*(put(orders, **order(number)) for number in numbers))
        self.write()

    def compact(self) -> None:
        """What goes on beside batches, to its end."""
        self.writer.maintain()
        self.writer.finish()

    @property
    def target(self) -> TargetTable:
        """The only table, as the sink sees it."""
        assert isinstance(self.writer, TablesWriter)
        (found,) = self.writer._targets.values()
        return found

    def write(self, upto: int | None = None) -> int:
        """The next batch; returns how many changes it held."""
        upto = self.log.latest_sequence if upto is None else upto
        count = self.writer.write(self.changes(self.written, upto), self.batches)
        self.written, self.batches = upto, self.batches + 1
        return count


def ordered(rows: list[Row]) -> list[Row]:
    """Rows in an order that does not depend on where they lay."""
    return sorted(rows, key=lambda row: str(sorted(row.items(), key=lambda item: item[0])))


def change(op: Op, table: Table, **fields: Any) -> Change:
    """A change that still needs its transaction."""
    given = {
        "key": None,
        "before": None,
        "before_kind": BeforeKind.NONE,
        "after": None,
        "changed": None,
        "unchanged": (),
        "transaction": Transaction("", 0, 0),
        "ordinal": 0,
        "position": PostgresPosition(0, 0),
    }
    return Change(op=op, table=table, **(given | fields))


def put(table: Table, op: Op = Op.INSERT, *, was: Row | None = None, **row: Any) -> Change:
    """A row as it is now; `was`: the key that it had before."""
    sent = tuple(row)
    absent = tuple(column.name for column in table.columns if column.name not in sent)
    return change(
        op,
        table,
        key=_key(table, row),
        before=_json(was) if was else None,
        before_kind=BeforeKind.KEY if was else BeforeKind.NONE,
        after=_json(row),
        unchanged=absent if op is Op.UPDATE else (),
    )


def remove(table: Table, **key: Any) -> Change:
    """A row that is gone."""
    image = _json(key)
    return change(Op.DELETE, table, key=image, before=image, before_kind=BeforeKind.KEY)


def truncate(table: Table, *, snapshot: bool = False) -> Change:
    """A table without rows, as TRUNCATE or the begin of a full copy leaves it."""
    return change(Op.TRUNCATE, table, after=_json({"snapshot": True} if snapshot else {}))


def schema(table: Table) -> Change:
    """A table's columns from here on."""
    return change(Op.SCHEMA, table, after=_json(schema_payload(table)))


_exact = msgspec.json.Encoder(decimal_format="number").encode


def _key(table: Table, row: Row) -> bytes | None:
    return _json({name: row[name] for name in table.key}) if table.key else None


def _json(row: Row) -> bytes:
    return msgspec.json.encode(row)
