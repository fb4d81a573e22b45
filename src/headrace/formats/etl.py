"""The ETL event: eight kinds, each with its LSNs, for destinations that are written in code.

    class Rows:
        def write_events(self, events: list[Event]) -> None:
            for event in events:
                match event:
                    case Insert(table_id=table, table_row=row): ...

`Etl` writes the events as JSON; `events` gives them to Python. `headrace.destination` reads them
from a server or a log and hands them over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from hashlib import blake2b
from typing import Any, ClassVar, Protocol, Self

import msgspec

from ..change.cascade import acts
from ..change.event import (
    BeforeKind,
    Change,
    Op,
    Reference,
    Table,
)
from ..change.lsn import format_lsn, parse_lsn
from ..errors import ConfigError
from ._line import one_line
from ._tables import PerTable

# --- the eight kinds -----------------------------------------------------------------------------

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
        """Identifies the event; the same when it comes again."""
        return self.commit_lsn, self.tx_ordinal

    @property
    def sequence(self) -> int:
        """The log's number for the change behind the event: a stream can go on after it."""
        return self.tx_ordinal // SLOTS


class OldRow(msgspec.Struct, frozen=True):
    """What the source sent of the row before."""

    key_only: bool  # False: `row` is the whole row
    row: TableRow


class TableColumn(msgspec.Struct, frozen=True, omit_defaults=True):
    """A column as the source declares it."""

    name: str
    type: str
    type_id: int  # of pg_type; 0: another source's
    modifier: int  # precision, length …, as PostgreSQL packs them; -1: none
    key: bool
    # No other column of the table ever has it: a renamed column keeps it. 0: it is not known.
    number: int = 0
    # The value in rows that were there when the column was added; None: they have null.
    initial_default: Any = None


class TableSchema(msgspec.Struct, frozen=True, omit_defaults=True):
    """A table's columns from here on."""

    id: int  # PostgreSQL's or SQLite's number for it, or made of its name; no other table has it
    source: str  # its name in the config
    schema: str
    name: str
    columns: tuple[TableColumn, ...]
    # What the database does to its rows by itself, without an event, when those of others go or get
    # other keys; only MySQL and MariaDB leave it to the reader.
    foreign_keys: tuple[Reference, ...] = ()


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
        """Whether the statement has CASCADE."""
        return bool(self.options & CASCADE)

    @property
    def restart_identity(self) -> bool:
        """Whether the statement has RESTART IDENTITY."""
        return bool(self.options & RESTART_IDENTITY)


class Begin(_Placed, frozen=True):
    """A transaction's changes follow."""

    timestamp: int  # of the commit: PostgreSQL does not send the start; microseconds since 1970
    xid: int  # 0: it has none, as a copy, or as MySQL, which names transactions


class Commit(_Placed, frozen=True):
    """All changes of a transaction have come."""

    flags: int  # always 0, as PostgreSQL has none yet
    end_lsn: int  # where the commit ends in the write-ahead log; 0: not known
    timestamp: int  # microseconds since 1970


class Unsupported(_Placed, frozen=True):
    """What the other kinds have no word for: a message, an unreadable row."""


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


# --- the contract --------------------------------------------------------------------------------


class Destination(Protocol):
    """A place that takes events."""

    def write_events(self, events: list[Event]) -> Awaitable[None] | None:
        """Store some events; when it returns they are stored, when it raises they come again.

        Events come in the order of the log: transactions as they were committed, so by commit_lsn,
        and changes as they were made. A list may hold events of several tables and transactions,
        and a transaction may go on in the next one. Different tables may be written at the same
        time; within a table the order counts.

        After a failure events may come again. (commit_lsn, tx_ordinal) is the `key` that
        identifies an event in the log. Keep the `sequence` of the last event with what is
        stored, as the checkpoint: nothing up to it is new, and the stream can go on after it. The
        highest commit_lsn says the same to people and other tools, once its Commit has come, for
        as long as no table is copied and the server is not replaced by one with lower LSNs.

        Begin and Commit may be ignored. While tables are copied they repeat with the same
        commit_lsn; the rows between them do not. A Relation repeats in every stream; one that
        begins within a TRUNCATE first describes the tables that stand before its beginning.

        A coroutine (`async def`) does as well: it is awaited before the next events come.
        """
        ...


def events(
    changes: Iterable[Change],
    *,
    wanted: Callable[[Change], bool] | None = None,
    earlier: Iterable[Change] = (),
) -> Iterator[Event]:
    """The events of changes, as one stream; of those that are not wanted only the markers.

    `earlier` are the changes from `Etl().begin(…)` of the first one up to it.
    """
    stream = Etl().open()
    for write, some in ((stream.see, earlier), (stream.encode, changes)):
        for change in some:
            yield from map(decode, write(change, wanted=wanted is None or wanted(change)))


# --- the format ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Etl:
    """Every change as an event of one of the eight kinds; rows go in as they are."""

    name: ClassVar[str] = "etl"
    media_type: ClassVar[str] = "application/json"

    def open(self) -> _EtlStream:
        """Begin a stream, wherever in the log that is."""
        return _EtlStream()

    def begin(self, change: Change) -> int:
        """A TRUNCATE is one event at its last table, so a stream must have seen the others."""
        return _first_emptied(change) if change.op is Op.TRUNCATE else change.sequence


class _EtlStream:
    """Remembers which tables it has described, and what a TRUNCATE has emptied so far."""

    def __init__(self) -> None:
        self._described: dict[tuple[str, int], int] = {}  # a table: its version
        self._named: dict[tuple[str, int], tuple[str, str]] = {}  # those whose number is made
        self._statement = 0  # where the TRUNCATE begins
        self._emptied: list[int] = []

    def see(self, change: Change, *, wanted: bool) -> Sequence[bytes]:
        """Take note of another table of a TRUNCATE."""
        # What came before a gap belongs to another statement.
        if self._statement != (begin := _first_emptied(change)):
            self._statement, self._emptied = begin, []
        if not wanted:
            return ()
        self._emptied.append(table_id(change.table))
        return self._introduced(change)

    def encode(self, change: Change, *, wanted: bool) -> Sequence[bytes]:
        """The events of a change, those of its transaction's begin and end among them."""
        lines = [_begin(change)] if change.ordinal == 1 else []
        if change.op is Op.TRUNCATE:
            lines += self._truncated(change, wanted=wanted)
        elif wanted:
            lines += self._events(change)
        if change.last:
            lines.append(_commit(change))
        return lines

    def _events(self, change: Change) -> Sequence[bytes]:
        match change.op:
            case Op.MESSAGE:
                return [_unsupported(change)]
            case Op.SCHEMA if _drops(change):
                emptied = _truncate(change, 0, [table_id(change.table)])
                return [*self._introduced(change), emptied]
            case Op.SCHEMA:
                self._described[_table(change)] = change.table.version
                self._expect_own_number(change.table)
                return [_relation(change, _ITSELF)]
        return [*self._introduced(change), _row(change)]

    def _introduced(self, change: Change) -> Sequence[bytes]:
        table = _table(change)
        if self._described.get(table) == change.table.version:
            return ()
        self._described[table] = change.table.version
        self._expect_own_number(change.table)
        return [_relation(change, _TABLE)]

    def _expect_own_number(self, table: Table) -> None:
        if table.relation:
            return
        name = (table.schema, table.name)
        other = self._named.setdefault((table.source, table_id(table)), name)
        if other != name:
            raise ConfigError(
                f"the tables {'.'.join(other)} and {'.'.join(name)} of source {table.source} have "
                f"the same table_id {table_id(table)}, which is made of their names",
                hint="Read them by two streams, or leave one of them out.",
            )

    def _truncated(self, change: Change, *, wanted: bool) -> Sequence[bytes]:
        """One event for a statement, at its last table."""
        lines, truncation = self.see(change, wanted=wanted), _truncation_of(change)
        if change.table.relation != truncation.relations[-1]:
            return lines
        emptied, self._emptied = self._emptied, []
        return [*lines, _truncate(change, truncation.options, emptied)] if emptied else lines


# --- JSON ----------------------------------------------------------------------------------------

_BEFORE, _TABLE, _ITSELF, _AFTER = range(SLOTS)

_encode = msgspec.json.Encoder().encode


class _Truncation(msgspec.Struct, frozen=True):
    """What a TRUNCATE says, as far as the event shows it."""

    cascade: bool = False
    restart_identity: bool = False
    relations: tuple[int, ...] = ()

    @property
    def options(self) -> int:
        return CASCADE * self.cascade | RESTART_IDENTITY * self.restart_identity


class _Drop(msgspec.Struct, frozen=True):
    dropped: bool = False


_truncation = msgspec.json.Decoder(_Truncation).decode
_drop = msgspec.json.Decoder(_Drop).decode


def _truncation_of(change: Change) -> _Truncation:
    truncation = _truncation(change.after or b"{}")
    if truncation.relations:
        return truncation
    return msgspec.structs.replace(truncation, relations=(change.table.relation,))


def _first_emptied(change: Change) -> int:
    """The sequence of a TRUNCATE's first change: there is one for each table, side by side."""
    return change.sequence - _truncation_of(change).relations.index(change.table.relation)


def _head(kind: str, change: Change, slot: int, *, lsn: int | None = None) -> str:
    """The beginning of an event, up to `tx_ordinal`."""
    position = change.position
    # The ordinal within the transaction would not do: all batches of a copy have one commit_lsn,
    # and a message outside transactions may share that of the transaction that follows it.
    return (
        f'{{"type":"{kind}","start_lsn":"{format_lsn(position.own if lsn is None else lsn)}"'
        f',"commit_lsn":"{format_lsn(position.commit)}"'
        f',"tx_ordinal":{change.sequence * SLOTS + slot}'
    )


def _row(change: Change) -> bytes:
    """Insert, Update or Delete."""
    table, row = table_id(change.table), change.after or b"{}"
    match change.op:
        case Op.UPDATE:
            head = _head("Update", change, _ITSELF).encode()
            old, unchanged = _old_row(change), _unchanged(change)
            line = b'%b,"table_id":%d,"table_row":%b,"old_table_row":%b%b}' % (
                head, table, row, old, unchanged
            )  # fmt: skip
        case Op.DELETE:
            head = _head("Delete", change, _ITSELF).encode()
            line = b'%b,"table_id":%d,"old_table_row":%b}' % (head, table, _old_row(change))
        case _:
            head = _head("Insert", change, _ITSELF).encode()
            line = b'%b,"table_id":%d,"table_row":%b}' % (head, table, row)
    return one_line(line)


def _old_row(change: Change) -> bytes:
    if change.before is not None:
        only = b"false" if change.before_kind is BeforeKind.FULL else b"true"
        return b'{"key_only":%b,"row":%b}' % (only, change.before)
    # PostgreSQL leaves the old key out when it is the new one, and only then.
    if change.op is Op.UPDATE and change.key and change.table.identity in ("default", "index"):
        return b'{"key_only":true,"row":%b}' % change.key
    return b"null"


def _unchanged(change: Change) -> bytes:
    return b',"unchanged":' + _encode(change.unchanged) if change.unchanged else b""


def _relation(change: Change, slot: int) -> bytes:
    return b'%b,"table_schema":%b}' % (
        _head("Relation", change, slot).encode(),
        _encode(_schema(change.table)),
    )


def _schema(table: Table) -> TableSchema:
    columns = tuple(
        TableColumn(
            column.name,
            column.type,
            column.type_id,
            column.modifier,
            column.key,
            column.number,
            msgspec.Raw(column.initial_default.encode()) if column.initial_default else None,
        )
        for column in table.columns
    )
    acting = tuple(filter(acts, table.references))
    return TableSchema(table_id(table), table.source, table.schema, table.name, columns, acting)


def _truncate(change: Change, options: int, relations: Sequence[int]) -> bytes:
    ids = ",".join(map(str, relations))
    head = _head("Truncate", change, _ITSELF)
    return f'{head},"options":{options},"rel_ids":[{ids}]}}'.encode()


def _unsupported(change: Change) -> bytes:
    return (_head("Unsupported", change, _ITSELF) + "}").encode()


def _begin(change: Change) -> bytes:
    transaction = change.transaction
    head = _head("Begin", change, _BEFORE)
    xid = _xid(transaction.id)
    return f'{head},"timestamp":{transaction.commit_time},"xid":{xid}}}'.encode()


def _commit(change: Change) -> bytes:
    head = _head("Commit", change, _AFTER, lsn=change.position.commit)
    end, time = change.position.commit_end, change.transaction.commit_time
    return f'{head},"flags":0,"end_lsn":{end},"timestamp":{time}}}'.encode()


def _xid(transaction: str) -> int:
    return int(transaction) & 0xFFFFFFFF if transaction.isdecimal() else 0


def _drops(change: Change) -> bool:
    return change.after is not None and _drop(change.after).dropped


def _table(change: Change) -> tuple[str, int]:
    return change.table.source, table_id(change.table)


def _made_id(table: Table) -> int:
    name = f"{table.schema}\0{table.name}".encode()
    return table.relation or int.from_bytes(blake2b(name, digest_size=4).digest()) or 1


table_id = PerTable(_made_id)
"""The source's number for a table; where it has none, as MySQL, 32 bits made of its name."""
