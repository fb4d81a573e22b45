"""Copying tables under one exported snapshot: ranges of blocks, several at once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec
import psycopg
from psycopg import sql

from ...change import block
from ...change.event import BeforeKind, Change, Op, Position, Transaction
from ...change.lsn import format_lsn
from ...change.record import Records, rows_in_block
from ...errors import DecodeError, SourceError, SourceUnavailable
from ..pace import RowPace
from .address import Address, classify
from .catalog import Published
from .position import PostgresPosition
from .replication import copy_lines
from .resume import BlockRange
from .rows import Rows
from .waiters import WaiterWatch

RANGE_BLOCKS = 2048  # 16 MB of table
_BATCH_ROWS = 8192
_BATCH_BYTES = 3 << 18  # what comes with the last row still fits into a block, if it is not large

# A copy that was interrupted goes on after the last ctid it has read. Only this plan reads in the
# order of the ctids; an index on the columns of a row filter would tempt the planner away from it.
_IN_ORDER = """
    SET LOCAL enable_tidscan = on;
    SET LOCAL enable_seqscan = off;
    SET LOCAL enable_indexscan = off;
    SET LOCAL enable_bitmapscan = off;
    SET LOCAL max_parallel_workers_per_gather = 0"""

# A snapshot shows a table that was rewritten after it as empty; then the server's present word for
# the table's file is not the snapshot's.
_REWRITTEN = """
    SELECT 1 FROM pg_class
    WHERE oid = %s::regclass AND relfilenode <> pg_relation_filenode(oid)"""

# Rows are read by the names of columns, and a name may mean another column by now: what the
# snapshot shows is compared with what the server's own function finds.
_ALTERED = """
    SELECT 1 FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
    JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped
      AND (pg_get_object_address('table column', ARRAY[n.nspname, c.relname, a.attname], '{}')
          ).objsubid <> a.attnum"""

_CHANGED = {"42703", "42P01"}  # undefined_column, undefined_table
_NOT_READABLE = "42501"  # insufficient_privilege


@dataclass(frozen=True, slots=True)
class Task:
    """One range of one table, to be read by one worker."""

    table: Published
    rows: Rows
    range: BlockRange
    # Read only rows written by this transaction or a later one, outside `left`: rows that may
    # have moved out of a range that was not read yet into one that was. 0: read every row.
    since: int = 0
    left: tuple[BlockRange, ...] = ()


@dataclass(frozen=True, slots=True)
class Copied:
    """Rows that a worker has read, and what is left of their range; None: nothing."""

    task: Task
    changes: Sequence[Change]
    left: BlockRange | None
    error: str = ""  # why the table cannot be copied


@dataclass(frozen=True, slots=True)
class Point:
    """The moment the copy shows: a snapshot and the LSN it belongs to."""

    snapshot: str
    lsn: int

    @property
    def name(self) -> str:
        """What tells its transactions from those of another point."""
        return format_lsn(self.lsn)

    @property
    def position(self) -> Position:
        """Where its rows stand in the source."""
        return PostgresPosition(self.lsn, self.lsn)

    @property
    def last_position(self) -> Position:
        """Where the last row of a transaction stands."""
        return PostgresPosition(self.lsn, self.lsn, self.lsn)

    def end(self, change: Change) -> None:
        """Make a change that nobody has seen yet the last of its transaction."""
        msgspec.structs.force_setattr(change, "position", self.last_position)
        msgspec.structs.force_setattr(change, "last", True)


class PostgresSnapshotReader:
    """Reads tasks with several workers that share one snapshot, until somebody waits for them."""

    def __init__(
        self, address: Address, point: Point, watch: WaiterWatch, *, workers: int, pace: RowPace
    ) -> None:
        self._address = address
        self._point = point
        self._watch = watch
        self._workers = workers
        self._pace = pace
        self._closed = threading.Event()
        self._read: queue.Queue[Copied | BaseException | None] = queue.Queue(maxsize=8)

    def close(self) -> None:
        """Stop the workers after the rows at hand."""
        self._closed.set()

    def copy(self, tasks: Sequence[Task]) -> Iterator[Copied]:
        """Read every task, or as much as can be; what comes from one range comes in order."""
        with closing(self.polled(tasks, None)) as reading:
            for copied in reading:
                if copied is not None:
                    yield copied

    def polled(
        self, tasks: Sequence[Task], seconds: float | None
    ) -> Generator[Copied | None, None, None]:
        """As `copy`, with a None whenever nothing has come for so long."""
        todo: queue.SimpleQueue[Task] = queue.SimpleQueue()
        for task in tasks:
            todo.put(task)
        connections = [self._session() for _ in range(min(self._workers, len(tasks)))]
        threads = [
            threading.Thread(target=self._work, args=(connection, todo), daemon=True)
            for connection in connections
        ]
        for thread in threads:
            thread.start()
        try:
            yield from self._collect(len(threads), seconds)
        finally:
            self._closed.set()
            self._drain(threads)

    def _collect(self, workers: int, seconds: float | None) -> Iterator[Copied | None]:
        while workers:
            try:
                copied = self._read.get(timeout=seconds)
            except queue.Empty:
                yield None
                continue
            if isinstance(copied, BaseException):
                raise copied
            if copied is None:
                workers -= 1
            else:
                yield copied

    def _drain(self, threads: list[threading.Thread]) -> None:
        """Let workers that wait to hand something over come to their end."""
        while any(thread.is_alive() for thread in threads):
            try:
                self._read.get(timeout=0.05)
            except queue.Empty:
                continue

    def _session(self) -> psycopg.Connection[Any]:
        """A session that sees the snapshot; all are opened before any reads, as it may vanish."""
        connection = self._address.connect()
        try:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            snapshot = sql.Literal(self._point.snapshot)
            connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(snapshot))
            connection.execute(_IN_ORDER)
        except psycopg.Error as error:
            connection.close()
            raise classify(error, "cannot share the snapshot") from error
        return connection

    def _work(self, connection: psycopg.Connection[Any], todo: queue.SimpleQueue[Task]) -> None:
        held: set[str] = set()
        session = connection.info.backend_pid
        self._watch.add(session)
        try:
            while not (self._closed.is_set() or self._watch.yielded):
                task = todo.get_nowait()
                if task.range.relation not in held:
                    _hold(connection, task.range.relation)
                    held.add(task.range.relation)
                self._copy_range(connection, task)
            self._read.put(None)
        except queue.Empty:
            self._read.put(None)
        except psycopg.Error as error:
            self._read.put(None if self._watch.yielded else _failure(error))
        except Exception as error:  # noqa: BLE001 - raised again by whoever collects
            self._read.put(error)
        finally:
            self._watch.remove(session)
            connection.close()

    def _copy_range(self, connection: psycopg.Connection[Any], task: Task) -> None:
        arriving = copy_lines(connection.pgconn, _statement(task).as_bytes(connection))
        batch = _Reading(task, self._point, rows=self._pace.piece(_BATCH_ROWS))
        try:
            for lines in arriving:
                batch.take(lines)
                while batch.full:
                    self._hand_over(batch.cut())
                if self._closed.is_set():
                    return
            self._hand_over(batch.end())
        except DecodeError as error:
            self._read.put(batch.failed(error))
            for _ in arriving:
                pass  # the rest of the range, before the session can be used again

    def _hand_over(self, copied: Copied) -> None:
        self._closed.wait(self._pace.delay(len(copied.changes)))
        self._read.put(copied)


class _Reading:
    """Rows of one range, collected into batches; each batch is a transaction of its own."""

    def __init__(self, task: Task, point: Point, *, rows: int) -> None:
        self._task = task
        self._point = point
        self._rows = rows  # in a batch
        self._decoder = task.rows.lines()
        self._lines: list[bytes] = []
        self._bytes = 0
        self._start = task.range.start

    def take(self, lines: list[bytes]) -> None:
        """Add rows; the list is emptied, since a row may have many megabytes."""
        self._lines += lines
        self._bytes += sum(map(len, lines))
        lines.clear()

    @property
    def full(self) -> bool:
        """Whether there are enough rows for a batch."""
        return len(self._lines) >= self._rows or self._bytes >= _BATCH_BYTES

    def cut(self) -> Copied:
        """Hand over a batch; the range goes on after its last row."""
        rest = self._lines[self._rows :]
        del self._lines[self._rows :]
        ctid = self._lines[-1].partition(b"\t")[0].decode()
        block, _, row = ctid.strip("()").partition(",")
        left = msgspec.structs.replace(self._task.range, start=f"({block},{int(row) + 1})")
        copied = Copied(self._task, self._changes(), left)
        self._start = left.start
        self.take(rest)
        return copied

    def end(self) -> Copied:
        """Hand over the rest; nothing is left of the range."""
        return Copied(self._task, self._changes(), None)

    def failed(self, error: DecodeError) -> Copied:
        """Give the table up: what it holds cannot be read."""
        return Copied(self._task, [], None, str(error))

    def _changes(self) -> Sequence[Change]:
        lines, size, transaction = self._lines, sum(map(len, self._lines)), self._transaction()
        self._lines, self._bytes = [], 0
        packed = self._block(lines, transaction) if lines and size <= block.LARGEST else None
        return self._rows_of(lines, transaction) if packed is None else packed

    def _block(self, lines: list[bytes], transaction: Transaction) -> Records | None:
        """Rows as one value of the log; None: they must be stored one by one."""
        columns = self._decoder.columns(lines)
        if columns is None:
            return None
        table, point = self._task.rows.table, self._point
        positions = point.position, point.last_position
        return rows_in_block(table, transaction, positions, columns, len(lines))

    def _rows_of(self, lines: list[bytes], transaction: Transaction) -> list[Change]:
        keys, images = self._decoder.images(lines)
        table, position = self._task.rows.table, self._point.position
        changes = [
            Change(
                Op.READ,
                table,
                key,
                None,
                BeforeKind.NONE,
                image,
                None,
                (),
                transaction,
                ordinal,
                position,
            )
            for ordinal, (key, image) in enumerate(zip(keys, images, strict=True), 1)
        ]
        if changes:
            self._point.end(changes[-1])
        return changes

    def _transaction(self) -> Transaction:
        kind = "moved" if self._task.since else "snapshot"
        name = f"{kind}-{self._point.name}-{self._task.range.relation}-{self._start}"
        now = time.time_ns() // 1000
        return Transaction(name, now, now)


def ranges(relation: str, blocks: int) -> list[BlockRange]:
    """The blocks of a physical table in pieces; the last one is open, for it may grow."""
    starts = range(0, max(blocks, 1), RANGE_BLOCKS)
    return [
        BlockRange(relation, f"({start},0)", start + RANGE_BLOCKS if start != starts[-1] else None)
        for start in starts
    ]


def _hold(connection: psycopg.Connection[Any], relation: str) -> None:
    """Keep a table as it is to the end of the copy, unless it is not what the snapshot shows."""
    name = sql.SQL(relation)
    connection.execute(sql.SQL("LOCK TABLE ONLY {} IN ACCESS SHARE MODE").format(name))
    if connection.execute(_REWRITTEN, (relation,)).fetchone():
        raise SourceUnavailable(f"{relation} was rewritten when its copy was about to begin")
    if connection.execute(_ALTERED, (relation,)).fetchone():
        raise SourceUnavailable(f"{relation} was altered when its copy was about to begin")


def _failure(error: psycopg.Error) -> SourceError:
    if error.sqlstate in _CHANGED:
        # Between the description and the reading; another description will be right.
        return SourceUnavailable(f"a table changed when its copy was about to begin: {error}")
    if error.sqlstate == _NOT_READABLE:
        # Revoked just now; the next look finds that out and leaves the table aside.
        return SourceUnavailable(f"copy failed: {error}")
    return classify(error, "copy failed")


def _statement(task: Task) -> sql.Composed:
    columns = sql.SQL(", ").join(sql.Identifier(c.name) for c in task.rows.table.columns)
    conditions = [_inside(task.range)]
    if task.table.filter:
        conditions.append(sql.SQL("({})").format(sql.SQL(task.table.filter)))
    if task.since:
        conditions.append(_written_since(task.since))
        conditions += [sql.SQL("NOT ({})").format(_inside(left)) for left in task.left]
    return sql.SQL("COPY (SELECT ctid, {} FROM ONLY {} WHERE {}) TO STDOUT").format(
        columns,
        sql.SQL(task.range.relation),
        sql.SQL(" AND ").join(conditions),
    )


def _inside(part: BlockRange) -> sql.Composed:
    start = sql.SQL("ctid >= {}::tid").format(sql.Literal(part.start))
    if part.end is None:
        return start
    return start + sql.SQL(" AND ctid < {}::tid").format(sql.Literal(f"({part.end},0)"))


def _written_since(xid: int) -> sql.Composed:
    # xmin has 32 bits: "since" is the half circle that follows.
    return sql.SQL("(xmin::text::bigint - {} + 4294967296) % 4294967296 < 2147483648").format(
        sql.Literal(xid & 0xFFFFFFFF)
    )
