"""The slot: create it, and make sure that it is still ours."""

from __future__ import annotations

import secrets
import time

from ...change.lsn import format_lsn, parse_lsn
from ...errors import PositionLost, SourceError, SourceReplaced
from .catalog import Catalog
from .replication import Replication, Server
from .resume import PostgresResume
from .snapshot import Point

_READ = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active"
_LOOK_SECONDS = 0.01


def create_slot(replication: Replication, slot: str) -> Point:
    """Create the slot; its snapshot lives until the next command of this session."""
    return _create(replication, f'"{slot}"')


def temporary_name(slot: str) -> str:
    """A name for a slot beside another one."""
    # A name has 63 characters at most, and must not be cut down to that of the slot itself.
    return f"{slot[:40]}_copy_{secrets.token_hex(4)}"


def create_point(replication: Replication, name: str) -> Point:
    """A snapshot and its exact place in the stream, by way of a slot that dies with the session."""
    return _create(replication, f'"{name}" TEMPORARY')


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


def await_free(catalog: Catalog, slot: str, *, seconds: float) -> None:
    """Wait until the server has noticed that nobody reads the slot any more."""
    end = time.monotonic() + seconds
    while catalog.rows(_READ, slot) and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)


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
