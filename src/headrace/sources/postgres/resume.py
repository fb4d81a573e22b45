"""What the log remembers of a PostgreSQL source between two runs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...change.lsn import format_lsn
from .. import Phase, Status
from ..resume import TablesResume


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

    @property
    def done(self) -> bool:
        """Whether every row has been read."""
        return self.ranges == () and not self.moved

    def anew(self) -> PostgresTableSnapshot:
        """The same table, to be read from its first row."""
        return PostgresTableSnapshot(self.relation, again=True)


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
    return {table if "." in table else f"public.{table}" for table in tables}
