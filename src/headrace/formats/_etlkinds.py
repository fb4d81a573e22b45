"""The eight kinds of ETL events as Python values, and how they are read from JSON."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Self

import msgspec

from ..change.event import format_lsn, parse_lsn

TableRow = dict[str, Any]
"""A row: column names and values, a column that the source did not send left out."""

SLOTS = 4  # places for events at each change: before it, its table, itself, after it


class Lsn(int):
    """A place in PostgreSQL's write-ahead log: a number that prints as 0/16B3748.

    Of other sources it is a number that orders the same way, and no address of anything.
    """

    @classmethod
    def parse(cls, text: str) -> Self:
        """The number behind the text; ValueError when it is none."""
        return cls(parse_lsn(text))

    def __str__(self) -> str:
        return format_lsn(self)

    def __repr__(self) -> str:
        return f"Lsn({format_lsn(self)!r})"


class _Placed(msgspec.Struct, frozen=True, tag_field="type", tag=True):
    """What every event has: where it stands.

    `start_lsn` is where PostgreSQL recorded it; rows of one COPY, say, may share a record. Rows
    that were copied all have the LSN at which the copy shows the database.
    """

    start_lsn: Lsn
    commit_lsn: Lsn
    tx_ordinal: int  # grows from event to event, with gaps, also where commit_lsn is the same

    @property
    def key(self) -> tuple[int, int]:
        """What tells this event from every other; the same when it comes again."""
        return self.commit_lsn, self.tx_ordinal

    @property
    def sequence(self) -> int:
        """The log's number for the change behind the event: a stream can go on after it."""
        return self.tx_ordinal // SLOTS


class OldRow(msgspec.Struct, frozen=True):
    """What the source told of the row before."""

    key_only: bool  # False: `row` is the whole row
    row: TableRow


class TableColumn(msgspec.Struct, frozen=True):
    """A column as the source declares it."""

    name: str
    type: str
    type_id: int  # of pg_type; 0: another source's
    modifier: int  # precision, length …, as PostgreSQL packs them; -1: none
    key: bool


class TableSchema(msgspec.Struct, frozen=True):
    """A table's columns from here on."""

    id: int  # PostgreSQL's or SQLite's number for it, or made of its name; no other table has it
    source: str  # its name in the config
    schema: str
    name: str
    columns: tuple[TableColumn, ...]


class Insert(_Placed, frozen=True):
    """A new row, or one that a copy read."""

    table_id: int
    table_row: TableRow


class Update(_Placed, frozen=True):
    """A row that changed."""

    table_id: int
    table_row: TableRow
    old_table_row: OldRow | None
    unchanged: tuple[str, ...] = ()  # columns that were not sent: they are as they were


class Delete(_Placed, frozen=True):
    """A row that is gone."""

    table_id: int
    old_table_row: OldRow | None


class Relation(_Placed, frozen=True):
    """A table's columns: before its first row in a stream, and wherever they change."""

    table_schema: TableSchema


class Truncate(_Placed, frozen=True):
    """Tables that were emptied; before a full copy they are emptied too."""

    options: int
    rel_ids: tuple[int, ...]

    @property
    def cascade(self) -> bool:
        """Whether the statement said CASCADE."""
        return bool(self.options & CASCADE)

    @property
    def restart_identity(self) -> bool:
        """Whether the statement said RESTART IDENTITY."""
        return bool(self.options & RESTART_IDENTITY)


class Begin(_Placed, frozen=True):
    """A transaction's changes follow."""

    timestamp: int  # of the commit: PostgreSQL does not tell the start; microseconds since 1970
    xid: int  # 0: it has none, as a copy, or as MySQL, which names transactions


class Commit(_Placed, frozen=True):
    """All changes of a transaction have come."""

    flags: int  # always 0, as PostgreSQL has none yet
    end_lsn: int  # where the commit ends in the write-ahead log; 0: not known
    timestamp: int  # microseconds since 1970


class Unsupported(_Placed, frozen=True):
    """What the other kinds have no word for: a message, a dropped table, an unreadable row."""


Event = Insert | Update | Delete | Relation | Truncate | Begin | Commit | Unsupported

# Bits of Truncate.options, as PostgreSQL numbers them.
CASCADE = 1
RESTART_IDENTITY = 2


def decode(event: bytes) -> Event:
    """An event from its JSON."""
    return _decoder.decode(event)


def _lsn(kind: type, value: Any) -> Any:
    return kind.parse(value) if kind is Lsn else value


def _number(text: str) -> float | Decimal:
    """A float, but for digits in a document that no float has."""
    number = float(text)
    exact = Decimal(text)
    return number if Decimal(repr(number)) == exact else exact


_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(
    Event, dec_hook=_lsn, float_hook=_number
)
