"""Events of a binary log -> changes, a transaction at a time. No I/O but catalogue look-ups."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from ...change.event import BeforeKind, Change, Op, Table, Transaction
from ...errors import DecodeError, PositionLost, ProtocolError, SourceRefused, SourceReplaced
from .._annotations import annotated
from .address import TruncatedBinlog
from .catalog import Gtids
from .decode.absent import DefaultsOfAnotherTime, Manner, manner_of
from .decode.binlog import inner_events, parse
from .decode.events import (
    UNKNOWN,
    Event,
    FormatDescription,
    Gtid,
    Header,
    Heartbeat,
    Incident,
    Payload,
    Query,
    Rotate,
    RowsEvent,
    RowsKind,
    RowsQuery,
    TableMap,
    XaPrepare,
    Xid,
)
from .decode.path import TablePath
from .decode.rows import Row
from .decode.statements import (
    ROLLBACK_TO,
    SAVEPOINT,
    XA,
    DmlStatement,
    changes_kept_by,
    read,
    savepoint,
    xid,
)
from .dump import FIRST
from .keys import RowNotRead
from .pending import OpenTransaction, PendingRows, annotation, change_without_row, decoded
from .position import MysqlPosition
from .resume import BinlogOffset, MysqlResume, file_number
from .settings import SYSTEM_SCHEMAS
from .tables import CapturedTables, MappedTable, TableEvent

_TABLE_MAP = 19
_HEAD = 19  # bytes of an event's header
_TABLE_ID, _MAP_FLAGS = 6, 2  # bytes
_CHECKSUM = 4  # bytes
_UNPACKED = 1 << 20  # bytes of a compressed transaction that are taken at once
_CHANGE = 500  # bytes that a change takes beside its images, about
_set = msgspec.structs.force_setattr


class PreparedXa(msgspec.Struct, frozen=True):
    """An XA transaction whose rows are known and whose end is not."""

    changes: list[Change]
    file: str
    begin: int
    size: int = 0  # bytes that its changes take, about


class XaMemory:
    """The memory for rows of XA transactions that are prepared and not decided."""

    def __init__(self, limit_mb: int) -> None:
        self._limit_mb = limit_mb
        self._prepared = 0  # bytes of transactions that wait for their end
        self._counted = 0  # changes of the one at hand
        self._size = 0  # bytes of these

    def count(self, changes: list[Change], where: str) -> None:
        """Count what has come to the transaction at hand; SourceRefused: it is too much."""
        for change in changes[self._counted :]:
            self._size += _CHANGE + len(change.before or b"") + len(change.after or b"")
        self._counted = len(changes)
        if self._prepared + self._size > self._limit_mb << 20:
            raise SourceRefused(
                f"{where}: the rows of XA transactions that are prepared and not decided take more "
                f"than xa_memory_mb, which is {self._limit_mb}",
                hint="Give the source a larger xa_memory_mb, and the machine the memory, or run "
                "`headrace snapshot SOURCE` for a new snapshot when they are decided.",
            )

    def prepare(self) -> int:
        """The transaction at hand waits now; gives its size."""
        size, self._size, self._counted = self._size, 0, 0
        self._prepared += size
        return size

    def decide(self, size: int) -> None:
        """One does not wait any more."""
        self._prepared -= size


class BinlogAssembler:
    """Collects the events of the stream into changes.

    Rows wait until `flush`, since many events decoded together cost much less than one by one.

    A compressed transaction may be larger than memory when unpacked, so it is taken in steps:
    while `unpacking`, the next events come by `unpack`.

    `done` holds complete transactions, up to `offset`; `open` the one that has begun.
    """

    def __init__(
        self,
        tables: CapturedTables,
        resume: MysqlResume,
        gtids: Gtids,
        *,
        no_table: Table,
        xa_memory: XaMemory,
    ) -> None:
        self.tables = tables
        self.done: list[Change] = []
        self.open: list[Change] = []
        self._waiting: list[PendingRows | None] = []  # None: the transaction before it ends
        self.file, self.end = resume.file, resume.position  # where the next event begins
        self.born = resume.born
        self.gtids = gtids
        self.settled = tables.state
        self.prepared: dict[str, PreparedXa] = {}
        self._pending = dict(resume.prepared)
        self._xa_memory = xa_memory
        # Where the last complete transaction ends: what stands before it is in the log already.
        self.after: tuple[str, int] = (resume.file, resume.position)
        self._skip = resume.offset
        # By GTID the server passes over what is in the log; events have positions only after that.
        self._by_gtid = resume.moved
        self._passing = resume.moved and not resume.file
        self._form: FormatDescription = UNKNOWN
        self._begun: OpenTransaction | None = None
        self._inner: Iterator[Event] = iter(())  # what is left of a compressed transaction
        self.unpacking = False
        self._readings: dict[int, MappedTable] = {}
        self._at = 0  # where the event at hand begins
        self._no_table = no_table
        self._known = (resume.file, resume.born)  # the file whose birth is known, for a look at it
        self._gtid: Any = None
        self._sql = ""  # the statement that the next rows come from; "": it is not known
        self._written: set[TablePath] = set()  # the tables that it writes to

    @property
    def between_transactions(self) -> bool:
        """Whether nothing has begun that has not ended."""
        return self._begun is None

    @property
    def offset(self) -> BinlogOffset:
        """How far everything has been read."""
        return file_number(self.file), self.end

    def feed(self, data: bytes) -> bool:
        """Take one event, header and checksum included; whether it ends all that had begun."""
        if data[4] == _TABLE_MAP and self._mapped_before(data):
            return self._begun is None
        event = parse(data, self._form)
        if isinstance(event, RowsEvent):
            self._moved(event.header)
            self._changed(event, data)
            return False
        self._take(event, data)
        return self._begun is None

    def unpack(self) -> bool:
        """Take more of a compressed transaction, while `unpacking`; returns the same as `feed`."""
        size = 0
        for event in self._inner:
            self._happened(event, b"")
            size += event.header.size
            if size > _UNPACKED:
                self.unpacking = True
                return False
        self.unpacking = False
        return self._begun is None

    def cut(self, file: str) -> None:
        """What has begun has no end, and never counted; go on with another file."""
        self.flush()
        if self._begun is not None and self._begun.emitted:
            raise SourceRefused(
                f"{self.file} ends within a transaction of which a part is stored: the server died "
                "while it wrote it",
                hint="Run `headrace snapshot SOURCE` to start again from a new snapshot.",
            )
        self._begun, self.open = None, []
        self.file, self.end, self.born = file, FIRST, 0
        self.after = (self.file, self.end)

    def take_open(self) -> list[Change]:
        """The changes of the open transaction so far, but one: the last must be known as such."""
        begun = self._begun
        self.flush()
        if begun is not None and begun.is_xa:
            self._xa_memory.count(self.open, f"{self.file}:{self._at}")
            return []
        if begun is None:
            return []
        taken, self.open = self.open[:-1], self.open[-1:]
        begun.emitted += len(taken)
        return taken

    # -- events ---------------------------------------------------------------------------------

    def _mapped_before(self, data: bytes) -> bool:
        """A short cut: the same table map stands before every statement."""
        end = len(data) - _CHECKSUM if self._form.checksum else len(data)
        reading = self.tables.known(data[_HEAD + _TABLE_ID + _MAP_FLAGS : end])
        if reading is None:
            return False
        self._readings[int.from_bytes(data[_HEAD : _HEAD + _TABLE_ID], "little")] = reading
        self._written.add(reading.path)
        size = int.from_bytes(data[9:13], "little")
        self._reached(int.from_bytes(data[13:17], "little"), size, artificial=False)
        return True

    def _moved(self, header: Header) -> None:
        self._reached(header.end, header.size, artificial=header.artificial)

    def _reached(self, low: int, size: int, *, artificial: bool) -> None:
        """Note where the event at hand stands; its header has 32 bits of that, or nothing."""
        self._at = self.end
        if artificial:
            return
        if low:
            end = (self.end & ~0xFFFFFFFF) | low
            if end < self.end:
                end += 1 << 32
            self._at = end - size
            self.end = end
        elif self._begun is not None:
            self.end += size

    def _take(self, event: Event, data: bytes) -> None:
        match event:
            case Rotate():
                self._rotated(event)
            case FormatDescription():
                self._described(event)
            case Heartbeat():
                self._heard(event)
            case Payload():
                self._moved(event.header)
                self._inner = inner_events(event, self._form)
                self.unpack()
            case _:
                self._moved(event.header)
                self._happened(event, data)
        if self._begun is None and self.offset > self._skip and not self._passing:
            if self.tables.ahead:
                self._settle(event.header)
            self.after = (self.file, self.end)  # nothing of a transaction stands before here

    def _settle(self, header: Header) -> None:
        """Emit columns that are certain by now, in a transaction of their own."""
        events = self.tables.settled_at(self.offset)
        if events:
            begun = self._begin("", header)
            name = f"{self.file}:{self.end}-columns"
            begun.transaction = Transaction(
                name, header.timestamp * 1_000_000, time.time_ns() // 1000
            )
            self._emit(events)
            self._committed()
        self.settled = self.tables.state

    def _happened(self, event: Event, data: bytes) -> None:
        match event:
            case Gtid():
                self._started(event)
            case Query():
                self._queried(event)
            case TableMap():
                self._mapped(event)
            case RowsEvent():
                self._changed(event, data)
            case Xid():
                self._committed()
            case XaPrepare():
                self._was_prepared(event)
            case RowsQuery():
                self._sql, self._written = event.sql, set()
            case Incident():
                raise SourceRefused(
                    f"the server lost events at {self.file}:{self._at}: {event.message}",
                    hint="Run `headrace snapshot SOURCE` to start again from a new snapshot.",
                )

    def _rotated(self, event: Rotate) -> None:
        if self._begun is not None and event.file != self.file:
            raise TruncatedBinlog(f"{self.file} ends within a transaction")
        if event.file != self.file:
            self.born = 0
        self.file, self.end = event.file, event.position

    def _described(self, event: FormatDescription) -> None:
        self._form = event
        if event.header.end and not event.header.artificial:
            self._moved(event.header)
        file, born = self._known
        if born and file == self.file and event.header.timestamp not in (born, 0):
            raise SourceReplaced(f"{self.file} on the server is not the file that was read")
        self.born = event.header.timestamp or self.born
        self._readings = {}

    def _heard(self, event: Heartbeat) -> None:
        """Behind a heartbeat nothing is left to send; what was passed over stood before it."""
        if self._by_gtid and self._begun is None and event.file == self.file:
            self.end = max(self.end, event.position)
            self._passing = False

    # -- transactions ---------------------------------------------------------------------------

    def _started(self, event: Gtid) -> None:
        if self._begun is not None:
            raise ProtocolError("a transaction began inside another")
        self._gtid = event.gtid
        begun = self._begin("" if event.gtid is None else str(event.gtid), event.header)
        if event.commit_time:
            _set(begun.transaction, "commit_time", event.commit_time)
        begun.is_xa = event.prepared_xa
        # MariaDB begins with this event what ends with a COMMIT.
        begun.committing = self._form.mariadb and not event.standalone

    def _begin(self, gtid: str, header: Header) -> OpenTransaction:
        name = gtid or f"{self.file}:{self._at}"
        now = time.time_ns() // 1000
        transaction = Transaction(name, header.timestamp * 1_000_000, now)
        skipped = (file_number(self.file), self._at) < self._skip
        self._begun = OpenTransaction(
            self.file, self._at, gtid, skipped, transaction, savepoints={}
        )
        return self._begun

    def _expect_begun(self, header: Header) -> OpenTransaction:
        # Servers without GTIDs begin with BEGIN, and a statement by itself with nothing.
        return self._begun or self._begin("", header)

    def _queried(self, event: Query) -> None:
        sql = event.sql.strip()
        begun = self._expect_begun(event.header)
        match sql.upper():
            case "BEGIN":
                begun.committing = True
                return
            case "COMMIT":
                self._committed()
                return
            case "ROLLBACK":
                self._rolled_back(begun, 0)
                self._committed()
                return
        self.flush()
        if found := XA.match(sql):
            self._branch(begun, found["verb"].upper(), xid(found["xid"]))
        elif found := SAVEPOINT.fullmatch(sql):
            begun.savepoints[savepoint(found["name"])] = begun.emitted + len(self.open)
        elif found := ROLLBACK_TO.fullmatch(sql):
            where = f"{self.file}:{self._at}"
            self._rolled_back(begun, changes_kept_by(begun.savepoints, found["name"], where))
        else:
            self._stated(begun, event)

    def _rolled_back(self, begun: OpenTransaction, kept: int) -> None:
        """Forget changes of the open transaction, all but the first `kept`."""
        self.flush()
        if kept < begun.emitted:
            raise ProtocolError(
                f"{self.file}:{self._at}: a transaction is rolled back of which a part is stored",
                hint="Run `headrace snapshot SOURCE` to start again from a new snapshot.",
            )
        del self.open[kept - begun.emitted :]
        begun.ordinal = kept

    def _stated(self, begun: OpenTransaction, event: Query) -> None:
        """A statement that is not about the transaction itself."""
        if not begun.skipped and event.done:
            statement = self._read(event)
            if isinstance(statement, DmlStatement):
                self._refuse(statement, event)
            else:
                self._emit(self.tables.defined(statement, event.sql, self.offset))
                self._readings = {}
        if not begun.committing:
            self._committed()

    def _read(self, event: Query) -> Any:
        try:
            return read(
                event.sql,
                database=event.database,
                sql_mode=event.sql_mode,
                folds=self.tables.folds,
            )
        except DecodeError as error:
            raise ProtocolError(
                # Without its text, which may have values: the server's mysqlbinlog shows it.
                f"{self.file}:{self._at}: a statement cannot be read"
            ) from error

    def _refuse(self, statement: DmlStatement, event: Query) -> None:
        if statement.path is not None and statement.path.schema in SYSTEM_SCHEMAS:
            return  # hosted servers write their own heartbeats so
        raise SourceRefused(
            f"{self.file}:{self._at}: {statement.verb} was logged as a statement, without its rows",
            hint="SET GLOBAL binlog_format = ROW; let the sessions that write connect anew, and "
            "run `headrace snapshot SOURCE` for a new snapshot.",
        )

    def _committed(self) -> None:
        begun = self._begun
        if begun is None:
            raise ProtocolError("a transaction ended that had not begun")
        if self._waiting:
            self._waiting.append(None)
        else:
            self._complete()
        self._ended(begun)

    def _complete(self) -> None:
        if self.open:
            _set(self.open[-1], "last", True)
            self.done += self.open
            self.open = []

    def _ended(self, begun: OpenTransaction) -> None:
        if not begun.skipped:
            self.after = (self.file, self.end)
            self._passing = False
            self.settled = self.tables.state
            if self._gtid is not None:
                self.gtids = self.gtids.add(self._gtid)
        self._gtid = None
        self._sql, self._written = "", set()
        self._begun = None

    # -- XA -------------------------------------------------------------------------------------

    def _branch(self, begun: OpenTransaction, verb: str, name: str) -> None:
        match verb:
            case "START" | "BEGIN":
                begun.committing = begun.is_xa = True
            case "COMMIT" | "ROLLBACK":
                self._decided(begun, name, commits=verb == "COMMIT")

    def _was_prepared(self, event: XaPrepare) -> None:
        self.flush()
        begun = self._begun
        if begun is None:
            raise ProtocolError("an XA transaction was prepared that had not begun")
        self._xa_memory.count(self.open, f"{self.file}:{self._at}")
        size = self._xa_memory.prepare()
        name = f"{event.gtrid.hex()}.{event.bqual.hex()}.{event.format_id}"
        waits = not event.one_phase and (not begun.skipped or name in self._pending)
        if not waits:
            self._xa_memory.decide(size)
        if event.one_phase and not begun.skipped:
            begun.is_xa = False
            self._committed()
            return
        if waits:
            self.prepared[name] = PreparedXa(self.open, begun.file, begun.position, size)
        self.open = []
        self._ended(begun)

    def _decided(self, begun: OpenTransaction, name: str, *, commits: bool) -> None:
        """Rows are logged when they are prepared, and are changes when they are committed."""
        prepared = self.prepared.pop(name, None) if not begun.skipped else None
        if prepared is not None:
            self._xa_memory.decide(prepared.size)
        if prepared is None and commits and not begun.skipped:
            raise PositionLost(
                f"{self.file}:{self._at}: an XA transaction is committed that was prepared before "
                "anything was read: its rows are not known"
            )
        if prepared is not None and commits and prepared.changes:
            metadata = prepared.changes[0].transaction.metadata
            _set(begun.transaction, "metadata", metadata)
            at = MysqlPosition(self.file, self._at, begun.gtid, begun.position)
            for change in prepared.changes:
                _set(change, "transaction", begun.transaction)
                _set(change, "position", at)
            self.open = prepared.changes
        self._committed()

    def born_of(self, file: str) -> int:
        """When a file was begun; 0: not known."""
        return self.born if file == self.file else 0

    @property
    def undecided(self) -> dict[str, tuple[str, int]]:
        """Where the prepared transactions begin, for the resume."""
        return {name: (each.file, each.begin) for name, each in self.prepared.items()}

    # -- rows -----------------------------------------------------------------------------------

    def _mapped(self, event: TableMap) -> None:
        reading, events = self.tables.mapped(event, self.offset)
        self._emit(events)
        self._readings[event.id] = reading
        self._written.add(reading.path)

    def _changed(self, event: RowsEvent, data: bytes) -> None:
        begun = self._expect_begun(event.header)
        reading = self._readings.get(event.table_id)
        if reading is None:
            raise ProtocolError(f"rows of table {event.table_id}, which was not described")
        if reading.table is None or (begun.skipped and not begun.is_xa):
            return
        if reading.annotates:
            self._annotated(reading, event)
            return
        if event.unchecked and event.kind is not RowsKind.INSERT:
            self._foreign_keys_off(reading.path)
        position = MysqlPosition(self.file, self._at, begun.gtid, begun.position)
        manner = Manner.UNKNOWN
        if reading.rows is not None and self._sql and not reading.rows.has_all(event):
            manner = manner_of(self._sql, reading.path, self._written)
        self._waiting.append(
            PendingRows(begun, reading, reading.table, event, position, data, manner)
        )

    def _foreign_keys_off(self, path: TablePath) -> None:
        before = self.tables.state
        self.tables.foreign_keys_off(path)
        if self.tables.state is not before:
            self.flush()
            self._readings = {
                number: known if self.tables.counts(known.path) else MappedTable(known.path)
                for number, known in self._readings.items()
            }

    def flush(self) -> None:
        """Turn the rows that wait into changes."""
        waiting, self._waiting = self._waiting, []
        found = decoded(waiting)
        for at, each in enumerate(waiting):
            if each is None:
                self._complete()
                continue
            rows = found.get(at)
            if not self.tables.counts(each.reading.path):
                continue  # its snapshot, which is to come, shows what happened
            if isinstance(rows, list) and each.reading.path not in self.tables.state.errored:
                self._add(each, rows)
                continue
            if isinstance(rows, DefaultsOfAnotherTime):
                self._read_anew(each.reading.path)
                continue
            if isinstance(rows, DecodeError):
                self._cannot_read(each.reading.path, rows)
            self.open.append(each.undecoded(self.tables.state.errored.get(each.reading.path, "")))

    def _add(self, pending: PendingRows, rows: list[Row]) -> None:
        path = pending.reading.path
        try:
            self.open += pending.changes(rows)
        except RowNotRead:
            self._read_anew(path)
        for child in self.tables.recomputed_by(path, rows):
            self._read_anew(child)

    def _read_anew(self, path: TablePath) -> None:
        self.tables.begin_anew(path)
        self._readings = {
            number: MappedTable(path) if known.path == path else known
            for number, known in self._readings.items()
        }
        snapshots = self.tables.state.snapshots
        self.settled = msgspec.structs.replace(self.settled, snapshots=snapshots)

    def _cannot_read(self, path: TablePath, error: DecodeError) -> None:
        if path in self.tables.state.errored:
            return
        self.tables.cannot_read(path, str(error))
        self._readings = {
            number: MappedTable(known.path, known.table) if known.path == path else known
            for number, known in self._readings.items()
        }
        errored = self.tables.state.errored
        self.settled = msgspec.structs.replace(self.settled, errored=errored)

    def _annotated(self, reading: MappedTable, event: RowsEvent) -> None:
        begun = self._begun
        assert begun is not None
        assert reading.rows is not None
        try:
            rows = reading.rows.read(event)
        except DecodeError:
            rows = [(None, None, BeforeKind.NONE, b"{}", None, ())]  # counts as no annotation
        for _, _, _, after, _, _ in rows:
            if after is None:
                continue  # the row was deleted again
            content = annotation(after)
            metadata, whole = annotated(begun.transaction.metadata, content)
            # Nobody has seen the transaction yet, and its changes share this one value.
            _set(begun.transaction, "metadata", metadata)
            if not whole:
                text = content.decode(errors="replace")
                message = {"prefix": "headrace", "transactional": True, "content": text}
                self._emit([(Op.MESSAGE, self._no_table, message)])

    def _emit(self, events: list[TableEvent]) -> None:
        """Add changes that are not about a row."""
        begun = self._begun
        if not events or begun is None or begun.skipped:
            return
        self.flush()
        position = MysqlPosition(self.file, self._at, begun.gtid, begun.position)
        for op, table, content in events:
            begun.ordinal += 1
            self.open.append(
                change_without_row(op, table, content, (begun.transaction, begun.ordinal, position))
            )
