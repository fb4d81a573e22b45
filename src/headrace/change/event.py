"""The change: the one thing that travels through Headrace.

A change is immutable and holds its images as JSON text, written once at capture.
Everything that reads the log reuses those bytes; nobody decodes a row unless it must look inside.
"""

import hashlib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

import msgspec

PIECE = 100_000  # changes; of a larger transaction so many at a time are taken together


class Op(StrEnum):
    """What happened."""

    INSERT = "INSERT"
    UPDATE = "UPDATE"
    DELETE = "DELETE"
    READ = "READ"  # a row read by a snapshot
    TRUNCATE = "TRUNCATE"
    SCHEMA = "SCHEMA"  # a table's columns from here on
    MESSAGE = "MESSAGE"  # a logical message, or bytes that could not be decoded


class BeforeKind(StrEnum):
    """How much of the old row the source sent."""

    FULL = "full"
    KEY = "key"
    NONE = "none"


class Column(msgspec.Struct, frozen=True):
    """A column as the source declares it."""

    name: str
    type: str  # as the source writes it: "numeric(12,2)", "integer[]"
    key: bool = False
    type_id: int = 0  # the source's number for the type; 0 where it has none
    modifier: int = -1  # precision, length …, packed as the source packs them


class Reference(msgspec.Struct, frozen=True):
    """A foreign key: which columns name a row of which other table."""

    columns: tuple[str, ...]
    schema: str
    table: str
    parent_columns: tuple[str, ...]  # of the other table, in the order of `columns`


class Table(msgspec.Struct, frozen=True):
    """A table as it was while a change was made: one version of its columns."""

    source: str  # the configured name
    connector: str  # postgres, mysql, sqlite, sqlserver, mongodb
    origin: str  # the server's own identity: the same name on another server differs
    database: str
    schema: str
    name: str  # "" for what belongs to no table (messages)
    columns: tuple[Column, ...] = ()
    identity: str = "default"  # what the source sends as the old row: default, full, index, nothing
    relation: int = 0  # the source's number for the table; 0 where it has none
    version: int = 0  # given by the log, unique in it and increasing; 0 until then
    references: tuple[Reference, ...] = ()  # its foreign keys

    @property
    def key(self) -> tuple[str, ...]:
        """Names of the key columns, in column order."""
        return tuple(column.name for column in self.columns if column.key)

    def matches(self, glob: str) -> bool:
        """Whether a pattern means this table: schema.table, or the bare table in any schema."""
        return fnmatchcase(f"{self.schema}.{self.name}" if "." in glob else self.name, glob)


class Transaction(msgspec.Struct, frozen=True, gc=False):
    """What all changes of one transaction share."""

    id: str
    commit_time: int  # microseconds since 1970, the server's clock
    captured_at: int  # microseconds since 1970, our clock
    metadata: bytes | None = None  # annotations as a JSON object; None: there were none


class PostgresPosition(
    msgspec.Struct, frozen=True, gc=False, array_like=True, tag_field="connector", tag="postgres"
):
    """Where a change stands in PostgreSQL's write-ahead log."""

    commit_lsn: int  # of the transaction's commit record; orders transactions
    lsn: int  # of the change's own record; several changes may share one
    end_lsn: int = 0  # where the commit record ends; 0: not the transaction's last change

    @property
    def commit(self) -> int:
        """A number that orders transactions."""
        return self.commit_lsn

    @property
    def own(self) -> int:
        """A number that orders changes within a transaction."""
        return self.lsn

    def to_json(self) -> dict[str, str | int]:
        """The position as every JSON format shows it."""
        return {"lsn": format_lsn(self.lsn), "commit_lsn": format_lsn(self.commit_lsn)}


class MysqlPosition(
    msgspec.Struct, frozen=True, gc=False, array_like=True, tag_field="connector", tag="mysql"
):
    """Where a change stands in the binary log of MySQL or MariaDB."""

    file: str  # mysql-bin.000001
    position: int  # where the change's event begins in the file
    gtid: str = ""  # the transaction's; "": the server gives none
    begin: int = 0  # where the transaction begins in the file

    @property
    def commit(self) -> int:
        """A number that orders transactions of one server."""
        return self._number << 40 | self.begin

    @property
    def own(self) -> int:
        """A number that orders changes within a transaction."""
        return self._number << 40 | self.position

    @property
    def _number(self) -> int:
        number = self.file.rpartition(".")[2]
        return int(number) if number.isdecimal() else 0

    def to_json(self) -> dict[str, str | int]:
        """The position as every JSON format shows it."""
        told: dict[str, str | int] = {"file": self.file, "position": self.position}
        return told | {"gtid": self.gtid, "begin": self.begin}


class SqlitePosition(
    msgspec.Struct, frozen=True, gc=False, array_like=True, tag_field="connector", tag="sqlite"
):
    """Where a change stands in the table that the triggers of a SQLite database append to."""

    transaction: int  # its first entry
    entry: int  # counted from the installation on

    @property
    def commit(self) -> int:
        """A number that orders transactions."""
        return self.transaction

    @property
    def own(self) -> int:
        """A number that orders changes."""
        return self.entry

    def to_json(self) -> dict[str, str | int]:
        """The position as every JSON format shows it."""
        return {"transaction": self.transaction, "entry": self.entry}


class EventTablePosition(
    msgspec.Struct, frozen=True, gc=False, array_like=True, tag_field="connector", tag="events"
):
    """Where a change stands in an event table of PostgreSQL."""

    transaction: int  # the transaction's number, an xid8
    entry: int  # the row's number in the table, or that of one before it that is higher
    # Where the write-ahead log stood when the transaction was found committed, and no two alike:
    # it grows from one to the next, however late they commit. 0: not known.
    lsn: int = 0

    @property
    def commit(self) -> int:
        """A number that orders transactions, as they became visible."""
        return self.lsn

    @property
    def own(self) -> int:
        """A number that orders changes within a transaction."""
        return self.entry

    def to_json(self) -> dict[str, str | int]:
        """The position as every JSON format shows it."""
        return {"txid": self.transaction, "id": self.entry, "lsn": format_lsn(self.lsn)}


Position = PostgresPosition | MysqlPosition | SqlitePosition | EventTablePosition
"""One member for each way of capturing."""


def position_from_json(told: Mapping[str, Any]) -> Position:
    """The position that `to_json` has told."""
    match told:
        case {"lsn": lsn, "commit_lsn": commit}:
            return PostgresPosition(parse_lsn(commit), parse_lsn(lsn))
        case {"file": file, "position": position, "gtid": gtid, "begin": begin}:
            return MysqlPosition(file, position, gtid, begin)
        case {"transaction": transaction, "entry": entry}:
            return SqlitePosition(transaction, entry)
        case {"txid": transaction, "id": entry, "lsn": lsn}:
            return EventTablePosition(transaction, entry, parse_lsn(lsn))
    raise ValueError(f"not a position: {told!r}")


class Change(msgspec.Struct, frozen=True, gc=False):
    """One change of one row (or table, or schema), in the order the source committed it."""

    op: Op
    table: Table
    key: bytes | None  # key columns as a JSON object; None: the table has no key
    before: bytes | None  # old image as a JSON object; None: not sent, or there was none
    before_kind: BeforeKind
    # New image as a JSON object. For TRUNCATE, SCHEMA and MESSAGE: what they say, as JSON.
    after: bytes | None
    changed: tuple[str, ...] | None  # columns whose value differs; None: cannot be known
    unchanged: tuple[str, ...]  # columns the source did not send: absent, which is not null
    transaction: Transaction
    ordinal: int  # 1, 2, … within the transaction
    position: Position
    last: bool = False  # whether it ends its transaction
    sequence: int = 0  # the log's own number; 0 until it is in the log

    @property
    def id(self) -> str:
        """`evt_` and a UUID: the same for this change in every format and every replay."""
        return change_id(self.table.origin, self.position, self.transaction.id, self.ordinal)


def piece_begin(sequence: Any, ordinal: Any) -> Any:
    """The sequence of the first change that is taken together with the one that stands here.

    Changes of a transaction are neighbours in the log, and pieces are counted from its start. It
    takes and gives anything that can be reckoned with: numbers, or columns of numbers.
    """
    return sequence - (ordinal - 1) % PIECE


def ends_piece(change: Change) -> bool:
    """Whether no later change is taken together with this one."""
    return change.last or change.ordinal % PIECE == 0


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Changes that a source hands over together, in commit order.

    A batch ends where a transaction ends and then says how to resume after it.
    A transaction too large for memory comes as several batches; all but the last have no `resume`.
    """

    changes: Sequence[Change]
    resume: bytes | None  # opaque to everyone but the source


# The 17th digit of a UUID is 8, 9, a or b; two bits of the digest's own choose which.
_VARIANTS = dict(zip("0123456789abcdef", "89ab" * 4, strict=True))


def change_id(origin: str, position: Position, transaction: str, ordinal: int) -> str:
    """The id of the change that stands here in its source."""
    # When an event table's transaction was found committed may differ from replay to replay.
    commit = position.commit
    if isinstance(position, EventTablePosition):
        commit = position.transaction
    name = f"{origin}|{commit}|{transaction}|{ordinal}"
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    # A UUID of version 8 (free of meaning), put together by hand: this runs for every delivery.
    variant = _VARIANTS[digest[16]]
    return (
        f"evt_{digest[:8]}-{digest[8:12]}-8{digest[13:16]}-{variant}{digest[17:20]}-{digest[20:]}"
    )


def format_lsn(lsn: int) -> str:
    """An LSN as PostgreSQL writes it: 0/16B3748."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """The number behind PostgreSQL's text form of an LSN; ValueError when it is none."""
    high, _, low = text.partition("/")
    number = int(high, 16) << 32 | int(low, 16)
    if number >> 64 or int(low, 16) >> 32:
        raise ValueError(f"not an LSN: {text!r}")
    return number
