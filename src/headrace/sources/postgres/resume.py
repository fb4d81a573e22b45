"""What the log remembers of a PostgreSQL source between two runs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...change.lsn import format_lsn
from ...change.path import qualified
from .. import Phase, Status
from ..resume import TablesResume
from .looks import LookState


class BlockRange(msgspec.Struct, frozen=True):
    """Blocks of one physical table that still have to be read."""

    relation: str  # quoted, schema-qualified: a partition, or the table itself
    start: str  # first ctid to read
    end: int | None  # first block that is not ours; None: to the end of the table


class PostgresTableSnapshot(msgspec.Struct, frozen=True):
    """How far the snapshot of one table is.

    Not begun: `ranges` is None, and changes committed before its point are in the snapshot.
    Begun: `ranges` are left to read. Taken up after an interruption: `moved` too. Finished:
    nothing is left.
    """

    relation: int  # the table's oid: another one under the same name is another table
    ranges: tuple[BlockRange, ...] | None = None
    rows: int = 0
    estimated_rows: int = -1
    # The oldest transaction that its first look might not see: a row written by it or later may
    # have moved between the ranges when an interrupted snapshot is taken up again.
    since: int = 0
    moved: tuple[str, ...] = ()  # physical tables where such rows still have to be looked for
    filenodes: tuple[int, ...] = ()  # a rewritten table has others: its ranges mean nothing then
    again: bool = False  # whether rows of an earlier snapshot must be forgotten first
    published: str = ""  # how it was published when it was last looked at; "": not looked at yet
    look: LookState | None = None  # what the last look at the catalogs has left; None: none yet
    replaced: int = 0  # the oid of a table that had its name; 0: none, or its end is announced

    @property
    def done(self) -> bool:
        """Whether every row has been read."""
        return self.ranges == () and not self.moved

    @property
    def announced(self) -> int:
        """The oid of the table that the log has under this name."""
        return self.replaced or self.relation

    def anew(self) -> PostgresTableSnapshot:
        """The same table, to be read from its first row."""
        return PostgresTableSnapshot(
            self.relation, again=True, published=self.published, replaced=self.replaced
        )


class PostgresTablesResume(TablesResume[PostgresTableSnapshot], frozen=True, kw_only=True):
    """Which database, and the state of its tables."""

    system: str  # the server's system identifier
    timeline: int
    database: str

    @property
    def origin(self) -> str:
        """The identity that its tables carry."""
        return f"postgres:{self.system}:{self.database}"

    @property
    def live(self) -> dict[int, str]:
        """Tables whose changes count: what happens before a snapshot begins is in the snapshot."""
        return {
            snapshot.relation: path
            for path, snapshot in self.snapshots.items()
            if snapshot.ranges is not None
        }


class LastCommit(msgspec.Struct, frozen=True, array_like=True):
    """The last transaction that the server has sent, by which its history is known again."""

    lsn: int  # of its commit record; 0: none since the slot was created
    xid: int  # of 32 bits
    time: int  # of its commit
    # Transactions that commit before this LSN may come again or not: they may have overlapped with
    # a change of the publications, which the server does not decode twice in the same way.
    until: int = 0


class PostgresResume(PostgresTablesResume, frozen=True, kw_only=True):
    """Which slot of which server, and how far."""

    slot: str
    position: int  # end of the last transaction that is in the log
    xid: int  # its transaction id, with the epoch
    # The second publication's oid, once every transaction after the position can see it: pgoutput
    # looks publications up in the catalogs as they were. 0: it must not be named yet.
    inserts: int = 0
    # Tables in the second publication -> the statements that change that.
    inserts_only: dict[str, str] = msgspec.field(default_factory=dict)
    # None: not known, or received from other publications than those that are named now.
    last_commit: LastCommit | None = None
    # Tables that were dropped or have another name, and their oids: the stream has not said so yet.
    leaving: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def looks(self) -> dict[str, LookState]:
        """What the last look at each table has left."""
        return {path: copy.look for path, copy in self.snapshots.items() if copy.look is not None}

    @property
    def reached(self) -> str:
        """As PostgreSQL writes a position."""
        return format_lsn(self.position)

    def status(self, source: str, phase: Phase) -> Status:
        """How the source is doing, as far as the resume shows."""
        status = super().status(source, phase)
        return msgspec.structs.replace(status, inserts_only=self.inserts_only)


class AckedResume(msgspec.Struct, frozen=True):
    """What is known from a resume that the log has stored, passing over the rest."""

    position: int
    inserts_only: dict[str, str] = {}


def paths_of(tables: Sequence[str]) -> set[str]:
    """schema.table of tables that may be named without a schema."""
    return {qualified(table, "public") for table in tables}
