"""A snapshot of tables, and the position in the binary log that it shows."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from pymysql.err import MySQLError

from ...change import block
from ...change.event import BeforeKind, Change, Op, Table, Transaction
from ...change.printed import Encode, Printed
from ...change.record import Records
from ...errors import DecodeError, SourceError, SourceRefused, SourceUnavailable
from ..pace import RowPace
from .address import MysqlAddress, classify, error_number, quoted, run
from .aside import LOCK_SECONDS
from .catalog import BinlogEnd, FoundTable, MysqlCatalog
from .decode.path import TablePath
from .decode.times import ZERO
from .decode.values import printed_as, select_expression, text_encoder
from .dump import Packets, force_close, refused
from .position import MysqlPosition
from .resume import DeclaredTable

if TYPE_CHECKING:
    from pymysql.connections import Connection
    from pymysql.cursors import Cursor

logger = logging.getLogger(__name__)

_COM_QUERY = 0x03
_BATCH_ROWS = 8192
_BATCH_BYTES = 3 << 18  # what comes with the last row still fits into a block, if it is not large
_WAIT_SECONDS = 0.5  # between two tests whether it has been closed
_SILENCE = 3600.0  # seconds
_ERROR, _EOF = 0xFF, 0xFE
_LONGEST_EOF = 9
_label = msgspec.json.Encoder().encode

_SHORT_WAIT = f"SET SESSION lock_wait_timeout = {LOCK_SECONDS}"
_ISOLATION = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"
_SNAPSHOT = "START TRANSACTION WITH CONSISTENT SNAPSHOT"


class MysqlSnapshot:
    """A session that shows tables as they were at one position of the binary log."""

    def __init__(self, connection: Connection[Cursor], end: BinlogEnd) -> None:
        self._connection = connection
        self.end = end
        self._packets: Packets | None = None
        self._closed = False
        self._heard = time.monotonic()

    @classmethod
    def open(
        cls, address: MysqlAddress, catalog: MysqlCatalog, tables: Sequence[FoundTable]
    ) -> MysqlSnapshot:
        """Begin a snapshot, or keep a table that has none from being written."""
        connection = address.connect()
        try:
            run(connection, _SHORT_WAIT)
            if all(table.transactional for table in tables):
                end = _snapshot(connection, address, catalog, tables)
            else:
                # No transaction shows its rows: it must not be written while they are read.
                names = ", ".join(f"{quoted(each.schema, each.name)} READ" for each in tables)
                run(connection, f"LOCK TABLES {names}")
                end = catalog.exact_end()
            _expect_nothing_prepared(catalog)
        except Exception:
            force_close(connection)
            raise
        return cls(connection, end)

    def hold(self, table: FoundTable) -> None:
        """Keep a table's definition as it is until the snapshot is done."""
        run(self._connection, f"SELECT 1 FROM {quoted(table.schema, table.name)} LIMIT 0")

    def rows(
        self, table: Table, declared: DeclaredTable, pace: RowPace
    ) -> Iterator[Sequence[Change]]:
        """The rows, some thousands at a time; each time they are a transaction of their own."""
        batches = _RowBatches(table, declared, self.end, rows=pace.piece(_BATCH_ROWS))
        answer = self._query(_statement(table, declared))
        try:
            try:
                for packets in answer:
                    yield from batches.take(packets)
                yield batches.cut()
            except DecodeError:
                # The snapshot has other tables to show: the rest of this answer must be gone.
                for _ in answer:
                    pass
                raise
        except OSError as error:
            raise SourceUnavailable("the connection to the server broke in a snapshot") from error

    def _query(self, statement: str) -> Iterator[list[bytes]]:
        """The rows of a statement as the server sends them."""
        connection: Any = self._connection
        try:
            connection._execute_command(_COM_QUERY, statement.encode())
        except MySQLError as error:
            raise classify(error, "the snapshot failed") from error
        self._heard = time.monotonic()
        packets_of = self._packets = self._packets or Packets(connection)
        head = 2  # the columns come first, then an end, then the rows
        while not self._closed:
            packets = packets_of.receive(_WAIT_SECONDS)
            if packets is None:
                self._expect_heard()
                continue
            self._heard = time.monotonic()
            rows: list[bytes] = []
            for packet in packets:
                if packet[0] == _ERROR:
                    raise refused(packet, "the snapshot failed")
                if packet[0] == _EOF and len(packet) < _LONGEST_EOF:
                    head -= 1
                    if not head:
                        yield rows
                        return
                elif head == 1:
                    rows.append(packet)
            yield rows

    def _expect_heard(self) -> None:
        if time.monotonic() - self._heard > _SILENCE:
            raise SourceUnavailable(f"the server has sent no row for {_SILENCE:.0f} s")

    def wake(self) -> None:
        """End the snapshot from another thread."""
        self._closed = True

    def close(self) -> None:
        """End the snapshot and its session."""
        self._closed = True
        force_close(self._connection)


def _snapshot(
    connection: Connection[Cursor],
    address: MysqlAddress,
    catalog: MysqlCatalog,
    tables: Sequence[FoundTable],
) -> BinlogEnd:
    run(connection, _ISOLATION)
    if catalog.server().mariadb:
        run(connection, _SNAPSHOT)
        return _snapshot_end(connection, catalog)
    locking = address.connect()
    try:
        _lock(locking, tables)
        run(connection, _SNAPSHOT)
        return catalog.end()
    finally:
        force_close(locking)  # unlocks


def _snapshot_end(connection: Connection[Cursor], catalog: MysqlCatalog) -> BinlogEnd:
    """MariaDB knows where in the binary log a snapshot stands, so nothing has to be locked."""
    status = {
        str(name).lower(): str(value)
        for name, value in run(connection, "SHOW STATUS LIKE 'binlog_snapshot_%'")
    }
    file, position = status.get("binlog_snapshot_file", ""), status["binlog_snapshot_position"]
    if not file:
        raise SourceRefused("the server writes no binary log (log_bin is off)")
    return BinlogEnd(file, int(position), catalog.gtids_at(file, int(position)))


def _lock(connection: Connection[Cursor], tables: Sequence[FoundTable]) -> None:
    """Lock out writers, for as long as it takes to begin a snapshot.

    A session that waits for a lock keeps writers waiting too, so the wait is short. A transaction
    that wrote to these tables and goes on stands in the way of the first statement alone, and a
    query that runs for long of the second, which also holds up later sessions.
    """
    run(connection, _SHORT_WAIT)
    names = ", ".join(f"{quoted(each.schema, each.name)} READ" for each in tables)
    try:
        run(connection, f"LOCK TABLES {names}")
    except SourceError as error:
        # By its number: the server's own text of an error may have values.
        logger.warning(
            "cannot lock the tables of a snapshot, so all tables are locked error=%s",
            error_number(error),
        )
        run(connection, "FLUSH TABLES WITH READ LOCK")


def _expect_nothing_prepared(catalog: MysqlCatalog) -> None:
    """The rows of an XA transaction stand where it was prepared, and count when it commits."""
    with suppress(SourceRefused):  # MySQL needs a privilege for it
        if prepared := catalog.rows("XA RECOVER"):
            raise SourceUnavailable(
                f"{len(prepared)} XA transactions are prepared: a snapshot waits for their end"
            )


class _RowBatches:
    """Rows of one table, collected into batches."""

    def __init__(self, table: Table, declared: DeclaredTable, end: BinlogEnd, *, rows: int) -> None:
        self._table = table
        self._encoders = [text_encoder(column) for column in declared.columns]
        self._printed = [printed_as(column) for column in declared.columns]
        self._image = _template([column.name for column in declared.columns])
        self._keys = [at for at, column in enumerate(table.columns) if column.key]
        self._key = _template([table.columns[at].name for at in self._keys])
        self._end = end
        self._rows = rows  # in a batch
        self._position = MysqlPosition(end.file, end.position, "", end.position)
        self._packets: list[bytes] = []
        self._bytes = 0
        self._number = 0

    def take(self, packets: list[bytes]) -> Iterator[Sequence[Change]]:
        """Add rows; gives batches that are full."""
        for packet in packets:
            self._packets.append(packet)
            self._bytes += len(packet)
            if len(self._packets) >= self._rows or self._bytes >= _BATCH_BYTES:
                yield self.cut()

    def cut(self) -> Sequence[Change]:
        """The rows so far, as a transaction."""
        packets, size, self._packets, self._bytes = self._packets, self._bytes, [], 0
        if not packets:
            return []
        self._number += 1
        label = TablePath(self._table.schema, self._table.name).label
        name = f"snapshot-{self._end.file}:{self._end.position}-{label}-{self._number}"
        now = time.time_ns() // 1000
        transaction = Transaction(name, now, now)
        if size <= block.LARGEST and (packed := self._block(packets, transaction)):
            return packed
        last = len(packets)
        return [
            self._change(packet, transaction, at, last=at == last)
            for at, packet in enumerate(packets, 1)
        ]

    def _block(self, packets: list[bytes], transaction: Transaction) -> Records | None:
        """Rows as one value of the log; None: they must be stored one by one."""
        width, count, table = len(self._encoders), len(packets), self._table
        fields = _fields(packets, width)
        columns = []
        for at, (printed, encode) in enumerate(zip(self._printed, self._encoders, strict=True)):
            column = _column(fields[at::width], printed, encode)
            if column is None:
                return None
            columns.append(column)
        packed = block.pack(table, transaction, (self._position, self._position), columns, count)
        if len(packed) > block.LARGEST:
            return None
        runs = [(table.version, Op.READ.value, transaction.commit_time, count)]
        return Records([packed], {table.version: table}, runs)

    def _change(
        self, packet: bytes, transaction: Transaction, ordinal: int, *, last: bool
    ) -> Change:
        fields = _fields([packet], len(self._encoders))
        values = [
            b"null" if field is None else encode(field)
            for field, encode in zip(fields, self._encoders, strict=True)
        ]
        key = self._key % tuple([values[at] for at in self._keys]) if self._keys else None
        image = self._image % tuple(values)
        return Change(Op.READ, self._table, key, None, BeforeKind.NONE, image, None, (),
                      transaction, ordinal, self._position, last)  # fmt: skip


def _fields(packets: list[bytes], width: int) -> list[bytes | None]:
    """The values of rows of the text protocol, `width` columns each; None: null."""
    fields: list[bytes | None] = []
    add, columns = fields.append, range(width)
    for packet in packets:
        at = 0
        for _ in columns:
            size = packet[at]
            at += 1
            if size == 0xFB:
                add(None)
                continue
            if size > 0xFB:
                width_of_size = {0xFC: 2, 0xFD: 3, 0xFE: 8}[size]
                size = int.from_bytes(packet[at : at + width_of_size], "little")
                at += width_of_size
            end = at + size
            add(packet[at:end])
            at = end
    return fields


def _column(
    values: list[bytes | None], printed: Printed | None, encode: Encode
) -> block.ColumnText | None:
    """A column of a block; None: its rows must be stored one by one."""
    if printed is not None:
        nulls = values.count(None)
        found = block.column_text([b"\\N" if value is None else value for value in values], printed)
        # The server escapes nothing: a backslash that is not ours, or a zero date, is for JSON.
        zero = found is None or (printed is Printed.TIMESTAMP and ZERO in found.text)
        if found is not None and not zero and found.text.count(b"\\") == nulls:
            return found
    return block.json_text([b"null" if value is None else encode(value) for value in values])


def _template(names: Sequence[str]) -> bytes:
    labels = [_label(name).replace(b"%", b"%%") + b":%b" for name in names]
    return b"{%b}" % b",".join(labels)


def _statement(table: Table, declared: DeclaredTable) -> str:
    columns = ", ".join(select_expression(each, quoted(each.name)) for each in declared.columns)
    return f"SELECT {columns} FROM {quoted(table.schema, table.name)}"
