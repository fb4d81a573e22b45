"""Databases of SQLite: written to, captured, and compared."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import apsw

from headrace.capture import Capture
from headrace.change.event import Change, Op
from headrace.change.replay import Replay, Row, TableName
from headrace.log import Log
from headrace.sources import Phase, Source, Status
from headrace.sources.sqlite import Sqlite, alter, install
from headrace.sources.sqlite.connections import rows as rows_from
from headrace.sources.sqlite.installation import is_stale
from headrace.sources.sqlite.schema import TABLES
from headrace.testing import Value, wait_until

SOURCE = "shop"
PATIENCE = 120.0  # seconds; far more than anything here takes

VALUES = {
    "integer": Value("integer", "-2147483648", "-2147483648"),
    "big integer": Value("bigint", "9223372036854775807", "9223372036854775807"),
    "decimal": Value("numeric(30,10)", "'12345678901234567.1'", "12345678901234568"),
    "text": Value(
        "text", """'a "quoted" \\ word\nand\tmore'""", r'"a \"quoted\" \\ word\nand\tmore"'
    ),
    "unicode": Value("varchar(50)", "'é 水 🌊'", '"é 水 🌊"'),
    "binary": Value("blob", "x'00ff10'", '"AP8Q"'),
    "date": Value("date", "'2024-02-29'", '"2024-02-29"'),
    "time": Value("time", "'23:59:59.5'", '"23:59:59.5"'),
    "moment": Value("timestamp", "'2025-01-15 10:30:00'", '"2025-01-15 10:30:00"'),
    "real": Value("real", "0.1", "0.1"),
    "whole real": Value("double", "-5", "-5.0"),
    "infinity": Value("real", "-9e999", '"-Infinity"'),
    "blob in text": Value("text", "x'ff'", '{"base64":"/w=="}'),
    "text in blob": Value("blob", "'hi'", '{"text":"hi"}'),
    "text in integer": Value("integer", "'many'", '"many"'),
    "anything": Value("", "1.0", "1.0"),
    "text with a zero": Value("text", "'a' || char(0) || 'b'", r'"a\u0000b"'),
}


def sqlite(path: Path, **settings: Any) -> Sqlite:
    """The source that captures a database."""
    given: dict[str, Any] = {"name": SOURCE, "path": str(path), "poll_seconds": 0.005}
    return Sqlite(**given | settings)


class Connected:
    """A session of SQLite, by the library that Headrace uses.

    Locks of a file belong to the process: two libraries in one would not keep each other out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = apsw.Connection(str(path))
        self._connection.set_busy_timeout(20_000)

    def execute(self, statement: str) -> Sequence[tuple[Any, ...]]:
        """Run one statement, and give its rows if it has any."""
        if statement.startswith("ALTER"):
            alter(str(self._path), statement)
            return []
        if not self._connection.in_transaction:
            self._connection.execute("BEGIN IMMEDIATE")
        return self._connection.execute(statement).fetchall()

    def commit(self) -> None:
        """End the transaction."""
        if self._connection.in_transaction:
            self._connection.execute("COMMIT")

    def rollback(self) -> None:
        """End the transaction as if it had never been."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def close(self) -> None:
        """Let go of the database."""
        self._connection.close()


@dataclass(frozen=True, slots=True)
class SqlitePlace:
    """A database of SQLite, and a source over it."""

    path: Path
    wal: bool = True
    schema: str = "main"

    def source(self) -> Source:
        """The source under test."""
        return sqlite(self.path)

    def connect(self) -> Connected:
        """Another connection."""
        return Connected(self.path)

    def altered(self) -> None:
        """What the docs tell people to run after DDL of their own."""
        install(str(self.path), ["*"], wal=self.wal)

    @contextmanager
    def another(self) -> Iterator[SqlitePlace]:
        """A database in another file."""
        folder = self.path.parent / "elsewhere"
        folder.mkdir()
        yield SqlitePlace(folder / self.path.name)

    def stop(self) -> None:
        """Take the file away."""
        os.rename(self.path, f"{self.path}.away")

    def start(self) -> None:
        """Put it back."""
        os.rename(f"{self.path}.away", self.path)


class Captured:
    """A running capture of a database, and what it has put into the log."""

    def __init__(self, path: Path, log: Log, **settings: Any) -> None:
        self.path = path
        self.log = log
        self.source = sqlite(path, **settings)
        self.capture = Capture(self.source, log)

    def start(self) -> None:
        """Begin, without waiting."""
        self.capture = Capture(self.source, self.log)
        self.capture.start()

    @property
    def status(self) -> Status:
        """How the capture is doing."""
        return self.capture.status()

    def until(self, condition: Callable[[], Any], message: str) -> None:
        """Wait for a condition; fails at once when the capture has halted meanwhile."""

        def holds() -> bool:
            status = self.status
            assert status.phase is not Phase.HALTED, f"{status.error} {status.hint}"
            return bool(condition())

        wait_until(holds, timeout=PATIENCE, message=message)

    def until_halted(self) -> Status:
        """Wait until the capture has given up, and say why."""
        wait_until(lambda: self.status.phase is Phase.HALTED, timeout=PATIENCE, message="halted")
        return self.status

    def catch_up(self) -> None:
        """Wait until everything that is committed now is in the log."""
        self.until(
            lambda: caught_up(self.path, self.log.resume(self.source.name)), "it has caught up"
        )
        self.log.abandon("nobody")  # waits for its turn: what is on disk is visible then

    def changes(self, *ops: Op, table: str = "") -> list[Change]:
        """What the log holds once it has caught up."""
        self.catch_up()
        return [
            change
            for change in self.log.read(0, limit=1 << 30)
            if (not ops or change.op in ops) and (not table or change.table.name == table)
        ]

    def assert_replays(self, *, surprises: bool = False) -> None:
        """The log adds up to the database."""
        compare(self.path, self.changes(), surprises=surprises)


@contextmanager
def captured(path: Path, folder: Path, **settings: Any) -> Iterator[Captured]:
    """Capture a database that has its triggers; the block begins when it is copied."""
    with Log.open(folder / "log") as log:
        feed = Captured(path, log, **settings)
        try:
            feed.start()
            feed.catch_up()
            yield feed
        finally:
            feed.capture.stop()


def caught_up(path: Path, resume: bytes | None) -> bool:
    """Whether a log that resumes here has all of a database, its present tables included."""
    if resume is None or b'"copies"' not in resume:
        return False
    stored = json.loads(resume)
    query = "SELECT layout FROM headrace_layouts WHERE gone IS NULL"
    with closing(apsw.Connection(str(path))) as connection:
        connection.set_busy_timeout(20_000)
        with connection:
            ((last,),) = connection.execute("SELECT last FROM headrace_state").fetchall()
            layouts = {layout for (layout,) in connection.execute(query)}
            stale = is_stale(connection, ["*"])
    copies = stored["copies"].values()
    done = {copy["layout"] for copy in copies if copy["done"]}
    return bool(stored["position"] == last and done == layouts and not stale)


def compare(path: Path, changes: Sequence[Change], *, surprises: bool = False) -> None:
    """The changes add up to the database: the same tables, rows and types."""
    replay = Replay.of(changes)
    with closing(apsw.Connection(str(path))) as connection:
        connection.set_busy_timeout(20_000)
        there = tables_of(connection)
        for name, rows in there.items():
            replayed = replay.rows(TableName(SOURCE, "main", name))
            assert ordered(replayed) == ordered(rows), name
    for table in replay.tables:
        assert table.name in there or replay.rows(table) == [], table
    if not surprises:
        assert replay.surprises == []


def tables_of(connection: apsw.Connection) -> dict[str, list[Row]]:
    """Every table of a database, its values as an image should tell them."""
    query = f"""SELECT name FROM pragma_table_list WHERE schema = 'main' AND type = 'table'
               AND name NOT LIKE 'sqlite%' AND name NOT IN {TABLES}"""
    return {name: rows_of(connection, name) for (name,) in rows_from(connection, query)}


def rows_of(connection: apsw.Connection, table: str) -> list[Row]:
    """The rows of a table."""
    name = table.replace('"', '""')
    columns = rows_from(connection, f'PRAGMA table_xinfo("{name}")')
    names = ", ".join('"' + column[1].replace('"', '""') + '"' for column in columns)
    types = [str(column[2]).upper() for column in columns]
    return [
        {
            column[1]: _told(value, "BLOB" in declared)
            for column, declared, value in zip(columns, types, row, strict=True)
        }
        for row in connection.execute(f'SELECT {names} FROM "{name}"')
    ]


def _told(value: Any, blobs: bool) -> Any:
    match value:
        case bytes():
            text = base64.b64encode(value).decode()
            return text if blobs else {"base64": text}
        case str():
            return {"text": value} if blobs else value
        case float():
            return Decimal(repr(value)) if abs(value) < float("inf") else str(Decimal(value))
    return value


def ordered(rows: Sequence[Row]) -> list[str]:
    """Rows in an order that depends on nothing but themselves; a real is not an integer."""
    return sorted(
        repr([(name, type(row[name]).__name__, row[name]) for name in sorted(row)]) for row in rows
    )


def run(path: Path, script: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Another process that writes, over Python's own SQLite; `path` is its `sys.argv[1]`."""
    command = [sys.executable, "-c", script, str(path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE)
