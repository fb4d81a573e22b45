"""MySQL and MariaDB by their binary log, in ROW format.

    connect -> make sure who the server is -> copy tables at a point of the stream -> stream

`_mystream` is that flow. Around it: `_mysession` (identity, and what is still there), `_mydump`
(the socket), `_mytransactions`, `_mytables` and `_myddl` (events -> changes), `_binlog`, `_mygtid`,
`_mycolumns`, `_myrows` and `_myvalues` (bytes -> events and images), `_mycopy` (copying),
`_myresume` (what the log remembers), `_mycatalog`, `_mycheck`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from ..errors import TableUnknown
from ..event import Table
from . import Finding, Phase, Register, Status, _mycheck
from ._mycatalog import Catalog
from ._myresume import Restart, Resume, copied_again, decode
from ._mysettings import MysqlSettings
from ._mystream import MysqlStream


class Mysql(MysqlSettings):
    """A MySQL server, 8.0 or later, or a MariaDB server, 10.5 or later, with binlog_format ROW."""

    __slots__ = ()

    def open(self, resume: bytes | None, register: Register) -> MysqlStream:
        """Go on after `resume`; connects when the stream is first read."""
        return MysqlStream(self, None if resume is None else decode(resume), register)

    def copy_again(self, resume: bytes | None, tables: Sequence[str]) -> bytes | None:
        """A resume that copies these tables anew; no tables: all, from a new start."""
        if resume is None:
            return None
        known = decode(resume)
        paths = {table if "." in table else f"{self.database}.{table}" for table in tables}
        copies = known.tables if isinstance(known, Restart) else tuple(known.copies)
        unknown = paths - set(copies)
        if unknown:
            raise TableUnknown(
                f"source {self.name} has no table {', '.join(sorted(unknown))}",
                hint=f"It captures: {', '.join(sorted(copies))}.",
            )
        return copied_again(known, paths).encode()

    def describe(self, resume: bytes | None) -> Status:
        """What a stored resume tells, without asking the server."""
        known = None if resume is None else decode(resume)
        if isinstance(known, Resume):
            return known.status(self.name, Phase.STOPPED)
        return Status(source=self.name, phase=Phase.STOPPED)

    def check(self) -> list[Finding]:
        """Look at everything that capturing needs on the server."""
        return _mycheck.check(self)

    def captured_tables(self) -> list[Table]:
        """The tables that would be captured now, as the server's catalogue shows them."""
        with closing(Catalog(self.address.connect(), source=self.name)) as catalog:
            found = catalog.candidates(self.wants)
            declared = [(table, catalog.declared(table.schema, table.name)) for table in found]
            return [
                catalog.table(table.schema, table.name, each)
                for table, each in declared
                if each is not None
            ]


plugin = Mysql
