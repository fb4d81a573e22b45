"""A SQLite source's tables at an entry of its append table, beside whoever captures it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import apsw

from ...change.event import Batch, Position
from ...errors import DecodeError, SourceUnavailable
from .. import Register
from ..pace import RowPace
from ..resume import Restart, decode, position_in
from . import installation
from .connections import classify
from .connector import SqlitePosition
from .database import Database
from .resume import SqliteResume
from .session import SqliteTables, expect_known
from .settings import SqliteSettings
from .snapshot import SqliteSnapshotReader

_END = b"{}"  # after each batch; nobody goes on from here


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """An entry, and rows as they were when it was the newest."""

    entry: int
    readers: Sequence[SqliteSnapshotReader]
    pace: RowPace

    @property
    def left_out(self) -> Mapping[str, str]:
        """Every table can be read."""
        return {}

    def batches(self) -> Iterator[Batch]:
        """The columns and the rows of each table."""
        try:
            for reader in self.readers:
                yield Batch(reader.announce(columns=True, forget=False), _END)
                for changes in reader.rows(self.pace):
                    yield Batch(changes, _END)
        except DecodeError as error:
            raise SourceUnavailable(f"a table cannot be read: {error}") from error

    def expect_nobody_waits(self) -> None:
        """A read transaction keeps no writer waiting; see `entry_point`."""

    def covers(self, position: Position) -> bool:
        """Whether the entry had been written."""
        assert isinstance(position, SqlitePosition)
        return position.entry <= self.entry

    def reached_by(self, resume: bytes) -> bool:
        """Whether the log has the entry."""
        return position_in(resume) >= self.entry


@contextmanager
def entry_point(
    source: SqliteSettings, stored: bytes, tables: Sequence[str], register: Register
) -> Iterator[EntryPoint]:
    """Tables in a read transaction.

    Without a write-ahead log it would keep writers waiting: there all rows are read at once, and
    held in memory.
    """
    resume = decode(stored, SqliteResume)
    if isinstance(resume, Restart):
        raise SourceUnavailable("a new snapshot of all tables is about to be taken")
    try:
        with closing(Database(source.path)) as database:
            snapshot = database.snapshot()
            expect_known(resume, snapshot, database.path)
            known = SqliteTables(database, source, resume.uuid, register)
            layouts = [
                each.number
                for each in installation.layouts(snapshot.connection)
                if each.path in tables
            ]
            readers = [
                SqliteSnapshotReader(snapshot, layout, known.describe(layout), looks=resume.looks)
                for layout in layouts
            ]
            database.begin_watch(resume.uuid)
            if database.wal is None:
                for reader in readers:
                    reader.hold()
                database.release(snapshot)
            yield EntryPoint(snapshot.last, readers, RowPace(source.snapshot_rows_per_second))
            database.release(snapshot)
    except apsw.Error as error:
        raise classify(error, source.path) from error
