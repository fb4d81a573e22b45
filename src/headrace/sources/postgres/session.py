"""Connecting: to the right server, with a publication, a slot and a place to go on from."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ...errors import PositionLost, SourceRefused, SourceUnavailable
from ..resume import Restart
from . import ddl, slot
from .address import Address
from .catalog import Catalog, Published, matches
from .guard import IdentityGuard
from .publications import Publications, PublishedTables
from .replication import Replication, Server
from .resume import PostgresResume, PostgresTableSnapshot, PostgresTablesResume
from .settings import PostgresSettings
from .snapshot import Point

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=PostgresTablesResume)


@dataclass(frozen=True, slots=True)
class PostgresSession:
    """Connections to a server that has turned out to be the right one."""

    source: PostgresSettings
    address: Address  # for sessions that read rows
    catalog: Catalog
    replication: Replication
    resume: PostgresResume  # where to go on
    point: Point | None  # of a slot that was created just now
    publications: Publications
    published: PublishedTables
    guard: IdentityGuard

    @classmethod
    def open(
        cls,
        source: PostgresSettings,
        stored: PostgresResume | Restart | None,
        closing: threading.Event,
    ) -> PostgresSession:
        """Connect, make sure who the server is, and prepare publication and slot."""
        with ExitStack() as stack:
            catalog = Catalog(source.address.connect(), source=source.name)
            stack.callback(catalog.close)
            address = dataclasses.replace(source.address, encoding=catalog.row_encoding())
            replication = address.replicate(closing)
            stack.callback(replication.close)
            server = replication.identify()
            publications = Publications(catalog, source)
            publications.protect()
            guard = IdentityGuard(source, publications.lock)
            stack.callback(guard.close)
            if isinstance(stored, PostgresResume):
                stored = _verified(source, stored, server, catalog)
            known = stored.inserts_only if isinstance(stored, PostgresResume) else ()
            published = publications.publish(known)
            if stored is None and not published.tables:
                for path, why in published.refused.items():
                    raise SourceRefused(f"table {path}: {why}")
            if source.ddl:
                ddl.install(catalog)
            if isinstance(stored, PostgresResume):
                resume, point = narrowed(stored, source.tables), None
            else:
                resume, point = _begin(source, server, catalog, replication, stored)
            if point is not None:
                # The slot is younger than both publications.
                resume = msgspec.structs.replace(resume, inserts=published.inserts)
            # Without a snapshot, what is not copied is what was there before the first start.
            copying = source.snapshot or stored is not None
            resume = with_tables(resume, published.tables, copying=copying)
            if stored is None:
                published.added.clear()  # nothing was captured before, so nothing is missing
            resume = with_inserts(resume, published)
            stack.pop_all()
        return cls(
            source, address, catalog, replication, resume, point, publications, published, guard
        )

    def another_catalog(self) -> Catalog:
        """The catalogs over a connection of its own, for another thread or another snapshot."""
        connection = self.source.address.connect()
        return Catalog(connection, source=self.source.name, origin=self.resume.origin)


def _verified(
    source: PostgresSettings, stored: PostgresResume, server: Server, catalog: Catalog
) -> PostgresResume | Restart:
    """Go on after the stored position, or from a new start where the slot was given up for room."""
    try:
        slot.verify(stored, server, catalog)
    except PositionLost as error:
        found = catalog.slot(stored.slot)
        if source.max_wal_gb is None or (found is not None and not found.lost):
            raise
        logger.warning("source=%s %s; max_wal_gb is set: it starts anew", source.name, error)
        return Restart(True, (*stored.snapshots, *stored.former))
    return stored


def _begin(
    source: PostgresSettings,
    server: Server,
    catalog: Catalog,
    replication: Replication,
    stored: Restart | None,
) -> tuple[PostgresResume, Point | None]:
    """No position yet: create the slot, or adopt one that somebody has made for us."""
    if stored is not None:
        slot.drop_slot(catalog, source.slot_name)
    found = catalog.slot(source.slot_name)
    if found is not None and not found.confirmed:
        # The server goes on with it even when the process that requested it was killed.
        raise SourceUnavailable(
            f"replication slot {source.slot_name} is being created: the server waits for "
            "transactions that were open before"
        )
    point = None if found else slot.create_slot(replication, source.slot_name)
    resume = PostgresResume(
        system=server.system,
        timeline=server.timeline,
        database=server.database,
        slot=source.slot_name,
        position=point.lsn if point else found.confirmed if found else 0,
        xid=catalog.next_xid(),
        snapshots={},
        errored={},
        versions={},
        former=stored.tables if stored else (),
    )
    return resume, point


def narrowed(resume: R, globs: Sequence[str]) -> R:
    """Let go of tables that the config does not name any more."""
    former = [path for path in resume.snapshots if not matches(path, globs)]
    return msgspec.structs.replace(
        resume,
        snapshots={path: copy for path, copy in resume.snapshots.items() if path not in former},
        errored={path: why for path, why in resume.errored.items() if path not in former},
        former=(*resume.former, *former),
    )


def with_inserts(resume: PostgresResume, published: PublishedTables) -> PostgresResume:
    """Note which tables are captured for inserts only, and where new snapshots are needed.

    Changes are missing of a table that is captured as a whole again, of one that somebody had taken
    out of its publication, and of one in a publication that the stream does not name yet.
    """
    only = published.inserts_only
    whole = {table.path for table in published.tables} - only.keys()
    missing = whole & resume.inserts_only.keys() | published.added
    if resume.inserts != published.inserts:
        missing |= only.keys()
    begun = {path for path, snapshot in resume.snapshots.items() if snapshot.ranges is not None}
    before = {path: fix for path, fix in resume.inserts_only.items() if path not in whole}
    return msgspec.structs.replace(resume.anew(missing & begun), inserts_only=before | only)


def with_tables(resume: R, tables: Sequence[Published], *, copying: bool) -> R:
    """Add tables that are not known yet; forget copies of tables replaced or renamed."""
    copies = dict(resume.snapshots)
    named = {copy.relation: path for path, copy in copies.items()}
    former = list(resume.former)
    for table in tables:
        known = copies.get(table.path)
        if known is not None and known.relation == table.oid:
            continue
        renamed = named.get(table.oid)
        # Another table may have got the old name, and have been met before.
        if renamed is not None and copies[renamed].relation == table.oid:
            # What the stream has already sent under the new name is in the snapshot as well.
            del copies[renamed]
            former.append(renamed)
        again = known is not None or renamed is not None or table.path in former
        copies[table.path] = PostgresTableSnapshot(table.oid, None if copying else (), again=again)
    former = [path for path in former if path not in copies]
    return msgspec.structs.replace(resume, snapshots=copies, former=tuple(former))
