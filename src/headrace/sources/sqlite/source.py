"""The source of type `sqlite`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from typing import ClassVar

from ...change.connector import Connector
from ...change.event import Table
from .. import Finding, Register, Removal, Status
from ..resume import decode, described, snapshots_again
from . import check
from .connections import classified, connect, quoted
from .connector import SQLITE
from .installation import InstalledTable, expected_layouts, take_out
from .point import EntryPoint, entry_point
from .resume import SqliteResume
from .schema import path_of
from .session import table_of
from .settings import SqliteSettings
from .stream import SqliteStream


class Sqlite(SqliteSettings):
    """A SQLite database, with Headrace's triggers in it."""

    __slots__ = ()
    connector: ClassVar[Connector] = SQLITE

    def open(self, resume: bytes | None, register: Register) -> SqliteStream:
        """Go on after `resume`; opens the file when the stream is first read."""
        stored = None if resume is None else decode(resume, SqliteResume)
        return SqliteStream(self, stored, register)

    def copy_again(self, resume: bytes | None, tables: Sequence[str]) -> bytes | None:
        """A resume with new snapshots of these tables; no tables: of all, from a new start."""
        if resume is None:
            return None
        paths = {table if "." in table else path_of(table) for table in tables}
        return snapshots_again(self.name, decode(resume, SqliteResume), paths)

    def describe(self, resume: bytes | None) -> Status:
        """The status behind a stored resume, without asking the database."""
        return described(self.name, resume, SqliteResume)

    def check(self) -> list[Finding]:
        """Look at everything that capturing needs."""
        return check.check(self)

    def captured_tables(self) -> list[Table]:
        """The tables that would be captured now."""
        with classified(self.path), closing(connect(self.path)) as connection:
            found = expected_layouts(connection, self.tables)
        return [table_of(self, InstalledTable(0, 0, layout), "") for layout in found]

    def at_point(
        self, resume: bytes, tables: Sequence[str], register: Register
    ) -> AbstractContextManager[EntryPoint]:
        """Captured tables at an entry of the append table."""
        return entry_point(self, resume, tables, register)

    def remove(self, resume: bytes | None, *, dry_run: bool = False) -> list[Removal]:
        """Take the triggers and tables of Headrace out of the database."""
        return [
            Removal(f"{kind.lower()} {name}", f"DROP {kind} {quoted(name)};")
            for kind, name in take_out(self.path, dry_run=dry_run)
        ]
