"""Rows of a snapshot in columns: one value of the log that stands for many changes. No I/O.

    0xC1 | number of rows | bytes of the head | head (MessagePack) | column | column …

0xC1 begins no MessagePack value, so a block is never taken for a record. A block is a whole
transaction: its rows have the ordinals 1, 2, … and what else they share stands in the head, once.

A column is its values as the database printed them, with a tab between two; `Printed` says how
they become JSON. \\N is null, and there are no escapes: a column with a value that would need one
is kept as JSON, in which tabs and newlines are always escaped. This costs little to make (COPY
sends text) and little to read: as Arrow without a step for each value, as records by filling the
same template that every other image is made with.
"""

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import msgspec

from .event import BeforeKind, Op, Position, Table, Transaction
from .printed import ENCODERS, Printed

MARK = 0xC1
LARGEST = 1 << 20  # bytes; what does not fit is stored row by row

_START = struct.Struct(">BII")
_BEGIN = struct.Struct(">I")
_NULL = b"\\N"
_READ, _NONE = Op.READ.value, BeforeKind.NONE.value
_SHARED = 100  # bytes, about: what else a record has
_PUNCTUATION = 4  # bytes around a name
_RECORD = b"\x9f"  # an array of 15 elements: the fields of a record

_pack = msgspec.msgpack.Encoder().encode
_quote = msgspec.json.Encoder().encode
# What may stand in a JSON string only escaped, but for the tab between two values.
_SPECIAL = b'"' + bytes(set(range(32)) - {9})


class ColumnText(NamedTuple):
    """The values of one column, in a block's form."""

    printed: Printed
    text: bytes


class BlockColumn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A column, as the head of a block describes it."""

    name: str
    key: bool
    printed: Printed
    size: int  # bytes


class BlockHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the rows of a block share."""

    table: int  # its version
    transaction: str
    commit_time: int
    captured_at: int
    metadata: bytes | None
    position: msgspec.Raw  # of each row but the last
    last_position: msgspec.Raw
    columns: tuple[BlockColumn, ...]


_head = msgspec.msgpack.Decoder(BlockHead).decode


def column_text(values: list[bytes], printed: Printed) -> ColumnText | None:
    r"""Printed values in a block's form, \N for null; None: they must be written as JSON."""
    text = b"\t".join(values)
    if text.count(b"\t") != len(values) - 1:
        return None
    if b"\\" in text and text.count(b"\\") != values.count(_NULL):
        return None
    return ColumnText(printed, text) if _reads(printed, text) else None


def json_text(values: Sequence[bytes]) -> ColumnText | None:
    """Values that are JSON in a block's form; None: one has a tab, which JSON does not need."""
    text = b"\t".join(values)
    return ColumnText(Printed.JSON, text) if text.count(b"\t") == len(values) - 1 else None


def _reads(printed: Printed, text: bytes) -> bool:
    """Whether every value can be written as JSON, which nobody tests again."""
    if printed is Printed.BOOLEAN and text.translate(None, b"tf\t\\N"):
        return False
    if printed in (Printed.BOOLEAN, Printed.FLOAT):
        return b"\t\t" not in b"\t" + text + b"\t"  # no value is empty
    if printed in (Printed.TEXT, Printed.PLAIN) and not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError:
            return False
    return True


def pack(
    table: Table,
    transaction: Transaction,
    positions: tuple[Position, Position],
    columns: Sequence[ColumnText],
    count: int,
) -> bytes:
    """A block of `count` rows; `positions`: of the last row, and before it of all others."""
    position, last = (msgspec.Raw(_pack(each)) for each in positions)
    described = tuple(
        BlockColumn(column.name, column.key, printed, len(text))
        for column, (printed, text) in zip(table.columns, columns, strict=True)
    )
    head = _pack(
        BlockHead(
            table.version,
            transaction.id,
            transaction.commit_time,
            transaction.captured_at,
            transaction.metadata,
            position,
            last,
            described,
        )
    )
    start = _START.pack(MARK, count, len(head))
    return b"".join([start, head, *(text for _, text in columns)])


def row_count(value: bytes) -> int:
    """How many changes a value of the log stands for: 1, or the rows of a block."""
    return int(_START.unpack_from(value)[1]) if value[0] == MARK else 1


class RowBlock:
    """The rows of a block; may be used from any thread."""

    def __init__(self, value: bytes) -> None:
        self.count = row_count(value)
        size = int(_START.unpack_from(value)[2])
        start = _START.size + size
        self.head = _head(value[_START.size : start])
        self.value = value
        self._starts: dict[str, tuple[BlockColumn, int]] = {}
        for column in self.head.columns:
            self._starts[column.name] = column, start
            start += column.size
        self._filled: dict[str, tuple[bytes, list[bytes]]] = {}

    @property
    def transaction(self) -> Transaction:
        """What all rows belong to."""
        head = self.head
        return Transaction(head.transaction, head.commit_time, head.captured_at, head.metadata)

    @property
    def record_size(self) -> int:
        """About how many bytes the record of a row has: its values, and the name of each."""
        names = sum(len(name) + _PUNCTUATION for name in self._starts)
        return _SHARED + names + len(self.value) // self.count

    def column(self, name: str) -> ColumnText | None:
        """The values of a column as they were printed; None: there is no such column."""
        if name not in self._starts:
            return None
        column, start = self._starts[name]
        return ColumnText(column.printed, self.value[start : start + column.size])

    def packed_with(self, columns: Sequence[tuple[BlockColumn, ColumnText]]) -> bytes:
        """The same rows with other columns."""
        described = tuple(
            msgspec.structs.replace(column, printed=printed, size=len(text))
            for column, (printed, text) in columns
        )
        head = _pack(msgspec.structs.replace(self.head, columns=described))
        start = _START.pack(MARK, self.count, len(head))
        return b"".join([start, head, *(text for _, (_, text) in columns)])

    def packed_at(self, positions: tuple[Position, Position]) -> bytes:
        """The same rows in another place; `positions` as in `pack`."""
        position, last = (msgspec.Raw(_pack(each)) for each in positions)
        head = _pack(msgspec.structs.replace(self.head, position=position, last_position=last))
        _, count, size = _START.unpack_from(self.value)
        texts = memoryview(self.value)[_START.size + size :]
        return b"".join([_START.pack(MARK, count, len(head)), head, texts])

    def images(self, names: Sequence[str], begin: int, end: int) -> list[bytes]:
        """Some columns of the rows from `begin` to before `end` (from 0) as JSON objects."""
        known = [name for name in names if name in self._starts]
        if not known:
            return [b"{}"] * (end - begin)
        filled = [self._column(name) for name in known]
        labels = (_quote(name).replace(b"%", b"%%") for name in known)
        slots = (label + b":" + slot for label, (slot, _) in zip(labels, filled, strict=True))
        template = b"{%b}" % b",".join(slots)
        columns = [values[begin:end] for _, values in filled]
        return [template % row for row in zip(*columns, strict=True)]

    def records(self, begin: int, end: int) -> list[bytes]:
        """The rows from `begin` to before `end` (from 0) as records."""
        head, write = self.head, _pack
        images = self.images(list(self._starts), begin, end)
        keys: Sequence[bytes | None] = [None] * len(images)
        if named := [column.name for column in head.columns if column.key]:
            keys = self.images(named, begin, end)
        shared = (head.table, _READ, head.transaction)
        shared_bytes = write((*shared, head.commit_time, head.captured_at, head.metadata))
        start = _RECORD + shared_bytes[1:]
        at, last = head.position, self.count
        records = [
            start + write((ordinal, False, at, key, _NONE, None, image, None, ()))[1:]
            for ordinal, key, image in zip(range(begin + 1, end + 1), keys, images, strict=True)
        ]
        if end == last and records:
            fields = (last, True, head.last_position, keys[-1], _NONE, None, images[-1], None, ())
            records[-1] = start + write(fields)[1:]
        return records

    def without_values(self, rows: Collection[int], stays: Collection[str] = ()) -> bytes:
        """The block with null in every column of these rows (from 0) that is not of the key.

        What `stays` names is left as it is.
        """
        columns, texts = list[BlockColumn](), list[bytes]()
        for column in self.head.columns:
            start = self._starts[column.name][1]
            text = self.value[start : start + column.size]
            if not column.key and column.name not in stays:
                null = b"null" if column.printed is Printed.JSON else _NULL
                values = text.split(b"\t")
                text = b"\t".join(null if at in rows else v for at, v in enumerate(values))
            columns.append(BlockColumn(column.name, column.key, column.printed, len(text)))
            texts.append(text)
        head = _pack(msgspec.structs.replace(self.head, columns=tuple(columns)))
        return b"".join([_START.pack(MARK, self.count, len(head)), head, *texts])

    def _column(self, name: str) -> tuple[bytes, list[bytes]]:
        """How a template holds a column's values, and what it is filled with; worked out once."""
        found = self._filled.get(name)
        if found is None:
            column, start = self._starts[name]
            text = self.value[start : start + column.size]
            found = self._filled[name] = _fill(column.printed, text)
        return found


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Neighbouring rows of a block as they stand in a log; a trim or a range may hide others."""

    block: RowBlock
    first: int  # sequence of the first
    begin: int  # its number in the block, from 0
    count: int

    @property
    def last(self) -> int:
        """The sequence of the last one."""
        return self.first + self.count - 1

    def records(self) -> list[bytes]:
        """A record for each."""
        return self.block.records(self.begin, self.begin + self.count)

    def packed(self) -> bytes:
        """The whole block, and which of its rows is the first: what `unpacked` reads."""
        return self.block.value + _BEGIN.pack(self.begin)

    @classmethod
    def unpacked(cls, first: int, count: int, packed: bytes) -> Self:
        """The rows behind their bytes."""
        (begin,) = _BEGIN.unpack(packed[-_BEGIN.size :])
        return cls(RowBlock(packed[: -_BEGIN.size]), first, begin, count)


def _fill(printed: Printed, text: bytes) -> tuple[bytes, list[bytes]]:
    values = text.split(b"\t")
    if printed is Printed.JSON:
        return b"%b", values
    encode = ENCODERS[printed]
    if b"\\" in text:
        return b"%b", [b"null" if value == _NULL else encode(value) for value in values]
    if printed is Printed.PLAIN:
        return b"%b", values
    if printed is Printed.QUOTED or (printed is Printed.TEXT and _is_plain(text)):
        return b'"%b"', values
    return b"%b", list(map(encode, values))


def _is_plain(text: bytes) -> bool:
    return len(text.translate(None, _SPECIAL)) == len(text)
