"""A SQLite database as the stream reads it: looks at its state, entries, rows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import apsw

from ...errors import PositionLost, SourceReplaced, SourceUnavailable
from . import installation, seen
from .connections import BUSY_MILLISECONDS, Row, connect, not_installed, page, quoted, rows, writing
from .triggers import VALUES, WIDTH
from .values import Broken
from .wal import Wal

PAGE = 4096  # entries read at once
_SHORT_PAGE = 128  # where a reader keeps writers waiting
_UNSETTLED_SECONDS = 0.1  # a file's time is this coarse, and coarser nowhere
_REREAD_SECONDS = 1.0  # between two looks at the database itself, where the file's time is enough

_IMPATIENT = 20  # milliseconds to wait for a lock, for what may as well be done later

_STATE = """
    SELECT uuid, last, (SELECT rootpage FROM main.sqlite_schema WHERE name = 'headrace_state')
    FROM headrace_state"""
_ENTRIES = f"""
    SELECT entry, layout, op, at, token, {VALUES} FROM headrace_changes
    WHERE entry > ? AND entry <= ? ORDER BY entry LIMIT ?"""
_TEXT = "CASE typeof({0}) WHEN 'text' THEN CAST({0} AS BLOB) END, CASE typeof({0}) WHEN 'text' \
THEN NULL ELSE {0} END"
_RAW = ", ".join(_TEXT.format(f"v{n}") for n in range(WIDTH))
_MARKS = """
    SELECT entry, layout, op, at, token FROM headrace_changes
    WHERE entry > ? AND entry <= ? ORDER BY entry"""
_SEAL = "SELECT layout, op, at, token FROM headrace_changes WHERE entry = ?"
_LOST = """the append table has no entry {}: somebody else has deleted it"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The database at one moment, which stays as it was until it is released."""

    connection: apsw.Connection
    uuid: str
    last: int  # the newest entry
    page: int  # where the state's row lies
    schema: int  # changes with every DDL

    def seal(self, entry: int) -> str:
        """What an entry is known by; an older copy of the database has another one there."""
        return _sealed(self.connection, entry)

    def is_deleted(self, entry: int, seal: str) -> bool:
        """Whether somebody has deleted an entry that had this seal.

        Triggers of earlier versions count from 1 again where all were deleted: then a reader has
        stored more than there are.
        """
        if entry <= self.last:
            return bool(seal) and not self.seal(entry)
        ((stored,),) = rows(self.connection, "SELECT max(acked) FROM headrace_readers")
        return (stored or 0) > self.last

    def release(self) -> None:
        """Let the moment go."""
        if self.connection.in_transaction:
            self.connection.execute("COMMIT")


class Database:
    """One connection that writes and watches, and two that hold snapshots in turn."""

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        self._file = self._found()
        self._main = connect(self.path)
        self._reading = self._main
        self._opened = [self._main]
        self._spare: list[apsw.Connection] = []
        self.uuid = ""
        self.wal: Wal | None = None
        self._read_at = -_REREAD_SECONDS
        self._read_version: tuple[int, ...] = (0,)

    def close(self) -> None:
        """Let go of the file.

        Whoever closes a database last moves all of the write-ahead log into it, and lets nobody in
        meanwhile: so there shall be little left to move.
        """
        for connection in self._opened:
            if connection is not self._main:
                connection.close()
        with suppress(apsw.Error):
            if self.wal is not None:
                self.checkpoint()
        self._main.close()

    def expect_installed(self) -> None:
        """Raise unless the triggers' tables are there."""
        installation.expect_installed(self._main, self.path)

    def expect_same_file(self) -> None:
        """Whoever puts another file in place leaves us with one that nobody else sees."""
        if self._found() != self._file:
            raise SourceUnavailable(f"{self.path} is another file than it was")

    def version(self) -> tuple[int, ...]:
        """Differs after every commit of anybody else.

        Without a write-ahead log, asking the database takes a lock that a writer may meet. The
        file's time needs none: but two commits may have the same, so that it counts once more a
        moment later.
        """
        if self.wal is not None:
            return self._data_version()
        now = time.monotonic()
        if now - self._read_at >= _REREAD_SECONDS:
            self._read_at, self._read_version = now, self._data_version()
        try:
            found = os.stat(self.path)
        except OSError:
            return self._data_version()
        settled = time.time() - found.st_mtime > _UNSETTLED_SECONDS
        return *self._read_version, found.st_mtime_ns, found.st_size, settled

    def _data_version(self) -> tuple[int, ...]:
        return (int(rows(self._main, "PRAGMA main.data_version")[0][0]),)

    def snapshot(self) -> Snapshot:
        """The database as it is now."""
        connection = self._spare.pop() if self._spare else self._another()
        connection.execute("BEGIN")
        # Without a write-ahead log a writer that waits for this reader lets no other one begin, so
        # a second connection of ours would wait for the first.
        self._reading = connection
        state = rows(connection, _STATE)
        if not state:
            raise not_installed(self.path)
        (schema,) = rows(connection, "PRAGMA main.schema_version")[0]
        uuid, last, page = state[0]
        return Snapshot(connection, uuid, last, page, schema)

    def _another(self) -> apsw.Connection:
        connection = connect(self.path)
        self._opened.append(connection)
        return connection

    def release(self, snapshot: Snapshot | None) -> None:
        """Let a moment go."""
        if snapshot is not None and snapshot.connection not in self._spare:
            snapshot.release()
            if self._reading is snapshot.connection:
                self._reading = self._main
            self._spare.append(snapshot.connection)

    def begin_watch(self, uuid: str) -> None:
        """Look for ends of transactions in the write-ahead log, if there is one."""
        (mode,) = rows(self._main, "PRAGMA main.journal_mode")[0]
        self.wal = Wal(self.path, uuid) if mode == "wal" else None

    # -- entries --------------------------------------------------------------------------------

    def entries(self, after: int, upto: int) -> list[Row]:
        """The next entries, as many as a page holds."""
        most = PAGE if self.wal is not None else _SHORT_PAGE
        cursor = self._reading.execute(_ENTRIES, (after, upto, most))
        found: list[Row]
        try:
            # In one go, where each moment counts.
            found = page(cursor, most) if self.wal is not None else cursor.fetchall()
        except UnicodeDecodeError:
            found = self._raw_entries(after, upto)
        finally:
            cursor.close()
        if not found or found[0][0] != after + 1 or found[-1][0] - after != len(found):
            missing = next((n for n, r in enumerate(found, after + 1) if r[0] != n), after + 1)
            raise PositionLost(_LOST.format(missing))
        return found

    def all_entries(self, after: int, upto: int) -> Iterator[Row]:
        """All entries between two, a page at a time."""
        while after < upto:
            found = self.entries(after, upto)
            yield from found
            after = found[-1][0]

    def marks(self, after: int, upto: int) -> list[Row]:
        """The same without values."""
        return rows(self._reading, _MARKS, after, upto)

    def notes(self, after: int, upto: int) -> list[Any]:
        """The annotations between two entries."""
        query = "SELECT CAST(v0 AS BLOB) FROM headrace_changes WHERE entry > ? AND entry <= ? \
AND op = 'N' ORDER BY entry"
        return [note for (note,) in rows(self._reading, query, after, upto)]

    def seal(self, entry: int) -> str:
        """What an entry is known by."""
        return _sealed(self._reading, entry)

    def ends(self, after: int) -> list[int]:
        """Where transactions end, as far as somebody has noted it."""
        query = "SELECT entry FROM headrace_ends WHERE entry > ? ORDER BY entry"
        return [entry for (entry,) in rows(self._reading, query, after)]

    def _raw_entries(self, after: int, upto: int) -> list[Row]:
        (encoding,) = rows(self._reading, "PRAGMA main.encoding")[0]
        query = _ENTRIES.replace(VALUES, _RAW)
        return [
            (*row[:5], *_values(row[5:], encoding))
            for row in rows(self._reading, query, after, upto, PAGE)
        ]

    def layout(self, number: int) -> tuple[installation.InstalledTable, int | None] | None:
        """A layout, also one that has gone, and the one that it follows."""
        return installation.layout(self._reading, number)

    # -- what is written ------------------------------------------------------------------------

    def renew(self, globs: Sequence[str]) -> installation.Report:
        """Give every table the triggers that it should have."""
        with writing(self._main):
            return installation.renew(self._main, globs)

    def join(self, name: str, reader: str) -> tuple[str, int, str]:
        """Begin as a new reader: the database's identity, the entry to go on from, its seal."""
        with writing(self._main):
            uuid, last, _ = rows(self._main, _STATE)[0]
            statement = "INSERT OR REPLACE INTO headrace_readers VALUES (?, ?, ?, 1)"
            self._main.execute(statement, (name, reader, last))
            return str(uuid), int(last), _sealed(self._main, last)

    def rejoin(self, name: str, reader: str, looks: int) -> int:
        """Go on as a reader that the database knows; how often that has happened."""
        with writing(self._main):
            found = rows(self._main, "SELECT id, looks FROM headrace_readers WHERE name = ?", name)
            if not found or found[0][0] != reader:
                raise PositionLost(f"{self.path} keeps nothing for source {name}, or for its log")
            if found[0][1] < looks:
                raise SourceReplaced(f"{self.path} is an older copy of the database")
            now = int(found[0][1]) + 1
            self._main.execute("UPDATE headrace_readers SET looks = ? WHERE name = ?", (now, name))
        return now

    def note(self, ends: Sequence[int]) -> bool:
        """Note where transactions end; False: somebody writes just now."""
        statement = "INSERT OR IGNORE INTO headrace_ends VALUES (?)"
        try:
            with self._impatient(), writing(self._main):
                self._main.executemany(statement, [(end,) for end in ends])
        except apsw.BusyError:
            return False
        return True

    def trim(self, reader: tuple[str, str], acked: int, *, most: int) -> int | None:
        """Delete entries that every reader has stored, up to the one returned, not all at once.

        None: somebody writes just now. The reader is known by its name and its id.
        """
        try:
            with self._impatient(), writing(self._main):
                return self._trim(reader, acked, most)
        except apsw.BusyError:
            return None

    @contextmanager
    def _impatient(self) -> Iterator[None]:
        self._main.set_busy_timeout(_IMPATIENT)
        try:
            yield
        finally:
            self._main.set_busy_timeout(BUSY_MILLISECONDS)

    def _trim(self, reader: tuple[str, str], acked: int, most: int) -> int:
        update = "UPDATE headrace_readers SET acked = max(acked, ?) WHERE name = ? AND id = ?"
        self._main.execute(update, (acked, *reader))
        if not self._main.changes():
            raise PositionLost(
                f"another log reads {self.path} as source {reader[0]}",
                hint="Stop one of the two, or give its source a name of its own.",
            )
        # The last that a reader has stored stays: by it the reader knows the database again, and
        # of all the newest, from which the next one is counted.
        (upto,) = rows(
            self._main,
            """SELECT min((SELECT min(acked) - 1 FROM headrace_readers),
                          (SELECT min(entry) + ? FROM headrace_changes))""",
            most,
        )[0]
        if upto is None:
            return 0
        self._main.execute("DELETE FROM headrace_changes WHERE entry <= ?", (upto,))
        self._main.execute("DELETE FROM headrace_ends WHERE entry <= ?", (upto,))
        seen.remember_entry(self._main)
        return int(upto)

    def checkpoint(self) -> bool | None:
        """Move what can be moved into the database itself; whether that was all.

        None: somebody else is at it, and may be waiting for our snapshot to end.
        """
        busy, frames, moved = rows(self._main, "PRAGMA main.wal_checkpoint(PASSIVE)")[0]
        return None if busy else bool(frames == moved)

    def _found(self) -> tuple[int, int]:
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise SourceUnavailable(f"there is no file {self.path}") from error
        return found.st_dev, found.st_ino


def _sealed(connection: apsw.Connection, entry: int) -> str:
    found = rows(connection, _SEAL, entry)
    return " ".join(map(str, found[0])) if found else ""


def read(connection: apsw.Connection, table: str, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of a table."""
    names = ", ".join(map(quoted, columns))
    yield from connection.execute(f"SELECT {names} FROM main.{quoted(table)}")


def _values(raw: Row, encoding: str) -> list[Any]:
    pairs = zip(raw[::2], raw[1::2], strict=True)
    return [value if data is None else _decoded(data, encoding) for data, value in pairs]


def _decoded(data: bytes, encoding: str) -> str | Broken:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        return Broken(data)
