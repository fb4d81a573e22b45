"""Publication and slot: create them, adopt them, and make sure that they are still ours."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psycopg import sql

from ...change.lsn import format_lsn, parse_lsn
from ...errors import PositionLost, SourceError, SourceRefused, SourceReplaced
from .catalog import Catalog, Published, matches
from .replication import Replication, Server
from .resume import PostgresResume
from .snapshot import Point

_GENERATED_COLUMNS = 180000  # the first version that can publish them


@dataclass(frozen=True, slots=True)
class Publication:
    """What of the wanted tables is published, and why others are not."""

    tables: list[Published]
    refused: dict[str, str]  # schema.table -> reason


def publish(
    catalog: Catalog, publication: str, globs: Sequence[str], *, refused: Mapping[str, str] = {}
) -> Publication:
    """The tables to capture, after adding those the publication lacks.

    A table that was `refused` before is not tried again; it counts once somebody has added it.
    """
    wanted = catalog.candidates(globs)
    pub = sql.Identifier(publication)
    if not catalog.rows("SELECT 1 FROM pg_publication WHERE pubname = %s", publication):
        options = "publish_via_partition_root = true"
        if catalog.version() >= _GENERATED_COLUMNS:
            options += ", publish_generated_columns = stored"
        # Without any table it is empty, and gets each as it appears.
        members = sql.SQL("FOR {}").format(_only(wanted)) if wanted else sql.SQL("")
        statement = sql.SQL("CREATE PUBLICATION {} {} WITH ({})")
        catalog.run(statement.format(pub, members, sql.SQL(options)))
    _expect_everything(catalog, publication)
    present = {(table.schema, table.name) for table in catalog.published(publication)}
    missing = [table for table in wanted if table not in present]
    if missing:
        _expect_roots(catalog, publication)
    reasons = {}
    for schema, name in missing:
        path = f"{schema}.{name}"
        why = refused.get(path) or _add(catalog, publication, (schema, name))
        if why:
            reasons[path] = why
    tables = [table for table in catalog.published(publication) if matches(table.path, globs)]
    return Publication(tables, reasons)


def _add(catalog: Catalog, publication: str, table: tuple[str, str]) -> str:
    """Add a table to a publication; returns why that was refused."""
    statement = sql.SQL("ALTER PUBLICATION {} ADD {}").format(
        sql.Identifier(publication), _only([table])
    )
    try:
        catalog.run(statement)
    except SourceRefused as error:
        return f"it is not published ({error}); its owner can run: {statement.as_string()};"
    return ""


def _expect_everything(catalog: Catalog, publication: str) -> None:
    """A publication that leaves out an operation would lose changes in silence."""
    if not publishes_everything(catalog, publication):
        raise SourceRefused(
            f"publication {publication} does not publish every operation",
            hint=everything_published(publication),
        )


def publishes_everything(catalog: Catalog, publication: str) -> bool:
    """Whether inserts, updates, deletes and truncates are all sent."""
    query = """SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate
               FROM pg_publication WHERE pubname = %s"""
    return bool(catalog.rows(query, publication)[0][0])


def everything_published(publication: str) -> str:
    """The statement that makes a publication send every operation."""
    name = sql.Identifier(publication).as_string()
    return f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate');"


def _expect_roots(catalog: Catalog, publication: str) -> None:
    """A publication that somebody else made must send partitioned tables as one table."""
    leaves = catalog.rows(
        """SELECT format('%%s.%%s', c.relnamespace::regnamespace, c.relname)
           FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
           JOIN pg_class c ON c.oid = r.prrelid
           WHERE p.pubname = %s AND NOT p.pubviaroot AND c.relkind = 'p'""",
        publication,
    )
    if leaves:
        quoted = sql.Identifier(publication).as_string()
        raise SourceRefused(
            f"publication {publication} sends the partitions of {leaves[0][0]}, not the table",
            hint=f"ALTER PUBLICATION {quoted} SET (publish_via_partition_root = true);",
        )


def create_slot(replication: Replication, slot: str) -> Point:
    """Create the slot; its snapshot lives until the next command of this session."""
    return _create(replication, f'"{slot}"')


def create_point(replication: Replication, slot: str) -> Point:
    """A snapshot and its exact place in the stream, by way of a slot that dies with the session."""
    # A name has 63 characters at most, and must not be cut down to that of the slot itself.
    return _create(replication, f'"{slot[:40]}_copy_{secrets.token_hex(4)}" TEMPORARY')


def verify(resume: PostgresResume, server: Server, catalog: Catalog) -> None:
    """Halt unless everything after our position is still to be had from this very server."""
    if (resume.system, resume.database) != (server.system, server.database):
        raise SourceReplaced(
            f"this is server {server.system} database {server.database!r}, but the log follows "
            f"server {resume.system} database {resume.database!r}"
        )
    if server.timeline != resume.timeline:
        raise SourceReplaced(
            f"the server is on timeline {server.timeline}, the log follows timeline "
            f"{resume.timeline}: it was restored or a standby was promoted"
        )
    if server.wal_lsn < resume.position or catalog.next_xid() < resume.xid:
        raise SourceReplaced(
            f"the server stands at {format_lsn(server.wal_lsn)}, before the log's position "
            f"{format_lsn(resume.position)}: it was restored from an older copy"
        )
    slot = catalog.slot(resume.slot)
    if slot is None:
        raise PositionLost(f"replication slot {resume.slot} does not exist any more")
    if slot.plugin != "pgoutput" or slot.database != server.database:
        raise PositionLost(
            f"replication slot {resume.slot} is now a {slot.plugin} slot of {slot.database!r}"
        )
    if slot.lost:
        raise PositionLost(
            f"replication slot {resume.slot} was invalidated: the server has removed WAL that "
            f"was still needed (max_slot_wal_keep_size)"
        )
    if slot.confirmed > resume.position:
        raise PositionLost(
            f"replication slot {resume.slot} stands at {format_lsn(slot.confirmed)}, beyond the "
            f"log's position {format_lsn(resume.position)}: it was created anew, or read by "
            f"someone else"
        )


def drop_slot(catalog: Catalog, slot: str) -> None:
    """Drop a slot that will not be read again."""
    if catalog.slot(slot) is not None:
        catalog.rows("SELECT pg_drop_replication_slot(%s)", slot)


def _create(replication: Replication, what: str) -> Point:
    rows = replication.command(f"CREATE_REPLICATION_SLOT {what} LOGICAL pgoutput EXPORT_SNAPSHOT")
    _, lsn, snapshot, *_ = rows[0]
    if lsn is None or snapshot is None:
        raise SourceError("the server exported no snapshot with the slot")
    return Point(snapshot, parse_lsn(lsn))


def _only(tables: Sequence[tuple[str, str]]) -> sql.Composed:
    """Tables of a publication, without those that inherit from them."""
    return sql.SQL(", ").join(sql.SQL("TABLE ONLY {}").format(_qualified(t)) for t in tables)


def _qualified(table: tuple[str, str]) -> sql.Composed:
    schema, name = table
    return sql.SQL("{}.{}").format(sql.Identifier(schema), sql.Identifier(name))
