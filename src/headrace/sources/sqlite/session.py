"""Beginning: with the right database, as a reader that it knows, and with its tables."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence

import msgspec

from ...change.event import Table
from ...change.path import qualified, split_path
from ...errors import PositionLost, SourceReplaced
from .. import Register
from ..resume import Restart
from .database import Database, Snapshot
from .installation import InstalledTable
from .resume import SqliteResume, SqliteTableSnapshot
from .schema import SCHEMA, matches
from .settings import SqliteSettings
from .transactions import DescribedLayout
from .values import Images

_STOPPED = (
    "DDL may have rewritten its rows (on_rewrite: stop); `headrace snapshot` restores the table"
)


def begin(
    source: SqliteSettings, stored: SqliteResume | Restart | None, database: Database
) -> SqliteResume:
    """Make sure that it is the right database, and become one of its readers."""
    database.expect_installed()
    if isinstance(stored, SqliteResume):
        expect_same(stored, database)
        looks = database.rejoin(source.name, stored.reader, stored.looks)
        return msgspec.structs.replace(_narrowed(stored, source.tables), looks=looks)
    database.renew(source.tables)  # earlier triggers count from 1 where entries were deleted
    reader = uuid.uuid4().hex
    identity, last, seal = database.join(source.name, reader)
    former = stored.tables if stored else ()
    return SqliteResume(
        uuid=identity, reader=reader, looks=1, position=last, seal=seal,
        snapshots={}, errored={}, versions={}, former=former,
    )  # fmt: skip


def expect_same(resume: SqliteResume, database: Database) -> None:
    """Halt unless it is the database that the log follows, and not an older copy of it."""
    snapshot = database.snapshot()
    try:
        expect_known(resume, snapshot, database.path)
    finally:
        database.release(snapshot)


def expect_known(resume: SqliteResume, snapshot: Snapshot, path: str) -> None:
    """The same, of a look."""
    if snapshot.uuid != resume.uuid:
        raise SourceReplaced(
            f"{path} is database {snapshot.uuid}, but the log follows database {resume.uuid}"
        )
    if snapshot.is_deleted(resume.position, resume.seal):
        raise PositionLost(f"entry {resume.position} of {path} is gone: somebody has deleted it")
    if snapshot.last < resume.position:
        raise SourceReplaced(
            f"{path} stands at entry {snapshot.last}, before the log's position "
            f"{resume.position}: it is an older copy of the database"
        )
    if snapshot.seal(resume.position) != resume.seal:
        raise SourceReplaced(
            f"entry {resume.position} of {path} is not the one that the log has: it is an older "
            "copy of the database, to which others have written"
        )


def _narrowed(resume: SqliteResume, globs: Sequence[str]) -> SqliteResume:
    """Let go of tables that the config does not name any more."""
    resume = resume.repathed({path: qualified(path, SCHEMA) for path in resume.snapshots})
    for path in resume.snapshots:
        if not matches(split_path(path)[1], globs):
            resume = resume.without(path)
    return resume


def with_tables(
    resume: SqliteResume, tables: Sequence[InstalledTable], *, copying: bool, stops: bool = False
) -> SqliteResume:
    """Add unknown tables, and take a new snapshot of those whose changes are incomplete.

    `stops`: these go to the errored state instead, until somebody asks for the snapshot.
    """
    copies, errored = dict(resume.snapshots), dict(resume.errored)
    for table in tables:
        known = copies.get(table.path)
        if known is not None and known.layout == table.number:
            continue
        again = known is not None or table.path in resume.former
        done = not copying or (stops and known is not None and known.done)
        copies[table.path] = SqliteTableSnapshot(table.number, done=done, again=again)
        errored.pop(table.path, None)
        if done and copying:
            errored[table.path] = _STOPPED
    former = tuple(path for path in dict.fromkeys(resume.former) if path not in copies)
    return msgspec.structs.replace(resume, snapshots=copies, errored=errored, former=former)


class SqliteTables:
    """The layouts of a database, as changes need them."""

    def __init__(
        self, database: Database, source: SqliteSettings, identity: str, register: Register
    ) -> None:
        self._database = database
        self._source = source
        self._origin = f"sqlite:{identity}"
        self._register = register
        self._known: dict[int, DescribedLayout] = {}
        self._nowhere: Table | None = None

    def describe(self, layout: int) -> DescribedLayout:
        """The layout of this number, its table registered with the log."""
        if layout not in self._known:
            found = self._database.layout(layout)
            if found is None:
                raise PositionLost(
                    f"{self._source.path} does not know its layout {layout} any more"
                )
            installed, follows = found
            table = self._register(table_of(self._source, installed, self._origin))
            self._known[layout] = DescribedLayout(table, Images(table.columns), follows)
        return self._known[layout]

    def sourceless(self) -> Table:
        """The table of changes that belong to no table."""
        if self._nowhere is None:
            name = database_name(self._source.path)
            table = Table(self._source.name, "sqlite", self._origin, name, "", "")
            self._nowhere = self._register(table)
        return self._nowhere


def table_of(source: SqliteSettings, installed: InstalledTable, origin: str) -> Table:
    """A table as its changes carry it."""
    return Table(
        source.name,
        "sqlite",
        origin,
        database_name(source.path),
        SCHEMA,
        installed.layout.name,
        installed.layout.columns,
        "full",
        installed.relation,
        references=installed.layout.references,
    )


def database_name(path: str) -> str:
    """What to call a database: its file, without folder and ending."""
    return os.path.splitext(os.path.basename(path))[0]
