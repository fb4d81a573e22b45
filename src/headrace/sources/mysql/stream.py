"""The flow of a MySQL or MariaDB source, from connecting to closing.

A snapshot belongs to a position in the binary log. The stream is followed up to that position, the
rows are read, and the stream goes on. The first snapshot of a database, one begun anew after a
crash, that of a renamed table and one that was requested are all this one case. A table that is
created while the stream is followed is empty, and needs no snapshot.

While other tables are streamed, a snapshot reads for some seconds, and another one, at a later
position, goes on where it ended, as after an interruption: in between the stream catches up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import msgspec

from ...change.event import Batch, Change
from ...errors import DecodeError, SourceError, SourceUnavailable
from .. import Phase, Register, Status
from ..pace import RowPace
from ..redact import ColumnRules
from ..stream import nothing_yet
from .address import OpenConnections, TruncatedBinlog, error_number
from .aside import LOCK_SECONDS, LOCK_TIMEOUT, TablesAside, anyone_waits, reason_of, unreadable
from .catalog import BinlogEnd, FoundTable
from .decode.path import TablePath
from .dump import BinlogDump
from .follow import collation_warnings, dependents, unfollowed
from .plan import MysqlTablePlan, failed, interrupted, plan, progressed
from .resume import (
    BinlogOffset,
    DeclaredTable,
    MysqlRestart,
    MysqlResume,
    MysqlTableSnapshot,
    ResumeEncoder,
    file_number,
)
from .session import MysqlSession, with_tables
from .settings import MysqlSettings
from .snapshot import CopiedRange, MysqlSnapshot, TableTask, UnreadableTable
from .tables import CapturedTables
from .transactions import BinlogAssembler, XaMemory

_PIECE = 8192  # changes; a longer transaction is handed over in pieces
_PIECE_BYTES = 8 << 20
_WAIT_SECONDS = 0.5
_LOOK_SECONDS = 5.0  # between two looks how far the server has come
_IDLE_SECONDS = 5.0  # between two steps of a position without changes
# For which a snapshot is read while the stream waits; MySQL locks tables to begin the next one.
_TURN_SECONDS, _LOCKED_TURN_SECONDS = 2.0, 30.0


class MysqlStream:
    """An open MySQL or MariaDB source."""

    def __init__(
        self, source: MysqlSettings, stored: MysqlResume | MysqlRestart | None, register: Register
    ) -> None:
        self._source = source
        self._stored = stored
        self._register = register
        self._closing = threading.Event()
        self._sessions = OpenConnections()
        self._flow: _Flow | None = None

    def __iter__(self) -> Iterator[Batch]:
        try:
            yield from self._batches()
        except SourceUnavailable:
            if not self._closing.is_set():  # else it was we who ended the sessions
                raise

    def _batches(self) -> Iterator[Batch]:
        address = replace(self._source.address, sessions=self._sessions)
        session = MysqlSession.open(self._source, self._stored, address)
        flow = self._flow = _Flow(session, self._register, self._closing)
        try:
            yield from flow.batches()
        finally:
            flow.release()

    def ack(self, resume: bytes) -> None:
        """Everything up to `resume` is durable; when to forget it, the server decides itself."""
        del resume
        if self._flow is not None:
            self._flow.stored()

    def status(self) -> Status:
        """How it is doing; may be called from any thread."""
        if self._flow is None:
            return Status(source=self._source.name, phase=Phase.STARTING)
        return self._flow.status()

    def close(self) -> None:
        """End the iteration; may be called from any thread."""
        self._closing.set()
        if self._flow is not None:
            self._flow.interrupt()
        self._sessions.end()


class _SnapshotYields(Exception):
    """Somebody has waited a second for a lock that a snapshot has."""


class _TurnEnds(Exception):
    """Rows are left to read, and it is the stream's turn."""


class _Flow:
    """Batches of one session: snapshot what is not complete, then stream."""

    def __init__(self, session: MysqlSession, register: Register, closing: threading.Event) -> None:
        self._session = session
        self._source = session.source
        self._register = register
        self._closing = closing
        self._phase = Phase.STARTING
        self._resume = session.resume
        self._encoder = ResumeEncoder()
        self._rules = ColumnRules.of_source(session.source)
        self._snapshot: MysqlSnapshot | None = None
        self._pace = RowPace(session.source.snapshot_rows_per_second)
        self._aside = TablesAside()
        self._waiters_seen = 0.0  # when it was last looked who waits behind a snapshot
        self._dump: BinlogDump | None = None
        self._stored_at = self._heard_at = 0
        self._commit_time = 0  # of the newest change that was handed over; 0: none since caught up
        self._caught_up = time.time()  # when the log last had all that the server had sent
        self._server_end: BinlogOffset = session.resume.offset
        self._lag = 0
        self._looked = 0.0

    def batches(self) -> Iterator[Batch]:
        """Everything, for ever."""
        if not self._session.fresh or not self._resume.to_snapshot:
            yield self._batch([])  # remembers the server before anything is read from it
        # Where there is no table yet, the stream begins before the first snapshot.
        first = self._session.fresh and bool(self._to_snapshot)
        while not self._closing.is_set():
            while self._to_snapshot and not self._closing.is_set():
                self._phase = Phase.SNAPSHOT
                yield from self._take_snapshot(first=first)
                first = False
            self._phase = Phase.STREAMING
            yield from self._follow(None)

    def stored(self) -> None:
        """What was handed over last is durable."""
        self._stored_at = time.time_ns() // 1000

    def interrupt(self) -> None:
        """End waiting, and a snapshot."""
        dump, snapshot = self._dump, self._snapshot
        if dump is not None:
            dump.wake()
        if snapshot is not None:
            snapshot.wake()

    def release(self) -> None:
        """Let go of the server."""
        self._session.catalog.close()

    def status(self) -> Status:
        """How it is doing."""
        since = self._commit_time / 1e6 or self._caught_up
        return msgspec.structs.replace(
            self._resume.status(self._source.name, self._phase),
            lag_bytes=self._lag,
            lag_seconds=max(time.time() - since, 0.0) if self._lag else 0.0,
            heard_at=self._heard_at or self._stored_at,
            stored_at=self._stored_at,
            errored=self._aside.reasons(self._resume.to_snapshot) | unfollowed(self._resume),
            warnings=collation_warnings(self._resume)
            if self._resume.snapshots
            else (nothing_yet(self._source.tables),),
        )

    @property
    def _to_snapshot(self) -> list[TablePath]:
        """Tables that have rows left to read, and can be tried now."""
        return [path for path in self._resume.to_snapshot if path not in self._aside]

    def _batch(self, changes: Sequence[Change]) -> Batch:
        resume = self._resume.without_values(self._rules) if self._rules else self._resume
        return Batch(changes, self._encoder.encode(resume))

    # -- streaming ------------------------------------------------------------------------------

    def _follow(self, until: BinlogOffset | None) -> Iterator[Batch]:
        """The stream: up to an offset, or until a table needs a snapshot."""
        if until is not None and self._resume.offset >= until:
            return
        with closing(self._session.dump(self._resume)) as dump:
            self._dump = dump
            if self._closing.is_set():
                return
            assembler = self._assembler()
            try:
                yield from self._batches(dump, assembler, until)
            except TruncatedBinlog as error:
                yield self._passed_over(assembler, error)
            self._dump = None

    def _passed_over(self, assembler: BinlogAssembler, error: TruncatedBinlog) -> Batch:
        """A transaction that the server died in was undone when it came back, with a new file."""
        number = file_number(assembler.file)
        later = [file for file in self._session.catalog.files() if file_number(file) > number]
        if not later:
            raise error
        assembler.cut(min(later, key=file_number))
        return self._handed(assembler)

    def _assembler(self) -> BinlogAssembler:
        session, resume = self._session, self._resume
        catalog, server = session.catalog, session.server
        known = catalog.variables("binlog_row_metadata")
        tables = CapturedTables(
            catalog,
            self._register,
            resume,
            wants=self._source.wants,
            named=known.get("binlog_row_metadata") == "FULL",
            stops=self._source.on_rewrite == "stop",
        )
        no_table = self._register(catalog.sourceless(self._source.database))
        gtids = server.parse_gtids(resume.gtids)
        xa_memory = XaMemory(self._source.xa_memory_mb)
        return BinlogAssembler(tables, resume, gtids, no_table=no_table, xa_memory=xa_memory)

    def _batches(
        self, dump: BinlogDump, assembler: BinlogAssembler, until: BinlogOffset | None
    ) -> Iterator[Batch]:
        offered = time.monotonic()
        size = 0
        while not self._closing.is_set():
            if self._ends(assembler, until):
                break
            events = dump.receive(0.0 if assembler.done else _WAIT_SECONDS)
            size += sum(map(len, events))
            yield from self._fed(events, assembler, until)
            assembler.flush()
            if len(assembler.open) > _PIECE or (size > _PIECE_BYTES and assembler.open):
                yield from self._pieces(assembler)
                size = 0
            if events:
                self._heard_at = time.time_ns() // 1000
            full = len(assembler.done) >= _PIECE or size > _PIECE_BYTES or not events
            idle = time.monotonic() - offered > _IDLE_SECONDS and self._passed(assembler)
            if (assembler.done and full) or idle:
                offered, size = time.monotonic(), 0
                yield self._handed(assembler)
            self._look(assembler, idle=not events)
        # In the middle of a transaction that was handed over in part, nothing is complete.
        if assembler.done or assembler.between_transactions:
            yield self._handed(assembler)

    def _fed(
        self, events: list[bytes], assembler: BinlogAssembler, until: BinlogOffset | None
    ) -> Iterator[Batch]:
        """Take events; gives the pieces of what is unpacked on the way."""
        for event in events:
            ended = assembler.feed(event)
            while assembler.unpacking:
                yield from self._pieces(assembler)
                if self._closing.is_set():
                    return
                ended = assembler.unpack()
            if ended and self._ends(assembler, until):
                return

    def _ends(self, assembler: BinlogAssembler, until: BinlogOffset | None) -> bool:
        """Whether the stream has come as far as it should."""
        if not assembler.between_transactions:
            return False
        if until is not None:
            return assembler.offset >= until
        settled = assembler.settled
        return settled.to_snapshot and any(
            not progress.done and path not in self._aside
            for path, progress in settled.snapshots.items()
        )

    def _passed(self, assembler: BinlogAssembler) -> bool:
        """Whether the position moves, if only by what is not captured."""
        here = (self._resume.file, self._resume.position)
        return assembler.between_transactions and assembler.after != here

    def _pieces(self, assembler: BinlogAssembler) -> Iterator[Batch]:
        """A large transaction: first what was complete before it, then a part of it."""
        if assembler.done:
            yield self._handed(assembler)
        piece = assembler.take_open()
        if piece:
            self._commit_time = piece[-1].transaction.commit_time
            yield Batch(piece, None)

    def _handed(self, assembler: BinlogAssembler) -> Batch:
        """What is complete, and how to go on after it."""
        assembler.flush()
        changes, assembler.done = assembler.done, []
        if changes:
            self._commit_time = changes[-1].transaction.commit_time
        state, (file, position) = assembler.settled, assembler.after
        self._resume = msgspec.structs.replace(
            self._resume,
            file=file,
            position=position,
            born=assembler.born_of(file),
            gtids=str(assembler.gtids),
            snapshots=state.snapshots,
            errored=state.errored,
            versions=state.versions,
            former=state.former,
            catalogue=state.catalogue,
            pending_ddl=state.pending_ddl,
            prepared=assembler.undecided,
        )
        return self._batch(changes)

    def _look(self, assembler: BinlogAssembler, *, idle: bool) -> None:
        """Now and then: how far the server has come."""
        now = time.monotonic()
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            end = self._session.catalog.end()
            self._server_end = end.offset
            self._lag = self._behind(end)
        if idle and assembler.between_transactions and assembler.offset >= self._server_end:
            self._lag = 0
            self._caught_up, self._commit_time = time.time(), 0

    def _behind(self, end: BinlogEnd) -> int:
        """Bytes of the binary log that the log has not."""
        resume = self._resume
        if end.file == resume.file:
            return max(end.position - resume.position, 0)
        files = self._session.catalog.files()
        between = [
            size for file, size in files.items() if file_number(file) >= file_number(resume.file)
        ]
        return max(sum(between) - resume.position, 0)

    # -- snapshots ------------------------------------------------------------------------------

    def _take_snapshot(self, *, first: bool) -> Iterator[Batch]:
        """Begin a snapshot, follow the stream up to its position, and read its rows."""
        found = self._found()
        if not first and not found.keys() >= set(self._resume.to_snapshot):
            # The stream has the DROP or RENAME, and the log may have rows of such a table.
            yield from self._follow_up_to(self._session.catalog.end())
            found = self._found()
        for path in set(self._resume.to_snapshot) - found.keys():
            self._resume = _without(self._resume, path)
        self._resume = _with_dependents(self._resume)
        tables = _round([found[path] for path in self._readable() if path in found])
        try:
            snapshot = self._open_snapshot(tables) if tables else None
        except SourceError as error:
            if error_number(error) != LOCK_TIMEOUT:
                raise
            self._leave(tables, reason_of(error))
            snapshot = None
        if snapshot is None:
            yield self._batch([])
            return
        with closing(snapshot):
            self._snapshot = snapshot
            try:
                yield from self._reach(snapshot.end, first=first)
                # A statement on the way may have given foreign keys to a table.
                self._resume = _with_dependents(self._resume)
                if not self._closing.is_set():
                    yield from self._snapshot_tables(snapshot, tables)
            except _SnapshotYields:
                self._give_way(tables)
            except _TurnEnds:
                self._take_up_again()
            except UnreadableTable as unread:
                self._take_up_again()
                self._aside.put(unread.path, unread.reason)
            self._snapshot = None

    def _found(self) -> dict[TablePath, FoundTable]:
        """The tables that are there."""
        candidates = self._session.catalog.candidates(self._source.wants)
        return {table.path: table for table in candidates}

    def _readable(self) -> list[TablePath]:
        """Tables to read now; those that cannot be read wait, and keep nobody else waiting."""
        tried = self._to_snapshot
        reasons = unreadable(self._session.address, tried)
        for path, reason in reasons.items():
            self._aside.put(path, reason)
        return [path for path in tried if path not in reasons]

    def _open_snapshot(self, tables: list[FoundTable]) -> MysqlSnapshot:
        session, workers = self._session, self._source.snapshot_workers
        return MysqlSnapshot.open(session.address, session.catalog, tables, workers=workers)

    def _leave(self, tables: list[FoundTable], reason: str) -> None:
        for table in tables:
            self._aside.put(table.path, reason)

    def _give_way(self, tables: list[FoundTable]) -> None:
        """Go on with a snapshot later, once whoever waits behind it has had its turn."""
        self._take_up_again()
        left = [table for table in tables if table.path in self._resume.to_snapshot]
        self._leave(left, "its snapshot gave way to a statement that waited; it is taken later")

    def _take_up_again(self) -> None:
        """Another snapshot goes on with what is left of this one."""
        declared = self._resume.declared()
        for path, progress in self._resume.snapshots.items():
            found = interrupted(progress, declared.get(path))
            if found is not progress:
                self._resume = self._resume.with_snapshot(path, found)

    def _expect_nobody_waits(self, tables: Iterable[TablePath]) -> None:
        now = time.monotonic()
        if now - self._waiters_seen > LOCK_SECONDS / 2:
            self._waiters_seen = now
            if anyone_waits(self._session.catalog.rows("SHOW FULL PROCESSLIST"), tables):
                raise _SnapshotYields

    def _reach(self, end: BinlogEnd, *, first: bool) -> Iterator[Batch]:
        if first:
            resume = msgspec.structs.replace(
                self._resume, file=end.file, position=end.position, born=0, gtids=end.gtids
            )
            # The stream begins here: it has no CREATE or RENAME of tables that came until now.
            self._resume = with_tables(resume, self._found().values(), takes_snapshot=True)
            yield self._batch([])
            return
        for batch in self._follow_up_to(end):
            yield batch
            self._expect_nobody_waits(self._to_snapshot)

    def _follow_up_to(self, end: BinlogEnd) -> Iterator[Batch]:
        while self._resume.offset < end.offset and not self._closing.is_set():
            yield from self._follow(end.offset)

    def _snapshot_tables(
        self, snapshot: MysqlSnapshot, tables: list[FoundTable]
    ) -> Iterator[Batch]:
        wanted = [table for table in tables if table.path in self._resume.to_snapshot]
        wanted = [table for table in wanted if self._held(snapshot, table)]
        plans: dict[TablePath, MysqlTablePlan] = {}
        for table in wanted:
            declared = self._declared(table)
            if declared is None:
                self._resume = _without(self._resume, table.path)
            else:
                plans[table.path] = self._plan(table, declared, snapshot.end)
        tasks: list[TableTask] = []
        for path in list(plans):
            try:
                tasks.append(plans[path].task())
            except DecodeError as error:
                yield self._begun(plans.pop(path))
                self._resume = failed(self._resume, path, str(error))
                yield self._batch([])
        until = time.monotonic() + self._turn_seconds(tasks)
        with closing(snapshot.copy(tasks, self._pace)) as reading:
            for copied in reading:
                if copied is not None:
                    yield from self._copied(copied, plans)
                    if copied.changes and time.monotonic() > until:
                        raise _TurnEnds
                self._expect_nobody_waits(self._resume.to_snapshot)

    def _turn_seconds(self, tasks: Sequence[TableTask]) -> float:
        """How long tables may be read before the stream goes on."""
        streams = any(progress.done for progress in self._resume.snapshots.values())
        # Whatever another snapshot cannot go on with is read in one.
        certain = all(task.order is not None and task.order.certain for task in tasks)
        bound = dependents(self._resume.declared(), [task.path for task in tasks])
        if not streams or not certain or bound:
            return float("inf")
        mariadb = self._session.server.mariadb
        return _TURN_SECONDS if mariadb else _LOCKED_TURN_SECONDS

    def _held(self, snapshot: MysqlSnapshot, table: FoundTable) -> bool:
        """Whether a table stays as it is until it is read; one that cannot waits."""
        try:
            if table.transactional:
                snapshot.hold(table)
        except SourceError as error:
            self._aside.put(table.path, reason_of(error))
            return False
        return True

    def _declared(self, table: FoundTable) -> DeclaredTable | None:
        return self._session.catalog.declared(table.schema, table.name)

    def _plan(self, found: FoundTable, declared: DeclaredTable, end: BinlogEnd) -> MysqlTablePlan:
        # Nobody alters it now, so the catalogue shows it as it is at the snapshot's position.
        declared = msgspec.structs.replace(declared, read_at=end.offset, exact=True)
        declared = declared.numbered(self._resume.declared().get(found.path))
        table = self._session.catalog.table(found.schema, found.name, declared)
        return plan(self._resume, found, self._register(table), declared, end)

    def _copied(
        self, copied: CopiedRange, plans: dict[TablePath, MysqlTablePlan]
    ) -> Iterator[Batch]:
        path = copied.task.path
        if path in plans:
            yield self._begun(plans.pop(path))
        if self._resume.snapshots[path].done:
            return  # another range of it cannot be read
        self._resume = progressed(self._resume, copied)
        if self._resume.snapshots[path].done:
            self._aside.done(path)
        if copied.changes or self._resume.snapshots[path].done:
            yield self._batch(copied.changes)

    def _begun(self, begins: MysqlTablePlan) -> Batch:
        self._resume = begins.begun(self._resume)
        return self._batch(begins.announced)


def _round(tables: list[FoundTable]) -> list[FoundTable]:
    """Tables of one snapshot: all that a transaction shows, or one that none does."""
    transactional = [table for table in tables if table.transactional]
    return transactional or tables[:1]


def _with_dependents(resume: MysqlResume) -> MysqlResume:
    """The same with new snapshots also of tables whose foreign keys name one that gets one.

    What the server does to their rows follows from changes that are not captured meanwhile.
    """
    for path in dependents(resume.declared(), resume.to_snapshot):
        progress = resume.snapshots.get(path)
        if progress is not None and progress.begun:
            resume = resume.with_snapshot(path, MysqlTableSnapshot(replaces=True))
    return resume


def _without(resume: MysqlResume, path: TablePath) -> MysqlResume:
    """A table that is not there any more, whatever the stream has of it."""
    snapshots = {each: progress for each, progress in resume.snapshots.items() if each != path}
    progress = resume.snapshots[path]
    former = (*resume.former, path) if progress.replaces or progress.begun else resume.former
    return msgspec.structs.replace(resume, snapshots=snapshots, former=former)
