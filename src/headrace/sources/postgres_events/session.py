"""Connecting: to the right server, with an event table that is still the one the log follows."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from ...errors import PositionLost, SourceRefused, SourceReplaced
from ..postgres.address import Address
from ..postgres.resume import PostgresTableSnapshot
from ..postgres.session import narrowed, with_tables
from ..resume import Restart
from . import install
from .catalog import EventCatalog, Identity, State
from .install import InstalledTriggers
from .resume import EventResume, TransactionSnapshot
from .settings import PostgresEventsSettings


@dataclass(frozen=True, slots=True)
class EventSession:
    """A connection to a server that has turned out to be the right one."""

    source: PostgresEventsSettings
    address: Address  # for sessions that read rows
    catalog: EventCatalog
    resume: EventResume  # where to go on
    installed: InstalledTriggers

    @classmethod
    def open(
        cls, source: PostgresEventsSettings, stored: EventResume | Restart | None
    ) -> EventSession:
        """Connect, verify the server's identity, and that its tables write their changes."""
        with ExitStack() as stack:
            asking = EventCatalog(
                source.address.connect(), source=source.name, schema=source.schema
            )
            stack.callback(asking.close)
            identity, encoding = asking.identity(), asking.row_encoding()
            _expect_primary(identity)
            if isinstance(stored, EventResume):
                _expect_same_server(stored, identity)
            installed = install.ensure(asking, source)
            if stored is None and not installed.tables:
                for path, why in (installed.refused | installed.waiting).items():
                    raise SourceRefused(f"table {path}: {why}")
            if isinstance(stored, EventResume):
                _expect_same_events(stored, asking)
                guards = stored.guards or asking.state().guards or ""
                stored = msgspec.structs.replace(stored, guards=guards)
                resume = narrowed(stored, source.tables)
            else:
                # Without a snapshot, what is not copied is what was there before the first start.
                copying = source.snapshot or stored is not None
                resume = with_triggers(_begin(identity, asking, stored), installed, copying=copying)
            address = dataclasses.replace(source.address, encoding=encoding)
            catalog = _catalog(source, resume.origin)
            if encoding != source.address.encoding:
                catalog.read_raw(address.connect())
        return cls(source, address, catalog, resume, installed)

    def another_catalog(self) -> EventCatalog:
        """The catalogs over a connection of its own, for another snapshot."""
        return _catalog(self.source, self.resume.origin)


def _catalog(source: PostgresEventsSettings, origin: str) -> EventCatalog:
    connection = source.address.connect()
    return EventCatalog(connection, source=source.name, schema=source.schema, origin=origin)


def with_triggers(
    resume: EventResume, installed: InstalledTriggers, *, copying: bool
) -> EventResume:
    """Add tables that are not known yet, and copy anew those whose triggers are others.

    While a table had no trigger, or one that did not fire, its changes were not captured. Where
    we have replaced those that the log knows, in one transaction, none is missing.
    """
    copies = {
        path: PostgresTableSnapshot(copy.relation, again=True)
        if resume.triggers.get(path, "")
        not in (installed.triggers.get(path, ""), installed.renewed.get(path))
        and copy.ranges is not None
        else copy
        for path, copy in resume.snapshots.items()
        if path in installed.triggers
    }
    gone = tuple(path for path in resume.snapshots if path not in installed.triggers)
    resume = msgspec.structs.replace(
        resume, snapshots=copies, triggers=installed.triggers, former=(*resume.former, *gone)
    )
    return with_tables(resume, installed.tables, copying=copying)


def _begin(identity: Identity, catalog: EventCatalog, stored: Restart | None) -> EventResume:
    state = catalog.state()
    seen, lsn = catalog.snapshot()
    return EventResume(
        system=identity.system,
        timeline=_expect_primary(identity),
        database=identity.database,
        installation=state.installation,
        guards=state.guards or "",
        seen=seen,
        lsn=lsn,
        snapshots={},
        errored={},
        versions={},
        triggers={},
        former=stored.tables if stored else (),
    )


def _expect_primary(found: Identity) -> int:
    if found.timeline is None:
        raise SourceRefused(
            "the server is a standby",
            hint="Let the url name the primary: triggers fire only there.",
        )
    return found.timeline


def _expect_same_server(resume: EventResume, found: Identity) -> None:
    if (resume.system, resume.database) != (found.system, found.database):
        raise SourceReplaced(
            f"this is server {found.system} database {found.database!r}, but the log follows "
            f"server {resume.system} database {resume.database!r}"
        )
    if found.timeline != resume.timeline:
        raise SourceReplaced(
            f"the server is on timeline {found.timeline}, the log follows timeline "
            f"{resume.timeline}: it was restored or a standby was promoted"
        )


def _expect_same_events(resume: EventResume, catalog: EventCatalog) -> None:
    """Halt unless everything that the log has not seen is still in this very event table."""
    expect_kept(resume, catalog.state())
    if catalog.next_xid() < TransactionSnapshot.of(resume.seen).after:
        raise SourceReplaced("the server stands before the log's position: it was restored")


def expect_kept(resume: EventResume, state: State) -> None:
    """The same, of what the event table says of itself."""
    if state.installation != resume.installation:
        raise PositionLost("the event table was removed and installed anew")
    if resume.guards and state.guards != resume.guards:
        raise PositionLost(
            "the event table's own triggers were disabled, dropped or changed: events may have "
            "been removed that nobody has noticed"
        )
    if state.trimmed > TransactionSnapshot.of(resume.seen).oldest:
        raise PositionLost(
            f"events of transactions below {state.trimmed} were removed, but the log has only "
            f"those that snapshot {resume.seen} sees: somebody else reads this event table"
        )
