"""The source of type `postgres_events`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from typing import ClassVar

from ...change.connector import Connector
from ...change.event import Table
from .. import Finding, Register, Removal, Status
from ..postgres.connector import POSTGRES
from ..postgres.resume import paths_of
from ..resume import decode, described, snapshots_again
from . import check, install
from .catalog import EventCatalog
from .point import SeenPoint, seen_point
from .resume import EventResume
from .settings import PostgresEventsSettings
from .stream import EventStream


class PostgresEvents(PostgresEventsSettings):
    """A PostgreSQL database, 15 or later, whatever its wal_level."""

    __slots__ = ()
    connector: ClassVar[Connector] = POSTGRES

    def open(self, resume: bytes | None, register: Register) -> EventStream:
        """Go on after `resume`; connects when the stream is first read."""
        stored = None if resume is None else decode(resume, EventResume)
        return EventStream(self, stored, register)

    def copy_again(self, resume: bytes | None, tables: Sequence[str]) -> bytes | None:
        """A resume with new snapshots of these tables; no tables: of all, from a new start."""
        if resume is None:
            return None
        return snapshots_again(self.name, decode(resume, EventResume), paths_of(tables))

    def describe(self, resume: bytes | None) -> Status:
        """The status behind a stored resume, without asking the database."""
        return described(self.name, resume, EventResume)

    def check(self) -> list[Finding]:
        """Look at everything that capturing needs on the server."""
        return check.check(self)

    def captured_tables(self) -> list[Table]:
        """The tables that would be captured now, as the server's catalogs show them."""
        with closing(self.catalog()) as catalog:
            return catalog.tables("", self.tables)

    def at_point(
        self, resume: bytes, tables: Sequence[str], register: Register
    ) -> AbstractContextManager[SeenPoint]:
        """Captured tables as a snapshot of the server shows them."""
        return seen_point(self, resume, tables, register)

    def remove(self, resume: bytes | None, *, dry_run: bool = False) -> list[Removal]:
        """Take the event table, its functions and its triggers out of the database."""
        with closing(self.catalog()) as catalog:
            if catalog.edition() is None:
                return []
            found = Removal(f"event table {self.schema}", install.removal(catalog, self.schema))
            if not dry_run:
                install.uninstall(catalog, self.schema)
            return [found]

    def catalog(self) -> EventCatalog:
        """The server's catalogs and event table, over a connection of their own."""
        connection = self.address.connect()
        return EventCatalog(connection, source=self.name, schema=self.schema)
