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
from .following import with_leaving
from .guard import IdentityGuard
from .lookout import present_paths
from .membership import UNPUBLISHED
from .publications import Publications, PublishedTables
from .replication import Replication, Server
from .resume import LastCommit, PostgresResume, PostgresTableSnapshot, PostgresTablesResume
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
            catalog = Catalog(
                source.address.connect(), source=source.name, publication=source.publication_name
            )
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
            resume = resume.repathed(_former_paths(resume, published.tables))
            paths = present_paths(catalog, [copy.relation for copy in resume.snapshots.values()])
            resume = with_leaving(resume, published.tables, paths)
            resume = with_tables(resume, published.tables, copying=copying)
            if stored is None:
                published.added.clear()  # nothing was captured before, so nothing is missing
            resume = with_inserts(resume, published, watched=False)
            stack.pop_all()
        return cls(
            source, address, catalog, replication, resume, point, publications, published, guard
        )

    def another_catalog(self) -> Catalog:
        """The catalogs over a connection of its own, for another thread or another snapshot."""
        connection = self.source.address.connect()
        return Catalog(
            connection,
            source=self.source.name,
            origin=self.resume.origin,
            publication=self.source.publication_name,
        )


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
        # A slot that somebody else has made may be older than the publications.
        last_commit=LastCommit(0, 0, 0) if point else None,
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


def with_inserts(
    resume: PostgresResume, published: PublishedTables, *, watched: bool = True
) -> PostgresResume:
    """Note which tables are captured for inserts only, and where new snapshots are needed.

    Changes are missing of a table that is captured as a whole again, of one that somebody had taken
    out of its publication or published in another way, and of one in a publication that the stream
    does not name yet. `watched`: somebody has looked a second ago.
    """
    only = published.inserts_only
    whole = {table.path for table in published.tables} - only.keys()
    missing = (
        whole & resume.inserts_only.keys() | published.added | _edited(resume, published, watched)
    )
    if resume.inserts != published.inserts:
        missing |= only.keys()
    begun = {path for path, snapshot in resume.snapshots.items() if snapshot.ranges is not None}
    before = {path: fix for path, fix in resume.inserts_only.items() if path not in whole}
    resume = _marked(resume.anew(missing & begun), published)
    return msgspec.structs.replace(resume, inserts_only=before | only)


def _edited(resume: PostgresResume, published: PublishedTables, watched: bool) -> set[str]:
    """Tables that were not published all the time, or not as they are now."""
    # What loses its identity is moved to the second publication, in one transaction. Where nobody
    # has looked, it may have been in none before that.
    moved = published.inserts_only.keys() - resume.inserts_only.keys() if watched else ()
    return {
        path
        for path, snapshot in resume.snapshots.items()
        if (known := snapshot.published)
        and published.marks.get(path, known) != known
        and (path not in moved or known == UNPUBLISHED)
    }


def _marked(resume: PostgresResume, published: PublishedTables) -> PostgresResume:
    """Note how each table is published now."""
    snapshots = {
        path: msgspec.structs.replace(
            snapshot,
            published=published.marks.get(path, snapshot.published and UNPUBLISHED),
        )
        for path, snapshot in resume.snapshots.items()
    }
    return msgspec.structs.replace(resume, snapshots=snapshots)


def with_tables(resume: R, tables: Sequence[Published], *, copying: bool) -> R:
    """Add tables that are not known yet; forget copies of tables replaced or renamed."""
    resume = resume.repathed(_former_paths(resume, tables))
    copies = dict(resume.snapshots)
    named = {copy.relation: path for path, copy in copies.items()}
    former, present = list(resume.former), {table.oid for table in tables}
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
        replaced = known.announced if known and known.announced not in present else 0
        copies[table.path] = PostgresTableSnapshot(
            table.oid, None if copying else (), again=again, replaced=replaced
        )
    former = [path for path in former if path not in copies]
    return msgspec.structs.replace(resume, snapshots=copies, former=tuple(former))


def _former_paths(resume: PostgresTablesResume, tables: Sequence[Published]) -> dict[str, str]:
    """Paths without the quotes that they have now, by the oids of their tables."""
    known = {copy.relation: path for path, copy in resume.snapshots.items()}
    return {
        plain: table.path
        for table in tables
        if table.path != (plain := f"{table.schema}.{table.name}") == known.get(table.oid)
    }
