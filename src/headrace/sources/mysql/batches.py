"""Rows of a snapshot as the server sends them -> changes, some thousands at a time. No I/O."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import msgspec

from ...change import block
from ...change.event import BeforeKind, Change, Op, Table, Transaction
from ...change.printed import Encode, Printed
from ...change.record import Records, rows_in_block
from .catalog import BinlogEnd
from .decode.times import ZERO
from .decode.values import printed_as, text_encoder
from .position import MysqlPosition
from .resume import DeclaredTable

BATCH_ROWS = 8192
_BATCH_BYTES = 3 << 18  # what comes with the last row still fits into a block, if it is not large
_label = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows that are a transaction of their own, and the key of the last one as it was sent."""

    changes: Sequence[Change]
    last_key: tuple[bytes, ...]


class SnapshotRows:
    """How the rows of one table become changes; may be used from any thread."""

    def __init__(self, table: Table, declared: DeclaredTable, end: BinlogEnd, *, name: str) -> None:
        """`name`: what the names of their transactions begin with."""
        self._table = table
        self._encoders = [text_encoder(column) for column in declared.columns]
        self._printed = [printed_as(column) for column in declared.columns]
        names = [column.name for column in declared.columns]
        self._image = _template(names)
        self._keys = [at for at, column in enumerate(table.columns) if column.key]
        self._key = _template([table.columns[at].name for at in self._keys])
        self._in_key_order = [names.index(name) for name in declared.key if name in names]
        self._position = MysqlPosition(end.file, end.position, "", end.position)
        self._name = name
        self._numbers = count(1)

    def batch(self, packets: list[bytes], size: int) -> RowBatch:
        """Rows of `size` bytes."""
        if not packets:
            return RowBatch([], ())
        now = time.time_ns() // 1000
        transaction = Transaction(f"{self._name}-{next(self._numbers)}", now, now)
        changes: Sequence[Change] | None = None
        if size <= block.LARGEST:
            changes = self._block(packets, transaction)
        if changes is None:
            last = len(packets)
            changes = [
                self._change(packet, transaction, at, last=at == last)
                for at, packet in enumerate(packets, 1)
            ]
        fields = _fields(packets[-1:], len(self._encoders))
        return RowBatch(changes, tuple(fields[at] or b"" for at in self._in_key_order))

    def _block(self, packets: list[bytes], transaction: Transaction) -> Records | None:
        """Rows as one value of the log; None: they must be stored one by one."""
        width = len(self._encoders)
        fields = _fields(packets, width)
        columns = []
        for at, (printed, encode) in enumerate(zip(self._printed, self._encoders, strict=True)):
            column = _column(fields[at::width], printed, encode)
            if column is None:
                return None
            columns.append(column)
        positions = self._position, self._position
        return rows_in_block(self._table, transaction, positions, columns, len(packets))

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


class RowBatches:
    """Rows of one statement, collected into batches."""

    def __init__(self, rows: SnapshotRows, *, most: int) -> None:
        self._rows = rows
        self._most = most  # rows in a batch
        self._packets: list[bytes] = []
        self._bytes = 0

    def take(self, packets: list[bytes]) -> Iterator[RowBatch]:
        """Add rows; gives batches that are full."""
        for packet in packets:
            self._packets.append(packet)
            self._bytes += len(packet)
            if len(self._packets) >= self._most or self._bytes >= _BATCH_BYTES:
                yield self.cut()

    def cut(self) -> RowBatch:
        """The rows so far."""
        packets, size, self._packets, self._bytes = self._packets, self._bytes, [], 0
        return self._rows.batch(packets, size)


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
