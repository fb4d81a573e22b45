"""The flow of a source that reads an event table, from connecting to closing.

What comes next is what a snapshot sees and an earlier one does not. A copy happens at such a
snapshot too: events are followed up to it, the rows are read under it, and the events go on. So
copy and events meet exactly, and no transaction is missed, however late it commits.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from itertools import groupby

import msgspec

from ...change.event import Batch, Change
from ...errors import DecodeError, PositionLost
from .. import Phase, Register, Status
from ..pace import RowPace
from ..postgres.plan import Planner, progressed
from ..postgres.snapshot import Copied, PostgresSnapshotReader
from ..postgres.waiters import WaiterWatch, settled, yield_warnings
from ..resume import Restart
from ..stream import FlowStream, nothing_yet
from . import install
from .altered import dropped, gone_tables, look_at_tables
from .catalog import EventPoint, EventPoll, EventTransaction
from .entries import EventAssembler, EventEntry, Leaf
from .install import InstalledTriggers
from .resume import EventResume, TransactionSnapshot, seen_in
from .session import EventSession, expect_kept, with_triggers
from .settings import PostgresEventsSettings

_WATCH_SECONDS = 10.0  # between two looks for new tables
_IDLE_SECONDS = 5.0  # between two steps of an idle position
_PAGE = 4096  # entries read at once; a longer transaction is handed over in pieces,
_PAGE_BYTES = 4 << 20  # and so is one whose rows are larger
_TRIMMED = 10_000  # events removed by one statement


_STOPPED = (
    "DDL may have rewritten its rows (on_rewrite: stop); `headrace snapshot` restores the table"
)


class EventStream(FlowStream["_Flow"]):
    """An open source that reads an event table."""

    def __init__(
        self,
        source: PostgresEventsSettings,
        stored: EventResume | Restart | None,
        register: Register,
    ) -> None:
        super().__init__(source.name)
        self._source = source
        self._stored = stored
        self._register = register

    def _begin(self) -> _Flow:
        session = EventSession.open(self._source, self._stored)
        return _Flow(session, self._register, self._closing)


class _Flow:
    """Batches of one connection: copy what is not copied, then follow the events."""

    def __init__(self, session: EventSession, register: Register, closing: threading.Event) -> None:
        self._source = session.source
        self._session = session
        self._catalog = session.catalog
        self._register = register
        self._closing = closing
        self._phase = Phase.STARTING
        self._resume = session.resume
        self._installed = session.installed
        self._assembler = EventAssembler(
            session.catalog, register, session.resume, self._source.outbox
        )
        self._leaves: set[Leaf] = set()  # partitions that the looks in the resume have shown
        self._copier: PostgresSnapshotReader | None = None
        self._pace = RowPace(self._source.snapshot_rows_per_second)
        self._unreadable: dict[str, str] = {}  # tables that cannot be copied now, and why
        self._yielded = ""  # what a snapshot that was interrupted for somebody has let go of
        self._acked = 0  # every transaction below is durable
        self._trimmed = 0
        self._heard_at = self._stored_at = 0
        self._behind_since = 0.0  # when the newest snapshot saw more than the log has; 0: no more
        self._watched = self._advanced = time.monotonic()

    def batches(self) -> Iterator[Batch]:
        """Everything, for ever."""
        yield self._batch([])  # remembers the event table before anything is read from it
        yield from self._take_up(self._installed)
        if self._to_copy():
            yield from self._copy_at_a_point()
        self._phase = settled(self._yielded)
        while not self._closing.is_set():
            came = False
            for batch in self._poll():
                came = True
                yield batch
            if self._idle():
                yield self._batch([])
            self._trim()
            if self._time_to_watch():
                installed = install.ensure(self._catalog, self._source)
                yield from self._take_up(installed)
                if self._to_copy():
                    yield from self._copy_at_a_point()
                self._phase = settled(self._yielded)
            elif not came:
                self._closing.wait(self._source.poll_seconds)

    def ack(self, resume: bytes) -> None:
        """Everything up to `resume` is durable: its events may be removed."""
        self._stored_at = time.time_ns() // 1000
        self._acked = max(self._acked, seen_in(resume).oldest)

    def interrupt(self) -> None:
        """End copying."""
        if self._copier is not None:
            self._copier.close()

    def release(self) -> None:
        """Let go of the server."""
        self._closing.set()
        self.interrupt()
        self._catalog.close()

    def status(self) -> Status:
        """How it is doing."""
        resume, since, installed = self._resume, self._behind_since, self._installed
        return msgspec.structs.replace(
            resume.status(self._source.name, self._phase),
            lag_seconds=max(time.time() - since, 0.0) if since else 0.0,
            heard_at=self._heard_at,
            stored_at=self._stored_at,
            errored=resume.errored | installed.refused | installed.waiting | self._unreadable,
            warnings=self._warnings(),
        )

    def _warnings(self) -> tuple[str, ...]:
        waits = not self._resume.snapshots and not self._installed.refused
        missing = (nothing_yet(self._source.tables),) if waits else ()
        return (*missing, *yield_warnings(self._yielded, _WATCH_SECONDS))

    def _batch(self, changes: Sequence[Change]) -> Batch:
        return Batch(changes, self._resume.encode())

    # -- events ---------------------------------------------------------------------------------

    def _poll(self) -> Iterator[Batch]:
        """What has become visible since the snapshot that the log has come to."""
        if not self._resume.target:
            news = self._catalog.news(TransactionSnapshot.of(self._resume.seen))
            expect_kept(self._resume, news.state)
            self._heard_at = time.time_ns() // 1000
            if not self._durable(news):
                return
            self._resume = self._resume.reaching(news.snapshot, news.lsn)
            if not news.any:
                self._resume = self._resume.arrived()
                self._behind_since = 0.0
                return
            self._behind_since = self._behind_since or time.time()
        yield from self._follow()

    def _durable(self, news: EventPoll) -> bool:
        """Whether to go on to a snapshot: what it sees must not come undone by a crash."""
        if news.snapshot == self._resume.seen:
            self._behind_since = 0.0
            return False
        if news.flushed:
            return True
        if not news.any and time.monotonic() - self._advanced < _IDLE_SECONDS:
            return False  # there is nothing that would be worth a write of our own
        self._catalog.flush()
        return True

    def _follow(self) -> Iterator[Batch]:
        """Hand over what lies between two snapshots; after a crash, what is left of it."""
        resume = self._resume
        reported = self._catalog.transactions(
            TransactionSnapshot.of(resume.seen), resume.target, resume.entry
        )
        with closing(reported):
            for page in _pages(reported):
                if self._closing.is_set():
                    return
                yield from self._page(page)
        # Of what was removed since it began, nothing may have been left out.
        expect_kept(self._resume, self._catalog.state())
        # Also where nothing was left: the next look begins at the later snapshot.
        self._resume = self._resume.arrived()
        yield self._batch([])

    def _page(self, page: list[EventTransaction]) -> Iterator[Batch]:
        if _is_large(page[0]):
            yield from self._pieces(page[0])
            return
        changes: list[Change] = []
        entries = self._catalog.entries([reported.xid for reported in page])
        if len(entries) != sum(reported.entries for reported in page):
            raise _removed(page[0])
        commit = self._resume.lsn
        for _, group in groupby(entries, key=lambda entry: entry.xid):
            transaction = list(group)
            commit += 1
            last = max(transaction, key=lambda entry: entry.id)
            self._assembler.begin(last, _annotations(transaction), commit=commit)
            changes += self._assembler.take(transaction)
            changes += self._assembler.end()
        yield self._emitted(changes, page[-1], commit)

    def _pieces(self, reported: EventTransaction) -> Iterator[Batch]:
        """A transaction that is too large to be held at once."""
        last = self._catalog.last_entry(reported)
        if last is None:
            raise _removed(reported)
        commit = self._resume.lsn + 1
        self._assembler.begin(last, self._catalog.annotations(reported.xid), commit=commit)
        read, after = 0, None
        while read < reported.entries:
            piece = self._catalog.piece(reported.xid, after, limit=_PAGE, size=_PAGE_BYTES)
            if not piece:
                raise _removed(reported)  # and the log forgets the pieces
            read, after = read + len(piece), piece[-1]
            changes = self._assembler.take(piece)
            if changes:
                yield Batch(changes, None)
        yield self._emitted(self._assembler.end(), reported, commit)

    def _emitted(self, changes: list[Change], last: EventTransaction, commit: int) -> Batch:
        self._resume = msgspec.structs.replace(
            self._resume,
            entry=last.last,
            lsn=commit,
            errored=self._assembler.errored,
            versions=self._assembler.versions,
        )
        if self._assembler.astray:
            self._resume = self._resume.anew(self._assembler.astray)
            self._assembler.renew(self._resume)
        unknown, self._assembler.leaves = self._assembler.leaves - self._leaves, set()
        if unknown:
            self._look(unknown)
            self._assembler.renew(self._resume)
        return self._batch(changes)

    def _idle(self) -> bool:
        """Whether it is time to store how far nothing of ours has happened."""
        now = time.monotonic()
        if now - self._advanced < _IDLE_SECONDS or self._resume.target:
            return False
        self._advanced = now
        return True

    def _trim(self) -> None:
        """Remove events that are durable in the log."""
        if self._source.trim and self._acked > self._trimmed:
            before = self._acked
            if self._catalog.trim(before, _TRIMMED) < _TRIMMED:
                self._trimmed = before

    def _time_to_watch(self) -> bool:
        now = time.monotonic()
        if now - self._watched < _WATCH_SECONDS or self._closing.is_set() or self._resume.target:
            return False
        self._watched = now
        return True

    def _take_up(self, installed: InstalledTriggers) -> Iterator[Batch]:
        """Capture the tables with triggers, after all events of those that had them before."""
        if self._resume.target:
            yield from self._follow()
        yield from self._poll()
        if self._closing.is_set():
            return
        self._installed = installed
        before = self._resume
        self._resume = with_triggers(before, installed, copying=True)
        yield from self._emptied(before)
        self._look()
        self._assembler.renew(self._resume)

    def _emptied(self, before: EventResume) -> Iterator[Batch]:
        """Empty tables that are gone, or have another name."""
        for path, table in gone_tables(self._catalog, before, self._resume).items():
            versions = {name: at for name, at in self._resume.versions.items() if name != path}
            errored = {name: why for name, why in self._resume.errored.items() if name != path}
            change = dropped(table, self._register, self._resume)
            self._resume = msgspec.structs.replace(self._resume, versions=versions, errored=errored)
            yield self._batch([change])

    def _look(self, written: Collection[Leaf] = ()) -> None:
        """Read tables anew that DDL has changed since the last look, or stop them."""
        self._resume, altered, leaves = look_at_tables(self._catalog, self._resume, written)
        self._leaves |= leaves
        if self._source.on_rewrite == "snapshot":
            self._resume = self._resume.anew(altered)
        else:
            for path in altered - self._resume.errored.keys():
                self._resume = self._resume.with_error(path, _STOPPED)

    # -- copying --------------------------------------------------------------------------------

    def _to_copy(self) -> list[str]:
        """Tables with rows left to read, without those that cannot be read now."""
        resume = self._resume
        wanted = {path: resume.snapshots[path].relation for path in resume.to_snapshot}
        self._unreadable = self._catalog.unreadable(wanted)
        readable = [path for path in wanted if path not in self._unreadable]
        self._yielded = self._yielded if readable else ""
        return readable

    def _copy_at_a_point(self) -> Iterator[Batch]:
        """Follow the events to a snapshot, and copy there what is not copied yet."""
        self._phase = Phase.SNAPSHOT
        if self._resume.target:
            yield from self._follow()
        with closing(self._session.another_catalog()) as holder:
            point = holder.point()
            self._catalog.flush()
            self._resume = self._resume.reaching(point.seen, point.lsn)
            with WaiterWatch(self._source.address.connect, exporter=holder.session) as watch:
                yield from self._follow()
                yield from self._copy(point, watch)
        self._leaves = set()  # the copies come with looks of their own
        self._assembler.renew(self._resume)

    def _copy(self, point: EventPoint, watch: WaiterWatch) -> Iterator[Batch]:
        self._copier = PostgresSnapshotReader(
            self._session.address,
            point,
            watch,
            workers=self._source.snapshot_workers,
            pace=self._pace,
        )
        if self._closing.is_set():
            return
        with closing(self._session.another_catalog()) as catalog:
            catalog.share(point.snapshot)
            planner = Planner(catalog, self._register, publication="", point=point)
            self._forget_absent({table.path: table.oid for table in catalog.published("")})
            tasks = []
            for path in self._resume.to_snapshot:
                if path in self._unreadable:
                    continue
                plan = planner.plan(self._resume, path)
                self._resume = plan.resume
                tasks += plan.tasks
                yield self._batch(self._routed(plan.announced))
        for copied in self._copier.copy(tasks):
            yield self._copied(copied)
        self._yielded = watch.yielded
        self._watched = time.monotonic()  # what has yielded goes on at the next look for tables

    def _forget_absent(self, there: dict[str, int]) -> None:
        """Have tables that are none at the point read anew by the look that finds them again.

        A table that is attached for a while is a partition meanwhile, and keeps its triggers.
        """
        kept = {
            path: which
            for path, which in self._resume.triggers.items()
            if path not in self._resume.to_snapshot
            or there.get(path) == self._resume.snapshots[path].relation
        }
        self._resume = msgspec.structs.replace(self._resume, triggers=kept)

    def _copied(self, copied: Copied) -> Batch:
        changes: Sequence[Change] = []
        try:
            changes = self._routed(copied.changes)
        except DecodeError as error:
            copied = dataclasses.replace(copied, error=str(error))
        self._resume = progressed(self._resume, copied)
        return self._batch(changes)

    def _routed(self, changes: Sequence[Change]) -> Sequence[Change]:
        """The rows of an outbox as what they name, and the resume that says so."""
        if self._source.outbox is None:
            return changes
        self._assembler.renew(self._resume)
        routed = self._assembler.copied(changes)
        self._resume = msgspec.structs.replace(self._resume, versions=self._assembler.versions)
        return routed


def _pages(transactions: Iterator[EventTransaction]) -> Iterator[list[EventTransaction]]:
    """Transactions that are read together; a large one is alone."""
    page: list[EventTransaction] = []
    entries = size = 0
    for reported in transactions:
        if page and (entries + reported.entries > _PAGE or size + reported.size > _PAGE_BYTES):
            yield page
            page, entries, size = [], 0, 0
        page.append(reported)
        entries += reported.entries
        size += reported.size
    if page:
        yield page


def _is_large(reported: EventTransaction) -> bool:
    """Whether a transaction is too large to be held at once."""
    return reported.entries > _PAGE or reported.size > _PAGE_BYTES


def _removed(reported: EventTransaction) -> PositionLost:
    return PositionLost(
        f"events of transaction {reported.xid} or later were removed while they were read: "
        "somebody else reads this event table"
    )


def _annotations(transaction: list[EventEntry]) -> dict[bytes, None]:
    """The annotations of a transaction, each once, in order."""
    return dict.fromkeys(entry.annotations for entry in transaction if entry.annotations)
