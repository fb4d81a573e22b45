"""Ranges of a primary key: their conditions in SQL, and which keys of the stream they hold. No I/O.

The server finds where a range ends and compares rows with its bounds, so any collation will do. A
key of the stream is compared here, which is exact for numbers, moments and bytes alone.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec

from ...change.event import BeforeKind, Op, Table
from .address import quoted
from .decode.columns import DeclaredColumn, declared_type
from .decode.rows import Row
from .resume import DeclaredTable, KeyBound, PrimaryKeyRange

_INTEGERS = ("tinyint", "smallint", "mediumint", "int", "bigint")

_raws = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_values = msgspec.json.Decoder(dict[str, Any]).decode


class RowNotRead(Exception):
    """A row leaves keys that are not read yet, and the event has only a part of its columns."""


@dataclass(frozen=True, slots=True)
class _KeyColumn:
    """A column of a key; a bound has its text, or the hexadecimal digits of its bytes."""

    name: str
    literal: str  # how a statement has a bound's text
    is_bytes: bool = False
    of_bound: Callable[[str], Any] | None = None  # what orders a bound; None: only the server knows
    of_image: Callable[[Any], Any] | None = None  # the same of a value in an image

    @property
    def selected(self) -> str:
        """The expression that selects a bound."""
        return f"HEX({self.name})" if self.is_bytes else f"CAST({self.name} AS CHAR)"


class KeyOrder:
    """The order of a table's rows by their primary key."""

    def __init__(self, names: Sequence[str], columns: Sequence[_KeyColumn]) -> None:
        self.names = names
        self._columns = columns
        self.by = ", ".join(column.name for column in columns)
        self.bound = ", ".join(column.selected for column in columns)
        # Whether keys of the stream can be compared with bounds.
        self.certain = all(column.of_bound is not None for column in columns)

    @classmethod
    def of(cls, declared: DeclaredTable) -> KeyOrder | None:
        """None: the rows have no order by which they could be cut."""
        known = {column.name: column for column in declared.columns}
        columns = [_key_column(known[name]) for name in declared.key if name in known]
        found = [column for column in columns if column is not None]
        if not found or len(found) < len(declared.key) or not declared.transactional:
            return None
        return cls(declared.key, found)

    def inside(self, part: PrimaryKeyRange) -> str:
        """The condition that a row is in a range; "": every row is."""
        conditions = []
        if part.after is not None:
            conditions.append(_beyond(list(zip(self._columns, part.after, strict=True)), ">", ">"))
        if part.upto is not None:
            conditions.append(_beyond(list(zip(self._columns, part.upto, strict=True)), "<", "<="))
        return " AND ".join(conditions)

    def bound_of(self, values: Sequence[bytes]) -> KeyBound:
        """The bound at a row, by the key's values as the server sends them."""
        pairs = zip(self._columns, values, strict=True)
        return tuple(value.hex() if column.is_bytes else value.decode() for column, value in pairs)

    def rank_of_bound(self, bound: KeyBound) -> tuple[Any, ...]:
        """What orders a bound among keys."""
        pairs = zip(self._columns, bound, strict=True)
        return tuple(column.of_bound(text) for column, text in pairs if column.of_bound)

    def rank_of_image(self, image: bytes) -> tuple[Any, ...]:
        """What orders the row of an image; KeyError: it has not the whole key."""
        values, pairs = _values(image), zip(self._columns, self.names, strict=True)
        return tuple(column.of_image(values[name]) for column, name in pairs if column.of_image)


def _key_column(column: DeclaredColumn) -> _KeyColumn | None:
    """None: its values have another order than their literals (ENUM), or no exact literals."""
    kind, name = declared_type(column.type), quoted(column.name)
    match kind.base:
        case base if base in _INTEGERS:
            return _KeyColumn(name, "{}", False, int, int)
        case "decimal":
            return _KeyColumn(name, "{}", False, Decimal, Decimal)
        case "date" | "datetime":
            return _KeyColumn(name, "'{}'", False, str, str)
        case "timestamp":
            return _KeyColumn(name, "'{}'", False, str, _moment)
        case "binary" | "varbinary":
            return _KeyColumn(name, "x'{}'", True, bytes.fromhex, base64.b64decode)
        case "char" | "varchar":
            return _KeyColumn(name, f"_{column.charset} x'{{}}'", True)
    return None


def _moment(value: str) -> str:
    return value.replace("T", " ").removesuffix("Z")


def _beyond(pairs: list[tuple[_KeyColumn, str]], sign: str, last: str) -> str:
    """A comparison of rows, written so that the server uses the index for it."""
    (column, text), *rest = pairs
    value = column.literal.format(text)
    if not rest:
        return f"{column.name} {last} {value}"
    equal = f"{column.name} = {value} AND {_beyond(rest, sign, last)}"
    return f"({column.name} {sign} {value} OR ({equal}))"


class UnreadKeys:
    """Keys of a table whose rows a snapshot has not read: it will show what happens to them."""

    def __init__(self, table: Table, order: KeyOrder, left: Sequence[PrimaryKeyRange]) -> None:
        self._names = [column.name for column in table.columns if column.key]
        self._order = order
        self._ranges = [
            (
                None if part.after is None else order.rank_of_bound(part.after),
                None if part.upto is None else order.rank_of_bound(part.upto),
            )
            for part in left
        ]

    def counted(self, op: Op, row: Row) -> tuple[Op, Row] | None:
        """What a change is to those who know the rows that were read; None: nothing."""
        key, before, kind, after, _, unchanged = row
        try:
            if op is not Op.UPDATE:
                return None if self._has(key) else (op, row)
            was, now = self._has(before), self._has(key)
        except KeyError as error:
            raise RowNotRead from error
        if was and now:
            return None
        if now:
            return Op.DELETE, (self._key(before), before, kind, None, None, ())
        if was and unchanged:
            raise RowNotRead
        return (Op.INSERT, (key, None, BeforeKind.NONE, after, None, ())) if was else (op, row)

    def _has(self, image: bytes | None) -> bool:
        rank = self._order.rank_of_image(image or b"{}")
        return any(
            (after is None or rank > after) and (upto is None or rank <= upto)
            for after, upto in self._ranges
        )

    def _key(self, image: bytes | None) -> bytes:
        values = _raws(image or b"{}")
        return msgspec.json.encode({name: values[name] for name in self._names})
