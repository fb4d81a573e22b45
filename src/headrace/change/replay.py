"""The rows that a log adds up to: changes in, tables out. No I/O.

Where old rows come whole (REPLICA IDENTITY FULL), a key may be checked at the end of a transaction:
until then several rows may have it, and an old row takes away the one that equals it.
"""

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, NamedTuple, Self

import msgspec

from . import cascade
from .columns import carried_columns
from .event import Change, Column, Op, Reference, Table
from .path import table_path

Row = dict[str, Any]
_Applied = tuple[str | None, Row | None, Row | None]
"""What is odd about a change; the row that it took away, and the one that stands for it now."""

_image = msgspec.json.Decoder(dict[str, Any], float_hook=Decimal).decode
_value = msgspec.json.Decoder(float_hook=Decimal).decode
_text = msgspec.json.Encoder(order="deterministic").encode

_MOST_SURPRISES = 100


class TableName(NamedTuple):
    """Which table of which source."""

    source: str
    schema: str
    name: str

    def __str__(self) -> str:
        return table_path(self.schema, self.name)


class Replay:
    """Every table as it stands after the changes applied so far."""

    def __init__(self) -> None:
        self._tables: dict[TableName, _Rows] = {}
        # By the table that is named: who names it, where the database acts by itself.
        self._children: dict[TableName, dict[TableName, list[Reference]]] = {}
        self._surprises: list[str] = []
        self._crowded: set[TableName] = set()  # with keys that several rows have for a while

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
            self._name_parents(name, table)
        elif rows.table.version != table.version:
            rows.follow(table)
            self._name_parents(name, table)
        surprise, old, new = rows.apply(change)
        if old is not None and name in self._children:
            self._cascade(name, old, new)
        if surprise:
            self._note(change.sequence, change.op, name, surprise)
        if rows.crowded:
            self._crowded.add(name)
        if change.last and self._crowded:
            self._settle()

    def _settle(self) -> None:
        """Expect at the end of a transaction that every key has one row."""
        for name in self._crowded:
            for sequence in self._tables[name].settle():
                self._note(sequence, "INSERT or UPDATE", name, "the row is already there")
        self._crowded.clear()

    def _note(self, sequence: int, op: str, name: TableName, surprise: str) -> None:
        if len(self._surprises) < _MOST_SURPRISES:
            self._surprises.append(f"sequence {sequence}: {op} {name}: {surprise}")

    def _name_parents(self, name: TableName, table: Table) -> None:
        """Remember which tables this one names now."""
        for children in self._children.values():
            children.pop(name, None)
        for reference in filter(cascade.acts, table.references):
            parent = TableName(table.source, reference.schema, reference.table)
            self._children.setdefault(parent, {}).setdefault(name, []).append(reference)

    def _cascade(self, parent: TableName, old: Row, new: Row | None) -> None:
        """Do what the database does by itself when a row goes or gets other values."""
        for name, references in list(self._children.get(parent, {}).items()):
            for reference in references:
                values = cascade.named_by(reference, old, new)
                if values is None:
                    continue
                rows = self._tables[name]
                # What follows from one may change or remove others, so they are looked for again.
                while named := rows.naming(reference.columns, values):
                    for row in filter(rows.has, named):
                        becomes = cascade.consequence(reference, row, new)
                        rows.exchange(row, becomes)
                        self._cascade(name, row, becomes)


class _Rows:
    """The rows of one table by their key; without a key, each row is its own."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._rows: dict[bytes, Row] = {}
        # By key: rows that were there when another came, and the sequences of those that came.
        self._others: dict[bytes, list[Row]] = {}
        self._came: dict[bytes, list[int]] = {}

    @property
    def crowded(self) -> bool:
        """Whether several rows have one key."""
        return bool(self._others)

    def settle(self) -> list[int]:
        """Leave the last row to each key; returns the changes that brought one too many."""
        brought = [sequence for key in self._others for sequence in self._came[key]]
        self._others.clear()
        self._came.clear()
        return brought

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def follow(self, table: Table) -> None:
        """Go over to another version of the columns."""
        columns = carried_columns(self.table.columns, table.columns)
        if table.key != self.table.key:
            self.settle()
        self.table = table

        def carried(row: Row) -> Row:
            return {column.name: _carried(row, column, was) for column, was in columns}

        # Before the others are: where the key is the same, they stand at the same places.
        self._others = {key: list(map(carried, rows)) for key, rows in self._others.items()}
        kept, self._rows = self._rows, {}
        for row in kept.values():
            self._add(carried(row))

    def apply(self, change: Change) -> _Applied:
        """Do what the change says."""
        match change.op:
            case Op.INSERT | Op.READ:
                row = _decoded(change.after)
                if change.op is Op.INSERT and self._joins(row, change.sequence):
                    return None, None, None
                added = self._add(row)
                # A table may be copied again while its rows are known.
                known = not added and change.op is not Op.READ
                return "the row is already there" if known else None, None, None
            case Op.UPDATE:
                return self._update(change)
            case Op.DELETE:
                removed = self._remove(_decoded(change.before or change.key))
                return None if removed is not None else "there is no such row", removed, None
            case Op.TRUNCATE:
                self._rows.clear()
                self._others.clear()
                self._came.clear()
        return None, None, None

    def naming(self, columns: tuple[str, ...], values: tuple[Any, ...]) -> list[Row]:
        """The rows that have these values in these columns."""
        return [row for row in self._rows.values() if _values(row, columns) == values]

    def has(self, row: Row) -> bool:
        """Whether a row is there, as it was when it was found."""
        key = self._key(row)
        return self._rows.get(key) is row if self.table.key else _copy(key, 0) in self._rows

    def exchange(self, row: Row, by: Row | None) -> None:
        """Put another row in the place of one, or none."""
        self._remove(row)
        if by is not None:
            self._add(by)

    def _update(self, change: Change) -> _Applied:
        after = _decoded(change.after)
        # Without an old image the key has not changed.
        before = {**after, **_decoded(change.before or change.key)}
        old = self._remove(before)
        known = before if old is None else old
        lost = [name for name in change.unchanged if name not in known]
        new = {**{name: known.get(name) for name in change.unchanged}, **after}
        if not self._joins(new, change.sequence):
            self._add(new)
        if old is None:
            return "there is no such row", None, None
        return f"nothing is known of {', '.join(lost)}" if lost else None, old, new

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

    def _joins(self, row: Row, sequence: int) -> bool:
        """Put a row beside another of its key, if old rows come whole; False: it is not so."""
        if not self.table.key or self.table.identity != "full":
            return False
        key = self._key(row)
        if key not in self._rows:
            return False
        self._others.setdefault(key, []).append(self._rows[key])
        self._came.setdefault(key, []).append(sequence)
        self._rows[key] = row
        return True

    def _one_of(self, key: bytes, old: Row) -> Row:
        """Take one of several rows with a key away: that which equals the old row."""
        rows = [*self._others.pop(key), self._rows[key]]
        equal = [at for at, row in enumerate(rows) if _alike(row, old)]
        found = rows.pop(equal[-1] if equal else 0)
        self._rows[key] = rows.pop()
        if rows:
            self._others[key] = rows
        else:
            del self._came[key]
        return found

    def _remove(self, row: Row) -> Row | None:
        """Take the row of this key (or, without a key, one row like this) away."""
        key = self._key(row)
        if key in self._others:
            return self._one_of(key, row)
        if self.table.key:
            return self._rows.pop(key, None)
        copies = 0
        while _copy(key, copies) in self._rows:
            copies += 1
        return self._rows.pop(_copy(key, copies - 1), None)

    def _key(self, row: Row) -> bytes:
        return _text([row.get(name) for name in self.table.key] or row)


def _carried(row: Row, column: Column, earlier: Column | None) -> Any:
    if earlier is not None:
        return row.get(earlier.name)
    return _value(column.initial_default) if column.initial_default else None


def _values(row: Row, columns: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(row.get(each) for each in columns)


def _drops(change: Change) -> bool:
    return change.op is Op.SCHEMA and bool(_decoded(change.after).get("dropped"))


def _alike(row: Row, old: Row) -> bool:
    """Whether an old row is this one, whose columns may have come or gone since."""
    return all(_text(row[name]) == _text(value) for name, value in old.items() if name in row)


def _copy(key: bytes, number: int) -> bytes:
    return b"%d:%b" % (number, key)


def _decoded(image: bytes | None) -> Row:
    return {} if image is None else _image(image)
