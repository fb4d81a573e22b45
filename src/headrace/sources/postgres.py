"""PostgreSQL by logical replication: pgoutput, our own publication and slot.

    connect -> verify who the server is -> copy tables at an exact point of the stream -> stream

A copy always happens at a point: a snapshot exported together with an LSN. The stream is followed
up to that LSN, the rows are read under that snapshot, and the stream goes on. The first copy of a
database, a copy taken up after a crash, a table that appears later and a table copied again are
all this one case.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ..errors import SourceError
from ..event import Batch, BeforeKind, Change, Op, PostgresPosition, Transaction, format_lsn
from ..secret import Secret
from . import CopyProgress, Finding, Phase, Register, Status, _pgcheck, _pgddl, _pgslot
from ._pgcatalog import Catalog, Published, Server
from ._pgconnection import Replication, connect, connect_replication
from ._pgcopy import Copied, Copier, Point, Task, ranges
from ._pgreceive import Received, Receiver
from ._pgresume import Copy, Range, Restart, Resume, copied_again, decode
from ._pgrows import Rows
from ._pgtransactions import Assembler, schema

_WATCH_SECONDS = 10.0  # between two looks for new tables
_LONGEST_STATUS = 10.0  # seconds between two words to the server


@dataclass(frozen=True, slots=True, kw_only=True)
class Postgres:
    """A PostgreSQL database, 15 or later, with wal_level = logical."""

    name: str
    url: Secret
    tables: tuple[str, ...] = ("public.*",)
    slot: str = ""  # "": headrace_<name>
    publication: str = ""  # "": headrace_<name>
    ddl: bool = False  # whether to install the event trigger that tells DDL
    snapshot: bool = True  # whether to copy the rows that are there already
    copy_workers: int = 2
    heartbeat_seconds: float = 60.0

    def open(self, resume: bytes | None, register: Register) -> PostgresStream:
        """Connect, make sure that the server is the one we know, and go on after `resume`."""
        return PostgresStream(self, resume, register)

    def copy_again(self, resume: bytes | None, tables: Sequence[str]) -> bytes | None:
        """A resume that copies these tables anew; no tables: all, with a new slot."""
        if resume is None:
            return None
        known = decode(resume)
        paths = {table if "." in table else f"public.{table}" for table in tables}
        copies = known.tables if isinstance(known, Restart) else tuple(known.copies)
        unknown = paths - set(copies)
        if unknown:
            raise SourceError(
                f"source {self.name} has no table {', '.join(sorted(unknown))}",
                hint=f"It captures: {', '.join(sorted(copies))}.",
            )
        return copied_again(known, paths).encode()

    def check(self) -> list[Finding]:
        """Look at everything that capturing needs on the server."""
        return _pgcheck.check(self)

    @property
    def slot_name(self) -> str:
        """The slot's name on the server."""
        return self.slot or f"headrace_{self.name}"

    @property
    def publication_name(self) -> str:
        """The publication's name on the server."""
        return self.publication or f"headrace_{self.name}"

    @property
    def application(self) -> str:
        """What pg_stat_activity shows."""
        return f"headrace {self.name}"


class PostgresStream:
    """An open PostgreSQL source."""

    def __init__(self, source: Postgres, resume: bytes | None, register: Register) -> None:
        self._source = source
        self._register = register
        self._stored = None if resume is None else decode(resume)
        self._phase = Phase.STARTING
        self._resume: Resume | None = None
        self._receiver: Receiver | None = None
        self._copier: Copier | None = None
        self._catalog: Catalog | None = None
        self._replication: Replication | None = None
        self._closed = False
        self._stored_at = 0
        self._commit_time = 0
        self._watched = self._beat = time.monotonic()
        self._beat_position = 0

    def __iter__(self) -> Iterator[Batch]:
        try:
            yield from self._flow()
        finally:
            self._release()

    def ack(self, resume: bytes) -> None:
        """Everything up to `resume` is durable: the server may forget it."""
        self._stored_at = time.time_ns() // 1000
        stored = self._resume
        if self._receiver is not None and stored is not None:
            self._receiver.ack(stored.position)

    def status(self) -> Status:
        """How it is doing; may be called from any thread."""
        resume, receiver = self._resume, self._receiver
        if resume is None:
            return Status(source=self._source.name, phase=self._phase)
        wal_end = receiver.wal_end if receiver else 0
        lag = max(wal_end - resume.position, 0)
        behind = time.time() - self._commit_time / 1e6 if lag and self._commit_time else 0.0
        return Status(
            source=self._source.name,
            phase=self._phase,
            position=format_lsn(resume.position),
            lag_bytes=lag,
            lag_seconds=max(behind, 0.0),
            heard_at=receiver.heard_at if receiver else self._stored_at,
            stored_at=self._stored_at,
            copies=_progress(resume),
            errored=resume.errored,
        )

    def close(self) -> None:
        """End the iteration; may be called from any thread."""
        self._closed = True
        if self._copier is not None:
            self._copier.close()
        if self._receiver is not None:
            self._receiver.close()

    def _release(self) -> None:
        self.close()
        if self._catalog is not None:
            self._catalog.close()
        if self._replication is not None and self._receiver is None:
            self._replication.close()

    def _flow(self) -> Iterator[Batch]:
        point = self._begin()
        yield self._batch([])
        if self._to_copy():
            yield from self._copy_at(point)
        self._phase = Phase.STREAMING
        receiver = self._receiving()
        while not self._closed:
            received = receiver.take(timeout=0.5)
            if received is not None:
                yield self._received(received)
                if received.position is None:
                    continue
            self._heartbeat(receiver)
            if self._new_tables():
                yield from self._copy_at(None)
                self._phase = Phase.STREAMING

    # -- beginning ------------------------------------------------------------------------------

    def _begin(self) -> Point | None:
        """Connect and settle where to go on; the point of a slot that was created just now."""
        source = self._source
        url, application = source.url.reveal(), source.application
        connection = connect(url, application=application)
        probe = self._catalog = Catalog(connection, source=source.name, origin="")
        server = probe.server()
        self._catalog = Catalog(connection, source=source.name, origin=_origin(server))
        stored = self._stored
        if isinstance(stored, Resume):
            _pgslot.verify(stored, server, self._catalog)
        tables = _pgslot.publish(
            self._catalog, source.publication_name, source.tables, server.version
        )
        if source.ddl:
            _pgddl.install(self._catalog)
        self._replication = connect_replication(url, application=application)
        if isinstance(stored, Resume):
            self._resume = self._with_tables(stored, tables)
            return None
        return self._first(server, tables)

    def _first(self, server: Server, tables: list[Published]) -> Point | None:
        """No position yet: create the slot, or adopt one that somebody has made for us."""
        assert self._catalog is not None and self._replication is not None
        slot_name = self._source.slot_name
        if isinstance(self._stored, Restart):
            _pgslot.drop_slot(self._catalog, slot_name)
        slot = self._catalog.slot(slot_name)
        point = None
        if slot is None:
            point = _pgslot.create_slot(self._replication, slot_name)
        position = point.lsn if point else slot.confirmed if slot else 0
        resume = Resume(
            server.system,
            server.timeline,
            server.database,
            slot_name,
            point.lsn if point else 0,
            position,
            server.next_xid,
            {},
            {},
            {},
        )
        self._resume = self._with_tables(resume, tables)
        return point

    def _with_tables(self, resume: Resume, tables: list[Published]) -> Resume:
        """Add tables that are not known yet; forget copies of tables that were replaced."""
        before = self._stored.tables if isinstance(self._stored, Restart) else ()
        copies = dict(resume.copies)
        for table in tables:
            known = copies.get(table.path)
            if known is None or known.relation != table.oid:
                again = known is not None or table.path in before
                fresh = Copy(table.oid, again=again)
                copies[table.path] = fresh if self._source.snapshot else _nothing_to_copy(fresh)
        return msgspec.structs.replace(resume, copies=copies)

    def _receiving(self, boundary: int | None = None) -> Receiver:
        """The receiver, started if it is not running yet."""
        if self._receiver is not None:
            return self._receiver
        assert self._catalog is not None and self._replication is not None
        resume = self._current()
        timeout = self._catalog.rows(
            "SELECT setting::float / 1000 FROM pg_settings WHERE name = 'wal_sender_timeout'"
        )[0][0]
        own = Catalog(
            connect(self._source.url.reveal(), application=self._source.application),
            source=self._source.name,
            origin=_origin_of(resume),
        )
        assembler = Assembler(own, self._register, after=resume.position, xid=resume.xid)
        assembler.renew(_live(resume), resume.errored, resume.versions)
        self._replication.start(
            resume.slot,
            resume.position,
            [
                ("proto_version", "1"),
                ("publication_names", f'"{self._source.publication_name}"'),
                ("messages", "true"),
            ],
        )
        seconds = min(_LONGEST_STATUS, timeout / 3) if timeout else _LONGEST_STATUS
        receiver = Receiver(self._replication, assembler, status_seconds=seconds)
        self._receiver = receiver
        receiver.start(boundary=boundary)
        if self._closed:
            receiver.close()
        return receiver

    # -- streaming ------------------------------------------------------------------------------

    def _received(self, received: Received) -> Batch:
        if received.changes:
            self._commit_time = received.changes[-1].transaction.commit_time
        if received.position is None:
            return Batch(received.changes, None)
        assert self._receiver is not None
        assembler = self._receiver.assembler
        self._resume = msgspec.structs.replace(
            self._current(),
            position=received.position,
            xid=received.xid,
            errored=dict(assembler.errored),
            versions=dict(assembler.versions),
        )
        return self._batch(received.changes)

    def _batch(self, changes: list[Change]) -> Batch:
        return Batch(changes, self._current().encode())

    def _current(self) -> Resume:
        assert self._resume is not None
        return self._resume

    def _heartbeat(self, receiver: Receiver) -> None:
        """Write a word into an otherwise idle stream, so that the slot can move."""
        position = self._current().position
        now = time.monotonic()
        if now - self._beat < self._source.heartbeat_seconds:
            return
        self._beat = now
        if receiver.wal_end > position == self._beat_position and self._catalog is not None:
            self._catalog.rows("SELECT pg_logical_emit_message(true, 'headrace.heartbeat', '')")
        self._beat_position = position

    def _new_tables(self) -> bool:
        """Whether tables have appeared that have to be copied."""
        now = time.monotonic()
        if now - self._watched < _WATCH_SECONDS or self._catalog is None or self._closed:
            return False
        self._watched = now
        source = self._source
        tables = _pgslot.publish(self._catalog, source.publication_name, source.tables, 0)
        self._resume = self._with_tables(self._current(), tables)
        return bool(self._to_copy())

    # -- copying --------------------------------------------------------------------------------

    def _to_copy(self) -> dict[str, Copy]:
        return {path: copy for path, copy in self._current().copies.items() if not copy.done}

    def _copy_at(self, point: Point | None) -> Iterator[Batch]:
        """Follow the stream to a point, and copy there what is not copied yet."""
        self._phase = Phase.SNAPSHOT
        holder = None
        try:
            if point is None:
                url, application = self._source.url.reveal(), self._source.application
                holder = connect_replication(url, application=application)
                point = _pgslot.create_point(holder, self._source.slot_name)
                yield from self._follow_to(point.lsn)
            if not self._closed:
                yield from self._copy(point)
        finally:
            if holder is not None:
                holder.close()
        if self._receiver is not None and not self._closed:
            resume = self._current()
            self._receiver.renew(_live(resume), resume.errored, resume.versions)

    def _follow_to(self, lsn: int) -> Iterator[Batch]:
        if self._receiver is None:
            receiver = self._receiving(boundary=lsn)
        else:
            receiver = self._receiver
            receiver.set_boundary(lsn)
        while not self._closed and not receiver.reach_boundary():
            received = receiver.take(timeout=0.5)
            if received is not None:
                yield self._received(received)

    def _copy(self, point: Point) -> Iterator[Batch]:
        source = self._source
        copier = self._copier = Copier(
            source.url.reveal(),
            point,
            application=source.application,
            workers=source.copy_workers,
        )
        catalog = self._snapshot_catalog(point)
        try:
            tasks: list[Task] = []
            for path in self._to_copy():
                announced, more = self._plan(path, catalog, point)
                tasks += more
                yield self._batch(announced)
            for copied in copier.copy(tasks) if tasks else ():
                yield self._copied(copied)
        finally:
            catalog.close()

    def _snapshot_catalog(self, point: Point) -> Catalog:
        """The catalogs as they were at the point: a table may have changed since."""
        connection = connect(self._source.url.reveal(), application=self._source.application)
        catalog = Catalog(connection, source=self._source.name, origin=_origin_of(self._current()))
        catalog.share(point.snapshot)
        return catalog

    def _plan(self, path: str, catalog: Catalog, point: Point) -> tuple[list[Change], list[Task]]:
        """What has to be read of a table, and the changes that say it begins."""
        copy = self._current().copies[path]
        found = {t.path: t for t in catalog.published(self._source.publication_name)}
        table = found.get(path)
        if table is None or table.oid != copy.relation:
            # It was dropped or replaced between the look and the snapshot; the next look sees it.
            self._keep(path, msgspec.structs.replace(copy, ranges=()))
            return [], []
        decoder = catalog.describe(table)
        registered = self._register(decoder.table)
        decoder = decoder.of(registered)
        parts = catalog.parts(table.oid)
        filenodes = tuple(part.filenode for part in parts)
        taken_up = copy.ranges is not None and copy.filenodes == filenodes
        announced = self._announce(path, copy, decoder, point, taken_up)
        if taken_up:
            assert copy.ranges is not None
            moved = [
                Task(
                    table,
                    decoder,
                    Range(p.relation, "(0,0)", None),
                    copy.since,
                    _of(copy, p.relation),
                )
                for p in parts
            ]
            return announced, moved + [Task(table, decoder, part) for part in copy.ranges]
        whole = [each for part in parts for each in ranges(part.relation, part.blocks)]
        estimate = sum(part.estimated_rows for part in parts)
        begun = Copy(
            table.oid,
            tuple(whole) if decoder.table.columns else (),
            0,
            estimate if all(part.estimated_rows >= 0 for part in parts) else -1,
            catalog.oldest_unseen(),
            filenodes,
        )
        self._keep(path, begun)
        return announced, [Task(table, decoder, part) for part in begun.ranges or ()]

    def _announce(
        self, path: str, copy: Copy, decoder: Rows, point: Point, taken_up: bool
    ) -> list[Change]:
        """Say the table's columns, and forget its rows where they are copied anew."""
        now = time.time_ns() // 1000
        transaction = Transaction(f"snapshot-{format_lsn(point.lsn)}-{path}", now, now)
        position = PostgresPosition(point.lsn, point.lsn)
        told: list[tuple[Op, object]] = []
        resume = self._current()
        if resume.versions.get(path) != decoder.table.version:
            versions = resume.versions | {path: decoder.table.version}
            self._resume = msgspec.structs.replace(resume, versions=versions)
            told.append((Op.SCHEMA, schema(decoder.table)))
        if copy.again or (copy.ranges is not None and not taken_up):
            told.append((Op.TRUNCATE, {"snapshot": True}))
        changes = []
        for ordinal, (op, said) in enumerate(told, 1):
            content = msgspec.json.encode(said)
            last = ordinal == len(told)
            change = Change(
                op, decoder.table, None, None, BeforeKind.NONE, content, None, (),
                transaction, ordinal, position, last,
            )  # fmt: skip
            changes.append(change)
        return changes

    def _copied(self, copied: Copied) -> Batch:
        path = copied.task.table.path
        copy = self._current().copies[path]
        left = copy.ranges or ()
        if not copied.task.since:
            left = _without(left, copied.task.range)
            if copied.left is not None:
                left = (*left, copied.left)
        rows = copy.rows + len(copied.changes)
        self._keep(path, msgspec.structs.replace(copy, ranges=left, rows=rows))
        if copied.error:
            resume = self._current()
            errored = resume.errored | {path: copied.error}
            self._resume = msgspec.structs.replace(resume, errored=errored)
        return self._batch(copied.changes)

    def _keep(self, path: str, copy: Copy) -> None:
        resume = self._current()
        copies = resume.copies | {path: copy}
        self._resume = msgspec.structs.replace(resume, copies=copies)


def _without(left: tuple[Range, ...], done: Range) -> tuple[Range, ...]:
    return tuple(r for r in left if (r.relation, r.end) != (done.relation, done.end))


def _of(copy: Copy, relation: str) -> tuple[Range, ...]:
    return tuple(part for part in copy.ranges or () if part.relation == relation)


def _nothing_to_copy(copy: Copy) -> Copy:
    return msgspec.structs.replace(copy, ranges=())


def _live(resume: Resume) -> dict[int, str]:
    """Tables whose changes count: before its copy begins, a table's changes are in the copy."""
    return {copy.relation: path for path, copy in resume.copies.items() if copy.ranges is not None}


def _origin(server: Server) -> str:
    return f"postgres:{server.system}:{server.database}"


def _origin_of(resume: Resume) -> str:
    return f"postgres:{resume.system}:{resume.database}"


def _progress(resume: Resume) -> tuple[CopyProgress, ...]:
    return tuple(
        CopyProgress(path, copy.rows, copy.estimated_rows, copy.done)
        for path, copy in resume.copies.items()
    )


plugin = Postgres
