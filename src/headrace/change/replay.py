"""The rows that a log adds up to: changes in, tables out. No I/O.

What changes without a change event cannot be replayed: a column added with a default is null
here in the rows that were there before, and a renamed column is a new one.
"""

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, NamedTuple, Self

import msgspec

from .event import Change, Op, Table

Row = dict[str, Any]

_image = msgspec.json.Decoder(dict[str, Any], float_hook=Decimal).decode
_text = msgspec.json.Encoder(order="deterministic").encode

_MOST_SURPRISES = 100


class TableName(NamedTuple):
    """Which table of which source."""

    source: str
    schema: str
    name: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


class Replay:
    """Every table as it stands after the changes applied so far."""

    def __init__(self) -> None:
        self._tables: dict[TableName, _Rows] = {}
        self._surprises: list[str] = []

    @classmethod
    def of(cls, changes: Iterable[Change]) -> Self:
        """The state after these changes."""
        replay = cls()
        for change in changes:
            replay.apply(change)
        return replay

    @property
    def tables(self) -> list[TableName]:
        """Every table that a change was about."""
        return sorted(self._tables)

    @property
    def surprises(self) -> list[str]:
        """What cannot follow from the changes before it, such as the deletion of no row.

        A log that misses or repeats a change shows here, even where later changes hide it.
        """
        return self._surprises

    def rows(self, table: TableName) -> list[Row]:
        """The rows of a table; none when it never had a change."""
        found = self._tables.get(table)
        return found.rows if found else []

    def apply(self, change: Change) -> None:
        """Take the next change, in the order of the log."""
        table = change.table
        if not table.name or change.op is Op.MESSAGE:
            return
        name = TableName(table.source, table.schema, table.name)
        rows = self._tables.get(name)
        if rows is None or _drops(change):
            rows = self._tables[name] = _Rows(table)
        elif rows.table.version != table.version:
            rows.follow(table)
        surprise = rows.apply(change)
        if surprise and len(self._surprises) < _MOST_SURPRISES:
            self._surprises.append(f"sequence {change.sequence}: {change.op} {name}: {surprise}")


class _Rows:
    """The rows of one table by their key; without a key, each row is its own."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._rows: dict[bytes, Row] = {}

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def follow(self, table: Table) -> None:
        """Go over to another version of the columns."""
        self.table = table
        names = [column.name for column in table.columns]
        kept, self._rows = self._rows, {}
        for row in kept.values():
            self._add({name: row.get(name) for name in names})

    def apply(self, change: Change) -> str | None:
        """Do what the change says; returns what is odd about it."""
        match change.op:
            case Op.INSERT | Op.READ:
                added = self._add(_decoded(change.after))
                # A table may be copied again while its rows are known.
                return None if added or change.op is Op.READ else "the row is already there"
            case Op.UPDATE:
                return self._update(change)
            case Op.DELETE:
                removed = self._remove(_decoded(change.before or change.key))
                return None if removed is not None else "there is no such row"
            case Op.TRUNCATE:
                self._rows.clear()
        return None

    def _update(self, change: Change) -> str | None:
        after = _decoded(change.after)
        # Without an old image the key has not changed.
        before = {**after, **_decoded(change.before or change.key)}
        old = self._remove(before)
        known = before if old is None else old
        lost = [name for name in change.unchanged if name not in known]
        self._add({**{name: known.get(name) for name in change.unchanged}, **after})
        if old is None:
            return "there is no such row"
        return f"nothing is known of {', '.join(lost)}" if lost else None

    def _add(self, row: Row) -> bool:
        """Put a row in its place; False when another was there."""
        key = self._key(row)
        if not self.table.key:
            key = next(
                k for n in range(len(self._rows) + 1) if (k := _copy(key, n)) not in self._rows
            )
        added = key not in self._rows
        self._rows[key] = row
        return added

    def _remove(self, row: Row) -> Row | None:
        """Take the row of this key (or, without a key, one row like this) away."""
        key = self._key(row)
        if self.table.key:
            return self._rows.pop(key, None)
        copies = 0
        while _copy(key, copies) in self._rows:
            copies += 1
        return self._rows.pop(_copy(key, copies - 1), None)

    def _key(self, row: Row) -> bytes:
        return _text([row.get(name) for name in self.table.key] or row)


def _drops(change: Change) -> bool:
    return change.op is Op.SCHEMA and bool(_decoded(change.after).get("dropped"))


def _copy(key: bytes, number: int) -> bytes:
    return b"%d:%b" % (number, key)


def _decoded(image: bytes | None) -> Row:
    return {} if image is None else _image(image)
