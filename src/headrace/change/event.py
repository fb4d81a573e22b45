"""The change: the one thing that travels through Headrace.

A change is immutable and holds its images as JSON text, written once at capture.
Everything that reads the log reuses those bytes; nobody decodes a row unless it must look inside.
"""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from enum import StrEnum
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Self

import msgspec

from .path import path_matches, table_path

PIECE = 100_000  # changes; of a larger transaction so many at a time are taken together
COMMENT_BYTES = 4096  # at most, of a comment that a table or a column has in its database


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
    comment: str = ""  # what the database says about it; "": nothing
    # The column's own number within its table, which no other column ever gets: a renamed column
    # keeps it, one that is dropped and added again has another. 0: its name is all that is known.
    number: int = 0
    # JSON of the value in rows that were there when the column was added; "": they have null.
    initial_default: str = ""


class Reference(msgspec.Struct, frozen=True, omit_defaults=True):
    """A foreign key: which columns name a row of which other table."""

    columns: tuple[str, ...]
    schema: str
    table: str
    parent_columns: tuple[str, ...]  # of the other table, in the order of `columns`
    # What the database does to these rows without a change event, when the other row goes or gets
    # another key: "cascade", "set null" or "set default"; "": nothing, or every row is captured.
    on_delete: str = ""
    on_update: str = ""


class Table(msgspec.Struct, frozen=True):
    """A table as it was while a change was made: one version of its columns."""

    source: str  # the configured name
    connector: str  # the kind of database: the name of its `Connector`
    origin: str  # the server's own identity: the same name on another server differs
    database: str
    schema: str
    name: str  # "" for what belongs to no table (messages)
    columns: tuple[Column, ...] = ()
    identity: str = "default"  # what the source sends as the old row: default, full, index, nothing
    relation: int = 0  # the source's number for the table; 0 where it has none
    version: int = 0  # given by the log, unique in it and increasing; 0 until then
    references: tuple[Reference, ...] = ()  # its foreign keys
    hidden: tuple[str, ...] = ()  # columns that its source leaves out or masks
    order: tuple[str, ...] = ()  # where some are hidden: all columns, as the source orders them
    comment: str = ""  # what the database says about it; "": nothing

    @property
    def key(self) -> tuple[str, ...]:
        """Names of the key columns, in column order."""
        return tuple(column.name for column in self.columns if column.key)

    @property
    def path(self) -> str:
        """schema.table, as config, status and commands write it."""
        return table_path(self.schema, self.name)

    def matches(self, glob: str) -> bool:
        """Whether a pattern means this table: schema.table, or the bare table in any schema."""
        return path_matches(self.schema, self.name, glob)


def bounded_comment(text: str) -> str:
    """As much of a comment as is kept, in whole characters."""
    return text.encode()[:COMMENT_BYTES].decode(errors="ignore")


def same_columns(one: Sequence[Column], other: Sequence[Column]) -> bool:
    """Whether images with these columns are read alike, whatever else is known of them."""
    return [_as_read(each) for each in one] == [_as_read(each) for each in other]


def _as_read(column: Column) -> Column:
    return msgspec.structs.replace(column, comment="", number=0, initial_default="")


class Transaction(msgspec.Struct, frozen=True, gc=False):
    """What all changes of one transaction share."""

    id: str
    commit_time: int  # microseconds since 1970, the server's clock
    captured_at: int  # microseconds since 1970, our clock
    metadata: bytes | None = None  # annotations as a JSON object; None: there were none


class Position(msgspec.Struct, frozen=True, gc=False, array_like=True, tag_field="connector"):
    """Where a change stands in its source; each source has its own, under a `tag` of its own.

    The log stores the tag and the fields in their order, so that neither may change: a field that
    comes later is the last one and has a default.
    """

    @property
    def commit(self) -> int:
        """A number that orders transactions."""
        raise NotImplementedError

    @property
    def own(self) -> int:
        """A number that orders changes within a transaction."""
        raise NotImplementedError

    @property
    def commit_end(self) -> int:
        """Where the transaction ends, in the numbers of `commit`."""
        return self.commit

    @property
    def replayed_commit(self) -> int:
        """What ids are made of: the same number whenever the transaction is captured again."""
        return self.commit

    def to_json(self) -> dict[str, Any]:
        """The position as every JSON format shows it."""
        return msgspec.structs.asdict(self)

    @classmethod
    def from_json(cls, shown: Mapping[str, Any]) -> Self:
        """The position that `to_json` shows so; ValueError for that of another class."""
        if shown.keys() != set(cls.__struct_fields__):
            raise ValueError(f"not a {cls.__name__}: {shown!r}")
        return cls(**shown)


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
    commit = position.replayed_commit
    name = f"{origin}|{commit}|{transaction}|{ordinal}"
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    # A UUID of version 8 (free of meaning), put together by hand: this runs for every delivery.
    variant = _VARIANTS[digest[16]]
    return (
        f"evt_{digest[:8]}-{digest[8:12]}-8{digest[13:16]}-{variant}{digest[17:20]}-{digest[20:]}"
    )


if not TYPE_CHECKING:  # so that mypy knows which names there are

    def __getattr__(name: str) -> object:
        """The positions of sources by the names that this module had for them."""
        if not name.endswith("Position"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        ours = (
            e for e in entry_points(group="headrace.connectors") if e.value.startswith("headrace.")
        )
        for entry in ours:
            for position in entry.load().positions:
                if position.__name__ == name:
                    home = position.__module__
                    warnings.warn(f"{name} is now in {home}", DeprecationWarning, stacklevel=2)
                    return position
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
