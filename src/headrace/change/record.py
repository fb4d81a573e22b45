"""A change as the log stores it: encoded once, at capture, and carried as bytes from there on.

A value of the log is the record of one change, or a block (`block`) that stands for many.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GenericAlias
from typing import Any, Generic, TypeVar, overload

import msgspec

from ..observe.traces import TracedTransaction
from .block import LARGEST, MARK, ColumnText, RowBlock, pack, row_count
from .connector import PositionsDecoder
from .event import BeforeKind, Change, Op, Position, Table, Transaction

_P = TypeVar("_P")

_LARGE = 1 << 20  # bytes
_READ = msgspec.Raw(msgspec.msgpack.encode(Op.READ))


class Record(msgspec.Struct, Generic[_P], frozen=True, array_like=True, gc=False):
    """The fields of a change as they are stored; the table by its version."""

    table: int
    op: Op
    transaction: str
    commit_time: int
    captured_at: int
    metadata: bytes | None
    ordinal: int
    last: bool
    position: _P
    key: bytes | None
    before_kind: BeforeKind
    before: bytes | None
    after: bytes | None
    changed: tuple[str, ...] | None
    unchanged: tuple[str, ...]


def _position_of(field: str) -> int:
    return Record.__struct_fields__.index(field)


# Where `rows` has the fields that are asked for most.
TABLE, OP, COMMIT_TIME, ORDINAL = map(_position_of, ("table", "op", "commit_time", "ordinal"))
KEY, BEFORE_KIND, BEFORE, AFTER, CHANGED, UNCHANGED = map(
    _position_of, ("key", "before_kind", "before", "after", "changed", "unchanged")
)


class RecordHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The first fields of a record, which say where it stands in its transaction."""

    table: int
    op: msgspec.Raw
    transaction: str
    commit_time: int
    captured_at: int
    metadata: msgspec.Raw
    ordinal: int
    last: bool


def _record_of(union: Any) -> Any:
    """The type of a record whose position is one of these."""
    generic: Any = Record
    return generic[union]


_encode = msgspec.msgpack.Encoder().encode
_record = PositionsDecoder[Record[Position]](_record_of, lambda record: (record.position[0],))
_position = PositionsDecoder[Position](lambda union: union, lambda position: position[:1])
_several = PositionsDecoder[list[Record[Position]]](
    lambda union: GenericAlias(list, (_record_of(union),)),
    lambda records: (record.position[0] for record in records),
)
_rows = msgspec.msgpack.Decoder(
    list[
        tuple[
            int,
            str,
            str,
            int,
            int,
            bytes | None,
            int,
            bool,
            msgspec.Raw,
            bytes | None,
            str,
            bytes | None,
            bytes | None,
            tuple[str, ...] | None,
            tuple[str, ...],
        ]
    ]
).decode


class TableOp(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The table of a record, by its version, and what was done to it."""

    table: int
    op: str


_heads = msgspec.msgpack.Decoder(list[TableOp]).decode

head: Callable[[bytes], RecordHead] = msgspec.msgpack.Decoder(RecordHead).decode
"""Where a record stands in its transaction."""


ChangeRun = tuple[int, str, int, int]
"""Neighbouring changes of a transaction: their table's version, operation, commit time, number."""


def encode(changes: Sequence[Change]) -> list[bytes]:
    """The records of changes."""
    return encode_runs(changes)[0]


def encode_runs(changes: Sequence[Change]) -> tuple[list[bytes], Sequence[ChangeRun]]:
    """The records of changes, and the runs that they make, which cost nothing to find here.

    Fields stand in `Record`'s order, the table by its version. Most neighbours share table,
    operation and transaction, so those are written once and reused. Enums are written by their
    values: handing them over as they are takes twice as long.
    """
    if isinstance(changes, Records):
        return changes.encoded, changes.runs
    records: list[bytes] = []
    begun: list[ChangeRun] = []  # runs by where they begin
    add, write = records.append, _encode
    table = op = transaction = None
    start = b""
    for change in changes:
        if (
            change.transaction is not transaction
            or change.op is not op
            or change.table is not table
        ):
            table, op, transaction = change.table, change.op, change.transaction
            start = _start(table, op, transaction)
            begun.append((table.version, op._value_, transaction.commit_time, len(records)))
        fields = (
            change.ordinal,
            change.last,
            change.position,
            change.key,
            change.before_kind._value_,
            change.before,
            change.after,
            change.changed,
            change.unchanged,
        )
        tail = write(fields)
        if len(tail) < _LARGE:
            add(start + tail[1:])
        else:
            # What may have many megabytes is not held three times.
            del tail
            add(write((*_shared(table, op, transaction), *fields)))
    return records, _runs(begun, len(records))


def _runs(begun: Sequence[ChangeRun], end: int) -> list[ChangeRun]:
    ends = (*(at for _, _, _, at in begun[1:]), end)
    return [
        (version, op, commit_time, ended - at)
        for (version, op, commit_time, at), ended in zip(begun, ends, strict=False)
    ]


def _shared(table: Table, op: Op, transaction: Transaction) -> tuple[Any, ...]:
    """The first fields of a record, which neighbours share."""
    return (
        table.version,
        op._value_,
        transaction.id,
        transaction.commit_time,
        transaction.captured_at,
        transaction.metadata,
    )


def _start(table: Table, op: Op, transaction: Transaction) -> bytes:
    shared = _encode(_shared(table, op, transaction))
    # An array of up to 15 elements says its length in its first byte.
    return bytes([0x90 | len(Record.__struct_fields__)]) + shared[1:]


def decode(sequence: int, record: bytes, tables: Mapping[int, Table]) -> Change:
    """The change behind a record."""
    try:  # as often as there are changes: without another call
        found = _record.decode(record)
    except msgspec.ValidationError:
        found = _record.learn(record)
    return change(sequence, found, tables[found.table])


def change(sequence: int, r: Record[Position], table: Table) -> Change:
    """The change behind the fields of a record."""
    return Change(
        r.op,
        table,
        r.key,
        r.before,
        r.before_kind,
        r.after,
        r.changed,
        r.unchanged,
        Transaction(r.transaction, r.commit_time, r.captured_at, r.metadata),
        r.ordinal,
        r.position,
        r.last,
        sequence,
    )


def several(records: bytes, count: int) -> list[Record[Position]]:
    """`count` records that lie one after the other."""
    return _several(_array(count) + records)


def rows(records: bytes, count: int) -> list[tuple[Any, ...]]:
    """The fields of `count` records that lie one after the other, in `Record`'s order.

    Read as one array, which is faster than a call for each; the position stays undecoded.
    """
    return _rows(_array(count) + records)


def heads(records: bytes, count: int) -> list[TableOp]:
    """The tables of `count` records that lie one after the other; costs a tenth of `rows`."""
    return _heads(_array(count) + records)


def _array(count: int) -> bytes:
    """How MessagePack begins an array of so many."""
    return b"\xdd" + count.to_bytes(4, "big")


def transactions(values: Iterable[bytes]) -> Iterator[TracedTransaction]:
    """The transactions that end with one of these values."""
    for each in map(last_head, values):
        if each.last:
            yield TracedTransaction(each.transaction, each.commit_time, each.captured_at)


def captured_at(value: bytes) -> int:
    """When the last change of a value was captured; ConfigError: its source is not known here."""
    if value[0] != MARK:
        return _record(value).captured_at
    shared = RowBlock(value).head
    _position(shared.last_position)
    return shared.captured_at


def last_head(value: bytes) -> RecordHead:
    """Where the last change of a value stands in its transaction."""
    if value[0] != MARK:
        return head(value)
    block = RowBlock(value)
    return head_in(block, block.count - 1)


def head_in(block: RowBlock, row: int) -> RecordHead:
    """Where a row of a block, counted from 0, stands in its transaction."""
    shared = block.head
    return RecordHead(
        shared.table,
        _READ,
        shared.transaction,
        shared.commit_time,
        shared.captured_at,
        msgspec.Raw(_encode(shared.metadata)),
        row + 1,
        row + 1 == block.count,
    )


def single(values: Iterable[bytes]) -> Iterator[bytes]:
    """A record for each change that these values stand for."""
    for value in values:
        if value[0] == MARK:
            block = RowBlock(value)
            yield from block.records(0, block.count)
        else:
            yield value


class Records(Sequence[Change]):
    """Changes that are encoded already, and decoded only when somebody looks at them."""

    def __init__(
        self, encoded: list[bytes], tables: Mapping[int, Table], runs: Sequence[ChangeRun] = ()
    ) -> None:
        """`encoded` may have blocks; `runs` may be left out where nobody counts."""
        self.encoded = encoded
        self.runs = runs
        self._tables = tables

    def at(self, positions: tuple[Position, Position]) -> "Records":
        """The same blocks in another place: of the last row of each, and of all before it."""
        moved = [RowBlock(block).packed_at(positions) for block in self.encoded]
        return Records(moved, self._tables, self.runs)

    def __len__(self) -> int:
        return sum(map(row_count, self.encoded))

    def __iter__(self) -> Iterator[Change]:
        return (decode(0, record, self._tables) for record in single(self.encoded))

    @overload
    def __getitem__(self, at: int) -> Change: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Change]: ...
    def __getitem__(self, at: int | slice) -> Change | Sequence[Change]:
        if isinstance(at, slice):
            return Records(list(single(self.encoded))[at], self._tables)
        return decode(0, list(single(self.encoded))[at], self._tables)


def rows_in_block(
    table: Table,
    transaction: Transaction,
    positions: tuple[Position, Position],
    columns: Sequence[ColumnText],
    count: int,
) -> Records | None:
    """Rows of a snapshot as one value of the log; None: they must be stored one by one."""
    packed = pack(table, transaction, positions, columns, count)
    if len(packed) > LARGEST:
        return None
    runs = [(table.version, Op.READ.value, transaction.commit_time, count)]
    return Records([packed], {table.version: table}, runs)
