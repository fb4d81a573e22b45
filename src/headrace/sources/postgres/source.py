"""The source of type `postgres`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from typing import ClassVar

from ...change.connector import Connector
from ...change.event import Table
from .. import Finding, Register, Removal, Status
from ..resume import decode, described, snapshots_again
from . import check, remove
from .catalog import Catalog
from .connector import POSTGRES
from .point import WalPoint, wal_point
from .resume import PostgresResume, paths_of
from .retained import WalLook
from .settings import PostgresSettings
from .stream import PostgresStream


class Postgres(PostgresSettings):
    """A PostgreSQL database, 15 or later, with wal_level = logical."""

    __slots__ = ()
    connector: ClassVar[Connector] = POSTGRES

    def open(self, resume: bytes | None, register: Register) -> PostgresStream:
        """Go on after `resume`; connects when the stream is first read."""
        stored = None if resume is None else decode(resume, PostgresResume)
        return PostgresStream(self, stored, register)

    def copy_again(self, resume: bytes | None, tables: Sequence[str]) -> bytes | None:
        """A resume with new snapshots of these tables; no tables: of all, from a new start."""
        if resume is None:
            return None
        return snapshots_again(self.name, decode(resume, PostgresResume), paths_of(tables))

    def describe(self, resume: bytes | None) -> Status:
        """The status behind a stored resume, without asking the database."""
        return described(self.name, resume, PostgresResume)

    def check(self) -> list[Finding]:
        """Look at everything that capturing needs on the server."""
        return check.check(self)

    def look_at_retained(self) -> WalLook:
        """How to look at the WAL that the server keeps for the slot."""
        return WalLook(self)

    def captured_tables(self) -> list[Table]:
        """The tables that would be captured now, as the server's catalogs show them."""
        with closing(Catalog(self.address.connect(), source=self.name)) as catalog:
            return catalog.tables(self.publication_name, self.tables)

    def at_point(
        self, resume: bytes, tables: Sequence[str], register: Register
    ) -> AbstractContextManager[WalPoint]:
        """Captured tables at a place of the write-ahead log."""
        return wal_point(self, resume, tables, register)

    def remove(self, resume: bytes | None, *, dry_run: bool = False) -> list[Removal]:
        """Take everything out of the database that Headrace has put there."""
        known = None if resume is None else decode(resume, PostgresResume)
        slots = {self.slot_name} | ({known.slot} if isinstance(known, PostgresResume) else set())
        with closing(Catalog(self.address.connect(), source=self.name)) as catalog:
            return remove.remove(catalog, self, slots, dry_run=dry_run)
