"""A snapshot of tables in several sessions, and the position in the binary log that it shows."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pymysql.err import MySQLError, raise_mysql_exception

from ...change.event import Change
from ...errors import DecodeError, SourceError, SourceRefused, SourceUnavailable
from ..pace import RowPace
from .address import MysqlAddress, classify, error_number, quoted, run, shut
from .aside import LOCK_SECONDS, reason_of
from .batches import BATCH_ROWS, RowBatches, SnapshotRows
from .catalog import BinlogEnd, FoundTable, MysqlCatalog
from .decode.path import TablePath
from .decode.values import select_expression
from .dump import Packets, force_close
from .keys import KeyOrder
from .resume import DeclaredTable, KeyBound, PrimaryKeyRange

if TYPE_CHECKING:
    from pymysql.connections import Connection
    from pymysql.cursors import Cursor

logger = logging.getLogger(__name__)

RANGE_ROWS = 65_536  # that one session reads of a table while others read on behind them
_COM_QUERY = 0x03
_ATTEMPTS = 20  # to begin all sessions between two commits
_HELD_BATCHES = 4  # that are read and not handed over
_WAIT_SECONDS = 0.5  # between two tests whether it has been closed
_SILENCE = 3600.0  # seconds
_ERROR, _EOF = 0xFF, 0xFE
_LONGEST_EOF = 9

_SHORT_WAIT = f"SET SESSION lock_wait_timeout = {LOCK_SECONDS}"
_ISOLATION = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"
_SNAPSHOT = "START TRANSACTION WITH CONSISTENT SNAPSHOT"


@dataclass(frozen=True, slots=True, eq=False)
class TableTask:
    """A table to be read, by as many sessions as find a range of it that nobody reads."""

    path: TablePath
    declared: DeclaredTable
    rows: SnapshotRows
    order: KeyOrder | None  # None: it is read in whatever order the server has
    todo: list[PrimaryKeyRange]
    is_long: bool  # whether more than one session should read it

    def statement(self, part: PrimaryKeyRange) -> str:
        """The statement for the rows of a range."""
        columns = self.declared.columns
        chosen = ", ".join(select_expression(each, quoted(each.name)) for each in columns)
        return f"SELECT {chosen} FROM {self._ordered(part)}"

    def key_statement(self, part: PrimaryKeyRange) -> str:
        """The statement for the key up to which one session should read a range."""
        assert self.order is not None
        ordered = self._ordered(part)
        return f"SELECT {self.order.bound} FROM {ordered} LIMIT 1 OFFSET {RANGE_ROWS - 1}"

    def _ordered(self, part: PrimaryKeyRange) -> str:
        name = quoted(*self.path)
        if self.order is None:
            return name
        inside = self.order.inside(part)
        where = f" WHERE {inside}" if inside else ""
        return f"{name} FORCE INDEX (PRIMARY){where} ORDER BY {self.order.by}"


@dataclass(frozen=True, slots=True)
class CopiedRange:
    """Rows of a range, and what is left of it."""

    task: TableTask
    part: PrimaryKeyRange
    changes: Sequence[Change]
    left: tuple[PrimaryKeyRange, ...]  # in the order of their keys
    error: str = ""  # why the table cannot be read


class UnreadableTable(Exception):
    """One table of a snapshot cannot be read, and the others can."""

    def __init__(self, path: TablePath, reason: str) -> None:
        super().__init__(reason)
        self.path = path
        self.reason = reason


class MysqlSnapshot:
    """Sessions that show tables as they were at one position of the binary log."""

    def __init__(self, sessions: Sequence[_Session], end: BinlogEnd, closed: threading.Event):
        self._sessions = sessions
        self.end = end
        self._closed = closed
        self._taking = threading.Lock()
        self._read: queue.Queue[CopiedRange | Exception | None] = queue.Queue(_HELD_BATCHES)

    @classmethod
    def open(
        cls,
        address: MysqlAddress,
        catalog: MysqlCatalog,
        tables: Sequence[FoundTable],
        *,
        workers: int,
    ) -> MysqlSnapshot:
        """Begin a snapshot, or keep a table that has none from being written."""
        transactional = all(table.transactional for table in tables)
        connections: list[Connection[Cursor]] = []
        with ExitStack() as stack:
            for _ in range(workers if transactional else 1):
                connections.append(address.connect())
                stack.callback(force_close, connections[-1])
                run(connections[-1], _SHORT_WAIT)
            if transactional:
                connections, end = _snapshot(connections, address, catalog, tables)
            else:
                # No transaction shows its rows: it must not be written while they are read.
                names = ", ".join(f"{quoted(*each.path)} READ" for each in tables)
                run(connections[0], f"LOCK TABLES {names}")
                end = catalog.exact_end()
            _expect_nothing_prepared(catalog)
            stack.pop_all()
        closed = threading.Event()
        return cls([_Session(connection, closed) for connection in connections], end, closed)

    def hold(self, table: FoundTable) -> None:
        """Keep a table's definition as it is until the snapshot is done."""
        self._sessions[0].run(f"SELECT 1 FROM {quoted(*table.path)} LIMIT 0")

    def copy(self, tasks: Sequence[TableTask], pace: RowPace) -> Generator[CopiedRange | None]:
        """Read every table; None: nothing has come for a moment.

        What comes of one range comes in order, and behind the news that it was cut from another.
        """
        threads = [
            threading.Thread(target=self._work, args=(session, tasks, pace), daemon=True)
            for session in self._sessions
        ]
        for thread in threads:
            thread.start()
        try:
            yield from self._collect(len(threads))
        finally:
            self.wake()
            self._drain(threads)

    def _collect(self, working: int) -> Iterator[CopiedRange | None]:
        while working:
            try:
                copied = self._read.get(timeout=_WAIT_SECONDS)
            except queue.Empty:
                yield None
                continue
            if isinstance(copied, Exception):
                raise copied
            if copied is None:
                working -= 1
            else:
                yield copied

    def _drain(self, threads: list[threading.Thread]) -> None:
        """Let workers that wait for the server, or to hand something over, come to their end."""
        for session in self._sessions:
            session.shut()
        while any(thread.is_alive() for thread in threads):
            with suppress(queue.Empty):
                self._read.get(timeout=0.05)

    def _work(self, session: _Session, tasks: Sequence[TableTask], pace: RowPace) -> None:
        try:
            while not self._closed.is_set() and (taken := self._take(session, tasks)):
                with _reading(taken[0]):
                    self._read_range(session, *taken, pace)
            self._read.put(None)
        except Exception as error:  # noqa: BLE001 - raised again by whoever collects
            self._read.put(error)

    def _take(
        self, session: _Session, tasks: Sequence[TableTask]
    ) -> tuple[TableTask, PrimaryKeyRange] | None:
        """A range that nobody reads; a long one is cut, and what is behind is left to others."""
        with self._taking:
            task = next((task for task in tasks if task.todo), None)
            if task is None:
                return None
            whole = task.todo.pop(0)
            bound = self._cut(session, task, whole)
            if bound is None:
                return task, whole
            part, rest = PrimaryKeyRange(whole.after, bound), PrimaryKeyRange(bound, whole.upto)
            task.todo.insert(0, rest)
            self._read.put(CopiedRange(task, whole, [], (part, rest)))
            return task, part

    def _cut(self, session: _Session, task: TableTask, whole: PrimaryKeyRange) -> KeyBound | None:
        """Where one session should end to read; None: a range is not worth cutting."""
        if len(self._sessions) == 1 or task.order is None or not task.is_long:
            return None
        with _reading(task):
            found = session.run(task.key_statement(whole))
        return tuple(map(str, found[0])) if found else None

    def _read_range(
        self, session: _Session, task: TableTask, part: PrimaryKeyRange, pace: RowPace
    ) -> None:
        batches = RowBatches(task.rows, most=pace.piece(BATCH_ROWS))
        arriving = session.rows(task.statement(part))
        try:
            for packets in arriving:
                for batch in batches.take(packets):
                    rest = part
                    if task.order is not None and task.order.certain:
                        rest = PrimaryKeyRange(task.order.bound_of(batch.last_key), part.upto)
                    self._hand_over(CopiedRange(task, part, batch.changes, (rest,)), pace)
                    part = rest
            if not self._closed.is_set():
                self._hand_over(CopiedRange(task, part, batches.cut().changes, ()), pace)
        except DecodeError as error:
            with self._taking:
                task.todo.clear()
            self._read.put(CopiedRange(task, part, [], (), str(error)))
            # The session has other ranges to read: the rest of this answer must be gone.
            for _ in arriving:
                pass

    def _hand_over(self, copied: CopiedRange, pace: RowPace) -> None:
        self._closed.wait(pace.delay(len(copied.changes)))
        self._read.put(copied)

    def wake(self) -> None:
        """End the snapshot from another thread."""
        self._closed.set()

    def close(self) -> None:
        """End the snapshot and its sessions."""
        self._closed.set()
        for session in self._sessions:
            session.close()


@dataclass(slots=True)
class _Session:
    """One of the sessions of a snapshot."""

    connection: Connection[Cursor]
    closed: threading.Event
    _heard: float = field(default_factory=time.monotonic)

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        """The rows of a statement that has few."""
        return run(self.connection, statement)

    def rows(self, statement: str) -> Iterator[list[bytes]]:
        """The rows of a statement as the server sends them."""
        try:
            yield from self._rows(statement)
        except MySQLError as error:
            raise classify(error, "the snapshot failed") from error
        except OSError as error:
            raise SourceUnavailable("the connection to the server broke in a snapshot") from error

    def _rows(self, statement: str) -> Iterator[list[bytes]]:
        connection: Any = self.connection
        connection._execute_command(_COM_QUERY, statement.encode())
        self._heard = time.monotonic()
        packets_of = Packets(connection)
        head = 2  # the columns come first, then an end, then the rows
        while not self.closed.is_set():
            packets = packets_of.receive(_WAIT_SECONDS)
            if packets is None:
                self._expect_heard()
                continue
            self._heard = time.monotonic()
            rows: list[bytes] = []
            for packet in packets:
                if packet[0] == _ERROR:
                    raise_mysql_exception(packet)
                if packet[0] == _EOF and len(packet) < _LONGEST_EOF:
                    head -= 1
                    if not head:
                        yield rows
                        return
                elif head == 1:
                    rows.append(packet)
            yield rows

    def _expect_heard(self) -> None:
        if time.monotonic() - self._heard > _SILENCE:
            raise SourceUnavailable(f"the server has sent no row for {_SILENCE:.0f} s")

    def shut(self) -> None:
        """End whatever waits for the server."""
        shut(self.connection)

    def close(self) -> None:
        """End the session."""
        force_close(self.connection)


@contextmanager
def _reading(task: TableTask) -> Iterator[None]:
    """Raise UnreadableTable for errors that concern this table alone."""
    try:
        yield
    except SourceError as error:
        raise UnreadableTable(task.path, reason_of(error)) from error


def _snapshot(
    connections: list[Connection[Cursor]],
    address: MysqlAddress,
    catalog: MysqlCatalog,
    tables: Sequence[FoundTable],
) -> tuple[list[Connection[Cursor]], BinlogEnd]:
    """Begin a transaction in each session; gives those that show one position."""
    for connection in connections:
        run(connection, _ISOLATION)
    if catalog.server().mariadb:
        return _snapshot_without_lock(connections, catalog)
    locking = address.connect()
    try:
        _lock(locking, tables)
        _begin(connections)
        return connections, catalog.end()
    finally:
        force_close(locking)  # unlocks


def _begin(connections: Sequence[Connection[Cursor]]) -> None:
    """Begin a transaction in each session, all within as little time as can be."""
    try:
        several: Sequence[Any] = connections
        for connection in several:
            connection._execute_command(_COM_QUERY, _SNAPSHOT)
        for connection in several:
            connection._read_ok_packet()
    except (MySQLError, OSError) as error:
        raise classify(error, "the snapshot failed") from error


def _snapshot_without_lock(
    connections: list[Connection[Cursor]], catalog: MysqlCatalog
) -> tuple[list[Connection[Cursor]], BinlogEnd]:
    """MariaDB knows where in the binary log a snapshot stands, so nothing has to be locked.

    Sessions between which another one has committed begin again. Where that happens every time,
    those that stand at one position are enough.
    """
    for _ in range(_ATTEMPTS):
        before = catalog.end()
        _expect_nothing_prepared(catalog)
        _begin(connections)
        places = [_place(connection) for connection in connections]
        ((place, count),) = Counter(places).most_common(1)
        disturbed = _any_xa_between(catalog, before, place)
        if count == len(connections) and not disturbed:
            break
    else:
        if disturbed:
            raise SourceUnavailable("XA transactions end too often to begin a snapshot")
        logger.warning("the server commits too often sessions=%d of=%d", count, len(connections))
    agreeing = []
    for connection, its_place in zip(connections, places, strict=True):
        if its_place == place:
            agreeing.append(connection)
        else:
            force_close(connection)
    return agreeing, BinlogEnd(*place, catalog.gtids_at(*place))


def _any_xa_between(catalog: MysqlCatalog, before: BinlogEnd, place: tuple[str, int]) -> bool:
    """Whether XA transactions were prepared or decided between two places, as far as is known.

    MariaDB writes an XA COMMIT to the binary log first, and commits the rows a moment later: a
    snapshot that begins in between stands behind the XA COMMIT and does not show them.
    """
    file, position = place
    if file != before.file:
        return True
    if position == before.position:
        return False
    events = catalog.rows("SHOW BINLOG EVENTS IN %s FROM %s", file, before.position)
    return any(
        int(begin) < position and kind != "Annotate_rows" and "XA " in str(text)
        for _, begin, kind, _, _, text in events
    )


def _place(connection: Connection[Cursor]) -> tuple[str, int]:
    """The place in the binary log that a transaction shows."""
    status = {
        str(name).lower(): str(value)
        for name, value in run(connection, "SHOW STATUS LIKE 'binlog_snapshot_%'")
    }
    if not status.get("binlog_snapshot_file"):
        raise SourceRefused("the server writes no binary log (log_bin is off)")
    return status["binlog_snapshot_file"], int(status["binlog_snapshot_position"])


def _lock(connection: Connection[Cursor], tables: Sequence[FoundTable]) -> None:
    """Lock out writers, for as long as it takes to begin a snapshot.

    A session that waits for a lock keeps writers waiting too, so the wait is short. A transaction
    that wrote to these tables and goes on stands in the way of the first statement alone, and a
    query that runs for long of the second, which also holds up later sessions.
    """
    if not tables:
        return
    run(connection, _SHORT_WAIT)
    names = ", ".join(f"{quoted(*each.path)} READ" for each in tables)
    try:
        run(connection, f"LOCK TABLES {names}")
    except SourceError as error:
        # By its number: the server's own text of an error may have values.
        logger.warning(
            "cannot lock the tables of a snapshot, so all tables are locked error=%s",
            error_number(error),
        )
        run(connection, "FLUSH TABLES WITH READ LOCK")


def _expect_nothing_prepared(catalog: MysqlCatalog) -> None:
    """The rows of an XA transaction stand where it was prepared, and count when it commits."""
    with suppress(SourceRefused):  # MySQL needs a privilege for it
        if prepared := catalog.rows("XA RECOVER"):
            raise SourceUnavailable(
                f"{len(prepared)} XA transactions are prepared: a snapshot waits for their end"
            )
