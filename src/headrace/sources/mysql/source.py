"""The source of type `mysql`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from typing import ClassVar

import msgspec

from ...change.connector import Connector
from ...change.event import Table
from ...change.path import qualified
from ...errors import TableUnknown
from .. import Finding, Phase, Register, Removal, Status
from . import check
from .catalog import MysqlCatalog
from .connector import MYSQL
from .follow import collation_warnings, unfollowed
from .point import BinlogPoint, binlog_point
from .resume import MysqlRestart, MysqlResume, decode, snapshot_again
from .settings import MysqlSettings
from .stream import MysqlStream


class Mysql(MysqlSettings):
    """A MySQL server, 8.0 or later, or a MariaDB server, 10.5 or later, with binlog_format ROW."""

    __slots__ = ()
    connector: ClassVar[Connector] = MYSQL

    def open(self, resume: bytes | None, register: Register) -> MysqlStream:
        """Go on after `resume`; connects when the stream is first read."""
        return MysqlStream(self, None if resume is None else decode(resume), register)

    def copy_again(self, resume: bytes | None, tables: Sequence[str]) -> bytes | None:
        """A resume that takes new snapshots of these tables; no tables: all, from a new start."""
        if resume is None:
            return None
        known = decode(resume)
        paths = {qualified(table, self.database) for table in tables}
        snapshots = set(
            map(str, known.tables if isinstance(known, MysqlRestart) else known.snapshots)
        )
        unknown = paths - snapshots
        if unknown:
            raise TableUnknown(
                f"source {self.name} has no table {', '.join(sorted(unknown))}",
                hint=f"It captures: {', '.join(sorted(snapshots))}.",
            )
        return snapshot_again(known, paths).encode()

    def describe(self, resume: bytes | None) -> Status:
        """The status in a stored resume, without a connection to the server."""
        known = None if resume is None else decode(resume)
        if isinstance(known, MysqlResume):
            status = known.status(self.name, Phase.STOPPED)
            warnings = collation_warnings(known)
            return msgspec.structs.replace(status, errored=unfollowed(known), warnings=warnings)
        return Status(source=self.name, phase=Phase.STOPPED)

    def check(self) -> list[Finding]:
        """Look at everything that capturing needs on the server."""
        return check.check(self)

    def captured_tables(self) -> list[Table]:
        """The tables that would be captured now, as the server's catalogue shows them."""
        with closing(MysqlCatalog(self.address.connect(), source=self.name)) as catalog:
            found = catalog.candidates(self.wants)
            declared = [(table, catalog.declared(table.schema, table.name)) for table in found]
            return [
                catalog.table(table.schema, table.name, each.numbered(None))
                for table, each in declared
                if each is not None
            ]

    def at_point(
        self, resume: bytes, tables: Sequence[str], register: Register
    ) -> AbstractContextManager[BinlogPoint]:
        """Captured tables at a place of the binary log."""
        return binlog_point(self, resume, tables, register)

    def remove(self, resume: bytes | None, *, dry_run: bool = False) -> list[Removal]:
        """Nothing: the source only reads."""
        return []
