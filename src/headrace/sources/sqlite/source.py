"""The source of type `sqlite`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import ClassVar

from ...change.connector import Connector
from ...change.event import Table
from ...errors import ConfigError, TableUnknown

try:  # before any part is imported that needs it
    import apsw as _apsw  # noqa: F401
except ImportError as error:
    raise ConfigError(
        "a source of type sqlite needs apsw", hint="Run: pip install 'headrace[sqlite]'"
    ) from error

from .. import Finding, Phase, Register, Status
from . import check
from .connections import connect, told
from .connector import SQLITE
from .installation import Installed
from .resume import Restart, Resume, copied_again, decode
from .schema import path_of, shapes
from .session import table_of
from .settings import SqliteSettings
from .stream import SqliteStream


class Sqlite(SqliteSettings):
    """A SQLite database, with Headrace's triggers in it."""

    __slots__ = ()
    connector: ClassVar[Connector] = SQLITE

    def open(self, resume: bytes | None, register: Register) -> SqliteStream:
        """Go on after `resume`; opens the file when the stream is first read."""
        return SqliteStream(self, None if resume is None else decode(resume), register)

    def copy_again(self, resume: bytes | None, tables: Sequence[str]) -> bytes | None:
        """A resume that copies these tables anew; no tables: all, from a new start."""
        if resume is None:
            return None
        known = decode(resume)
        paths = {table if "." in table else path_of(table) for table in tables}
        copies = known.tables if isinstance(known, Restart) else tuple(known.copies)
        unknown = paths - set(copies)
        if unknown:
            raise TableUnknown(
                f"source {self.name} has no table {', '.join(sorted(unknown))}",
                hint=f"It captures: {', '.join(sorted(copies))}.",
            )
        return copied_again(known, paths).encode()

    def describe(self, resume: bytes | None) -> Status:
        """What a stored resume tells, without opening the database."""
        known = None if resume is None else decode(resume)
        if isinstance(known, Resume):
            return known.status(self.name, Phase.STOPPED)
        return Status(source=self.name, phase=Phase.STOPPED)

    def check(self) -> list[Finding]:
        """Look at everything that capturing needs."""
        return check.check(self)

    def captured_tables(self) -> list[Table]:
        """The tables that would be captured now."""
        with told(self.path), closing(connect(self.path)) as connection:
            found = shapes(connection, self.tables)
        return [table_of(self, Installed(0, 0, shape.layout), "") for shape in found]
