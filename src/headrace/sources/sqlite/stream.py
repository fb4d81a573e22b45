"""The flow of a SQLite source, from opening to closing.

Every look takes a snapshot, which says how far the entries reach. These come first, transaction by
transaction; then tables are copied at the snapshot, whose rows are those that the entries have led
to. The snapshot stays until the next look, so that the write-ahead log still shows then where
transactions ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import apsw
import msgspec

from ...change.event import Batch, BeforeKind, Change, Op, Transaction
from ...errors import DecodeError, SourceUnavailable
from .. import Phase, Register, Status
from ..pace import RowPace
from ..resume import Restart, position_in
from ..stream import FlowStream, nothing_yet
from . import installation
from .connections import classify, weight
from .connector import SqlitePosition
from .database import Database, Snapshot
from .resume import SqliteResume
from .schema import matches
from .session import SqliteTables, begin, expect_known, with_tables
from .settings import SqliteSettings
from .snapshot import SqliteSnapshotReader
from .transactions import SqliteAssembler, entries, further_ends

_FILE_SECONDS = 1.0  # between two looks whether the file is still the same
# A writer without a busy timeout fails while somebody else writes. SQLite also refuses one that
# has begun by reading and then writes, if anybody has written in between, whatever its timeout.
# So this reader writes seldom, little at a time, and while nobody else does.
_TRIM_SECONDS = 1.0  # after the last commit
_TRIM_LATEST = 10.0  # after the last trim, for fewer entries than
_TRIM_LEAST = 1000
_TRIM_MANY = 100_000  # entries that are worth a lock while commits never stop
_TRIM_MOST = 500  # entries deleted at once: writers wait for no longer than they take
_LOOK_SECONDS = 0.2  # between two looks, where a reader keeps writers waiting
_NOTE_LEAST = 4096  # entries of one look: so many are read in several batches
_RENEWALS = 5  # of triggers within one look
_PIECE, _PIECE_BYTES = 4096, 16 << 20  # changes of a large transaction
_IDLE_SECONDS = 0.2  # without a commit: nobody's checkpoint shall wait for us then
_BUSY_SECONDS = 0.8  # of another's checkpoint: it waits for us, and not for a processor
_WAL_BYTES = 4 << 20  # from here on it is worth a try to let the write-ahead log begin anew
_WAL_MOST = 256 << 20  # from here on that is worth more than knowing where a transaction ended


class SqliteStream(FlowStream["_Flow"]):
    """An open SQLite source."""

    def __init__(
        self, source: SqliteSettings, stored: SqliteResume | Restart | None, register: Register
    ) -> None:
        super().__init__(source.name)
        self._source = source
        self._stored = stored
        self._register = register

    def __iter__(self) -> Iterator[Batch]:
        path = self._source.path
        try:
            database = Database(path)
        except apsw.Error as error:
            raise classify(error, path) from error
        try:
            resume = begin(self._source, self._stored, database)
            tables = SqliteTables(database, self._source, resume.uuid, self._register)
            flow = self._flow = _Flow(self._source, database, tables, resume, self._closing)
            yield from flow.batches(first=self._stored is None)
        except apsw.InterruptError:
            if not self._closing.is_set():
                raise
        except apsw.Error as error:
            raise classify(error, path) from error
        finally:
            database.close()


class _Flow:
    """Batches of one opening: look, emit the entries, take the snapshots that are left."""

    def __init__(
        self,
        source: SqliteSettings,
        database: Database,
        tables: SqliteTables,
        resume: SqliteResume,
        closing: threading.Event,
    ) -> None:
        self._source = source
        self._closing = closing
        self._database = database
        self._tables = tables
        self._resume = resume
        self._assembler = SqliteAssembler(tables, resume)
        self._pace = RowPace(source.snapshot_rows_per_second)
        self._phase = Phase.STARTING
        self._installed: list[installation.InstalledTable] = []
        self._refused: dict[str, str] = {}
        self._schema = -1  # the version that `_installed` is of
        self._kept: Snapshot | None = None  # holds the write-ahead log since it was taken
        self._watched = -1  # the entry that it had come to then; -1: nobody has watched
        self._ends: list[int] = []  # found out, not noted in the database yet
        self._acked = self._trimmed = resume.position
        self._emitted_at = self._stored_at = self._heard_at = 0
        self._newest = 0  # the newest entry that was seen
        self._file_at = self._trim_at = self._kept_at = self._looked_at = time.monotonic()
        self._busy_at = 0.0  # since when others' checkpoints do not end; 0: there is none
        self._trimming = False  # whether some entries are deleted, and others are left
        self._free = False  # whether what is kept needs nothing of the write-ahead log

    def batches(self, *, first: bool = False) -> Iterator[Batch]:
        """Everything, for ever; `first`: this log has never read it."""
        database = self._database
        yield self._batch([])  # remembers the reader before anything is deleted for it
        database.begin_watch(self._resume.uuid)
        version = None
        copying = self._source.snapshot or not first
        while not self._closing.is_set():
            now = database.version()
            self._heard_at = time.time_ns() // 1000
            if now != version and not self._looked_lately():
                version = now
                yield from self._look(copying=copying)
                self._looked_at = time.monotonic()
                copying = True
                self._phase = Phase.STREAMING
            self._maintain()
            self._closing.wait(self._source.poll_seconds)
        self._note()

    def _looked_lately(self) -> bool:
        """Whether a writer shall be left alone for a while."""
        if self._database.wal is not None or self._phase is not Phase.STREAMING:
            return False
        return time.monotonic() - self._looked_at < _LOOK_SECONDS

    def ack(self, resume: bytes) -> None:
        """Everything up to `resume` is durable."""
        self._stored_at = time.time_ns() // 1000
        self._acked = max(self._acked, position_in(resume))

    def interrupt(self) -> None:
        """It looks often whether it was closed."""

    def release(self) -> None:
        """The stream closes the database."""

    def status(self) -> Status:
        """How it is doing."""
        resume = self._resume
        found = resume.snapshots or self._refused
        behind = self._emitted_at and self._newest > self._acked
        since = self._emitted_at / 1e6 if behind else time.time()
        return msgspec.structs.replace(
            resume.status(self._source.name, self._phase),
            lag_seconds=max(time.time() - since, 0.0),
            heard_at=self._heard_at,
            stored_at=self._stored_at,
            errored=resume.errored | self._refused,
            warnings=() if found or self._schema < 0 else (nothing_yet(self._source.tables),),
        )

    def _batch(self, changes: list[Change]) -> Batch:
        return Batch(changes, self._resume.encode())

    # -- looking --------------------------------------------------------------------------------

    def _look(self, *, copying: bool) -> Iterator[Batch]:
        snapshot = self._snapshot()
        self._newest = snapshot.last
        ends = self._ends_upto(snapshot)
        copiers: dict[str, SqliteSnapshotReader] = {}
        holding = self._database.wal is not None
        if not holding:
            # A reader would keep writers waiting here, and entries stay as they are without one.
            copiers = self._held(snapshot, copying=copying)
            self._database.release(snapshot)
        self._assembler.renew(self._resume)
        yield from self._stream(ends)
        if self._resume.position < snapshot.last:
            return  # it is being closed
        yield from self._dropped(snapshot)
        self._resume = self._with_tables(copying=copying)
        if any(not copy.done for copy in self._resume.snapshots.values()):
            self._phase = Phase.SNAPSHOT
            for path in [path for path, copy in self._resume.snapshots.items() if not copy.done]:
                yield from self._copy(path, copiers.get(path) or self._copier(snapshot, path))
        if holding:
            self._keep(snapshot)

    def _snapshot(self) -> Snapshot:
        """The database as it is now, with the triggers that it should have."""
        database, globs = self._database, self._source.tables
        for _ in range(_RENEWALS):
            snapshot = database.snapshot()
            expect_known(self._resume, snapshot, database.path)
            if snapshot.schema == self._schema:
                return snapshot
            if not installation.is_stale(snapshot.connection, globs):
                return self._learn(snapshot)
            database.release(snapshot)
            database.renew(globs)
        raise SourceUnavailable(f"the tables of {database.path} change again and again")

    def _learn(self, snapshot: Snapshot) -> Snapshot:
        globs = self._source.tables
        found = installation.layouts(snapshot.connection)
        self._installed = [each for each in found if matches(each.layout.name, globs)]
        self._refused = installation.refusals(snapshot.connection, globs)
        self._schema = snapshot.schema
        return snapshot

    def _ends_upto(self, snapshot: Snapshot) -> list[int]:
        """Where the transactions end that are not captured yet."""
        position, last = self._resume.position, snapshot.last
        known = self._database.ends(position)
        noted = known[-1] if known else position
        if noted >= last:
            return known
        wal = self._database.wal
        seen = wal.ends(snapshot.page, last) if wal is not None else []
        found = sorted({end for end in seen if end > noted} | {last})
        if noted != self._watched or not seen:
            marks = self._database.marks(noted, found[0])
            found = further_ends(marks) + found
        # The same transactions must come if they come again.
        self._ends += found
        return known + found

    def _keep(self, snapshot: Snapshot) -> None:
        self._database.release(self._kept)
        self._kept, self._watched = snapshot, snapshot.last
        self._kept_at, self._free = time.monotonic(), False

    # -- entries --------------------------------------------------------------------------------

    def _stream(self, ends: list[int]) -> Iterator[Batch]:
        if ends and ends[-1] - self._resume.position > _NOTE_LEAST:
            self._note()
        at = 0
        while at < len(ends) and not self._closing.is_set():
            position = self._resume.position
            page = self._database.entries(position, ends[-1])
            whole = [end for end in ends[at:] if end <= page[-1][0]]
            if not whole:
                yield from self._large(ends[at])
                at += 1
                continue
            changes: list[Change] = []
            first = 0
            for end in whole:
                found = list(entries(page[first : end - position]))
                changes += self._assembler.whole(position + first + 1, found)
                first = end - position
            at += len(whole)
            yield self._batch_upto(changes, whole[-1])

    def _large(self, end: int) -> Iterator[Batch]:
        """A transaction that does not fit into a page."""
        database, position = self._database, self._resume.position
        ((_, _, _, at, _),) = database.marks(end - 1, end)
        self._assembler.begin(position + 1, at, database.notes(position, end))
        fed = size = 0
        for entry in entries(database.all_entries(position, end)):
            self._assembler.feed(entry)
            fed, size = fed + 1, size + weight(entry.values)
            if fed >= _PIECE or size >= _PIECE_BYTES:
                fed = size = 0
                yield Batch(self._assembler.take_open(), None)
                if self._closing.is_set():
                    return
        yield self._batch_upto(self._assembler.end(), end)

    def _batch_upto(self, changes: list[Change], position: int) -> Batch:
        if changes:
            self._emitted_at = changes[-1].transaction.commit_time
        seal = self._database.seal(position)
        self._resume = msgspec.structs.replace(self._assembler.resume, position=position, seal=seal)
        self._assembler.resume = self._resume
        return self._batch(changes)

    def _note(self) -> None:
        """Keep in the database where transactions ended that may have to come again."""
        if self._unstored_ends() and self._database.note(self._ends):
            self._ends = []

    def _unstored_ends(self) -> bool:
        self._ends = [end for end in self._ends if end > self._acked]
        return bool(self._ends)

    # -- tables ---------------------------------------------------------------------------------

    def _dropped(self, snapshot: Snapshot) -> Iterator[Batch]:
        there = {each.path for each in self._installed}
        for path in [path for path in self._resume.snapshots if path not in there]:
            layout = self._resume.snapshots[path].layout
            table = self._tables.describe(layout).table
            payload = {"ddl_type": "DROP_TABLE", "dropped": True}
            now = time.time_ns() // 1000
            name = f"dropped-{snapshot.last}-{self._resume.looks}-{layout}"
            at = SqlitePosition(snapshot.last, snapshot.last)
            change = Change(
                Op.SCHEMA, table, None, None, BeforeKind.NONE, msgspec.json.encode(payload), None,
                (),
                Transaction(name, now, now), 1, at, last=True,
            )  # fmt: skip
            self._resume = self._resume.without(path)
            yield self._batch([change])

    def _with_tables(self, *, copying: bool) -> SqliteResume:
        stops = self._source.on_rewrite == "stop"
        return with_tables(self._resume, self._installed, copying=copying, stops=stops)

    def _held(self, snapshot: Snapshot, *, copying: bool) -> dict[str, SqliteSnapshotReader]:
        """The rows of tables that are not copied, as far as can be known before the entries."""
        resume, self._resume = self._resume, self._with_tables(copying=copying)
        pending = [path for path, copy in self._resume.snapshots.items() if not copy.done]
        copiers = {path: self._copier(snapshot, path) for path in pending}
        self._resume = resume
        for copier in copiers.values():
            copier.hold()
        return copiers

    def _copier(self, snapshot: Snapshot, path: str) -> SqliteSnapshotReader:
        layout = self._resume.snapshots[path].layout
        described = self._tables.describe(layout)
        return SqliteSnapshotReader(snapshot, layout, described, looks=self._resume.looks)

    def _copy(self, path: str, copier: SqliteSnapshotReader) -> Iterator[Batch]:
        copy = self._resume.snapshots[path]
        version = copier.version
        new = self._resume.versions.get(path) != version
        announced = copier.announce(columns=new, forget=copy.again)
        copy = msgspec.structs.replace(copy, rows=0, again=True)
        self._resume = self._resume.with_version(path, version).with_snapshot(path, copy)
        yield self._batch(announced)
        try:
            for changes in copier.rows(self._pace):
                self._closing.wait(self._pace.delay(len(changes)))
                if self._closing.is_set():
                    return
                copy = msgspec.structs.replace(copy, rows=copy.rows + len(changes))
                self._resume = self._resume.with_snapshot(path, copy)
                yield self._batch(changes)
        except DecodeError as error:
            self._resume = self._resume.with_error(path, str(error))
        done = msgspec.structs.replace(copy, done=True, again=False)
        self._resume = self._resume.with_snapshot(path, done)
        yield self._batch([])

    # -- between two looks ----------------------------------------------------------------------

    def _maintain(self) -> None:
        now = time.monotonic()
        if now - self._file_at >= _FILE_SECONDS:
            self._file_at = now
            self._database.expect_same_file()
        if self._is_time_to_trim(now):
            self._note()
            self._trim(now)
        self._let_wal_go()

    def _is_time_to_trim(self, now: float) -> bool:
        pending = self._acked - self._trimmed
        quiet = now - self._looked_at >= _TRIM_SECONDS
        due = self._trimming or pending >= _TRIM_LEAST or now - self._trim_at >= _TRIM_LATEST
        return pending >= _TRIM_MANY or (pending > 0 and quiet and due)

    def _trim(self, now: float) -> None:
        acked, reader = self._acked, (self._source.name, self._resume.reader)
        # Without a write-ahead log a commit waits for the disk, however small it is.
        most = _TRIM_MOST if self._database.wal is not None else 10 * _TRIM_MOST
        upto = self._database.trim(reader, acked, most=most)
        if upto is not None:
            self._trimmed = acked if upto == acked - 1 else upto
        self._trimming = self._trimmed < acked
        if not self._trimming:
            self._trim_at = now

    def _let_wal_go(self) -> None:
        """Let the write-ahead log begin anew, which this very reader keeps from it."""
        wal, kept = self._database.wal, self._kept
        if wal is None or kept is None or self._free:
            return
        size, now = wal.size(), time.monotonic()
        if size < _WAL_BYTES and now - self._kept_at < _IDLE_SECONDS:
            return
        if self._unstored_ends() and size < _WAL_BYTES * 16:
            return  # they are stored in a moment, and nothing has to be written then
        self._kept_at = now
        self._note()
        moved = self._database.checkpoint()
        self._busy_at = (self._busy_at or now) if moved is None else 0.0
        if (moved is None and now - self._busy_at >= _BUSY_SECONDS) or size > _WAL_MOST:
            self._database.release(kept)
            self._kept, self._watched = None, -1
        elif moved:
            # One that begins when all has been moved does not need the log.
            fresh = self._database.snapshot()
            if fresh.last == kept.last:
                self._keep(fresh)
                self._free = True
            else:
                self._database.release(fresh)
