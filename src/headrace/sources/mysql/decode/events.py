"""The events of a binary log of MySQL and MariaDB, as values."""

from __future__ import annotations

import re
from enum import Enum

import msgspec

from .columns import MappedColumn
from .gtid import MariadbGtid, MariadbGtids, MysqlGtid, MysqlGtids

_ARTIFICIAL = 0x20  # in an event's flags


class Header(msgspec.Struct, frozen=True, gc=False):
    """What every event begins with."""

    timestamp: int  # seconds since 1970; 0: made up by the server for this connection
    kind: int  # the event's number
    server_id: int
    size: int  # bytes, header and checksum included
    end: int  # log_pos: where the event ends in its file, 32 bits; 0: not known
    flags: int

    @property
    def artificial(self) -> bool:
        """Whether it stands in no file: such an event is no position."""
        return bool(self.flags & _ARTIFICIAL)


class FormatDescription(msgspec.Struct, frozen=True):
    """FORMAT_DESCRIPTION: how the events that follow are written."""

    header: Header
    server: str  # "8.0.36", "10.11.19-MariaDB-log"
    created: int  # seconds since 1970; 0: not the first file since the server started
    lengths: bytes  # of the post-header of each kind of event, from kind 1
    checksum: bool | None  # None: not known yet

    @property
    def mariadb(self) -> bool:
        """Whether a MariaDB wrote it."""
        return "mariadb" in self.server.lower()

    @property
    def counts_years(self) -> bool:
        """Whether a YEAR is surely among the numbers whose signs a table map has.

        8.0.15 does not count them, and 8.0.29 does; between them nothing is known.
        """
        numbers = [int(part) for part in re.findall(r"\d+", self.server)[:3]]
        return self.mariadb or numbers >= [8, 0, 29]


class Rotate(msgspec.Struct, frozen=True):
    """The next event stands in this file."""

    header: Header
    file: str
    position: int


class Query(msgspec.Struct, frozen=True):
    """A statement: BEGIN, COMMIT, DDL, or DML of the statement format."""

    header: Header
    database: str  # the default one
    sql: str
    sql_mode: int = 0  # bits; 4 is ANSI_QUOTES
    error: int = 0
    microseconds: int = 0  # adds to the header's timestamp
    thread: int = 0
    done: bool = True  # False: an ALTER TABLE that only starts here, or is rolled back


class Xid(msgspec.Struct, frozen=True):
    """A commit."""

    header: Header
    xid: int


class XaPrepare(msgspec.Struct, frozen=True):
    """XA PREPARE, or XA COMMIT … ONE PHASE: the rows before it are all of the branch."""

    header: Header
    one_phase: bool
    format_id: int
    gtrid: bytes
    bqual: bytes


class Gtid(msgspec.Struct, frozen=True):
    """A transaction of MySQL or MariaDB begins."""

    header: Header
    gtid: MysqlGtid | MariadbGtid | None  # None: ANONYMOUS_GTID
    standalone: bool = False  # MariaDB: one statement (DDL), no COMMIT follows
    prepared_xa: bool = False  # MariaDB: rows of an XA branch, its XA PREPARE follows
    commit_time: int = 0  # MySQL: microseconds since 1970; 0: not known
    length: int = 0  # MySQL: bytes of the whole transaction, this event included; 0: not known


class PreviousGtids(msgspec.Struct, frozen=True):
    """MySQL: what was executed before this file."""

    header: Header
    gtids: MysqlGtids


class GtidList(msgspec.Struct, frozen=True):
    """MariaDB: the last transactions before this file, one a domain and server."""

    header: Header
    gtids: tuple[MariadbGtid, ...]

    @property
    def position(self) -> MariadbGtids:
        """The last one of each domain."""
        return MariadbGtids.of(self.gtids)


class TableMap(msgspec.Struct, frozen=True):
    """Which table a number means from here on, and how its rows are laid out."""

    header: Header
    id: int
    database: str
    table: str
    columns: tuple[MappedColumn, ...]
    content: bytes  # everything after the number: equal bytes describe equal columns


class RowsKind(Enum):
    """What happened to the rows of an event."""

    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"


class RowsEvent(msgspec.Struct, frozen=True, gc=False):
    """Rows of one table; those of an UPDATE come in pairs, the old one first."""

    header: Header
    kind: RowsKind
    table_id: int
    last: bool  # the statement ends: table numbers may be forgotten
    width: int  # columns of the table
    present: bytes  # a bit for each column in the (old) image
    present_after: bytes  # of an UPDATE's new image; else empty
    data: bytes
    at: int  # where the rows begin in `data`
    end: int  # and where they end
    unchecked: bool = False  # foreign keys did nothing: foreign_key_checks was off


class Payload(msgspec.Struct, frozen=True):
    """TRANSACTION_PAYLOAD: the events of a transaction, compressed."""

    header: Header
    compressed: bytes
    compression: int  # 0: zstd, 255: none
    size: int  # bytes when uncompressed; 0: not known


class Incident(msgspec.Struct, frozen=True):
    """The server has lost events: every reader must stop."""

    header: Header
    number: int
    message: str


class Heartbeat(msgspec.Struct, frozen=True):
    """Nothing has happened; stands in no file."""

    header: Header
    file: str
    position: int


class RowsQuery(msgspec.Struct, frozen=True):
    """The statement that the rows come from (ROWS_QUERY, ANNOTATE_ROWS)."""

    header: Header
    sql: str


class IgnoredEvent(msgspec.Struct, frozen=True):
    """An event that changes nothing for us; its `header.end` still counts."""

    header: Header


Event = (
    FormatDescription | Rotate | Query | Xid | XaPrepare | Gtid | PreviousGtids | GtidList
    | TableMap | RowsEvent | Payload | Incident | Heartbeat | RowsQuery | IgnoredEvent
)  # fmt: skip

UNKNOWN = FormatDescription(Header(0, 0, 0, 0, 0, 0), "", 0, b"", None)
