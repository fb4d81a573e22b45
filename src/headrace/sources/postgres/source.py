"""The source of type `postgres`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import ClassVar

from ...change.connector import Connector
from ...change.event import Table
from .. import Finding, Phase, Register, Status
from . import check
from .catalog import Catalog
from .connector import POSTGRES
from .resume import Resume, asked_again, decode
from .settings import PostgresSettings
from .stream import PostgresStream


class Postgres(PostgresSettings):
    """A PostgreSQL database, 15 or later, with wal_level = logical."""

    __slots__ = ()
    connector: ClassVar[Connector] = POSTGRES

    def open(self, resume: bytes | None, register: Register) -> PostgresStream:
        """Go on after `resume`; connects when the stream is first read."""
        return PostgresStream(self, None if resume is None else decode(resume), register)

    def copy_again(self, resume: bytes | None, tables: Sequence[str]) -> bytes | None:
        """A resume that copies these tables anew; no tables: all, with a new slot."""
        if resume is None:
            return None
        return asked_again(self.name, decode(resume), tables)

    def describe(self, resume: bytes | None) -> Status:
        """What a stored resume tells, without asking the server."""
        known = None if resume is None else decode(resume)
        if isinstance(known, Resume):
            return known.status(self.name, Phase.STOPPED)
        return Status(source=self.name, phase=Phase.STOPPED)

    def check(self) -> list[Finding]:
        """Look at everything that capturing needs on the server."""
        return check.check(self)

    def captured_tables(self) -> list[Table]:
        """The tables that would be captured now, as the server's catalogs show them."""
        with closing(Catalog(self.address.connect(), source=self.name)) as catalog:
            return catalog.tables(self.publication_name, self.tables)
