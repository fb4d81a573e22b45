"""A database that is captured into a log of its own while a test writes to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from psycopg import sql

from headrace.change.event import Batch, Change, Op
from headrace.change.lsn import parse_lsn
from headrace.change.replay import Replay, Row, TableName
from headrace.log import Log
from headrace.secret import Secret
from headrace.sources import Source, Stream
from headrace.sources.postgres import Postgres
from headrace.testing import PostgresDatabase
from tests.sources.captures import TIMEOUT, CapturedSource

SOURCE = "shop"
_MARK = "test.mark"


def postgres(database: PostgresDatabase, **settings: Any) -> Postgres:
    """The source that captures a database."""
    given: dict[str, Any] = {"name": SOURCE, "url": Secret(database.url), "tables": ("*.*",)}
    given |= settings
    # Slots belong to the whole server, and tests share it.
    given.setdefault("slot", f"{given['name']}_{database.name}")
    return Postgres(**given)


class Captured(CapturedSource[Postgres]):
    """A running capture, and what it has put into the log."""

    def __init__(self, database: PostgresDatabase, log: Log, source: Postgres) -> None:
        super().__init__(log, source)
        self.database = database

    def until_caught_up(self) -> None:
        """Wait until everything that is committed now is in the log."""
        name = uuid4().hex
        after = self.log.latest_sequence
        self.database.execute("SELECT pg_logical_emit_message(true, %s, %s)", (_MARK, name))
        said = msgspec.json.encode(name)

        def arrived() -> bool:
            nonlocal after
            news = self.log.read(after, limit=10_000)
            after = news[-1].sequence if news else after
            return any(_is_mark(change) and said in (change.after or b"") for change in news)

        self.until(arrived, "the log holds everything that was committed")

    def counts(self, change: Change) -> bool:
        """Whether a change is not a mark, by which the log is known to have caught up."""
        return not _is_mark(change)

    def replay(self) -> Replay:
        """The rows that the log adds up to."""
        self.until_caught_up()
        return Replay.of(self.stored())

    def assert_replays(self, *tables: str, surprises: bool = False) -> None:
        """The log adds up to the rows of these tables of the schema public."""
        replay = self.replay()
        for table in tables:
            replayed = replay.rows(TableName(self.source.name, "public", table))
            assert ordered(replayed) == ordered(rows_of(self.database, table)), table
        if not surprises:
            assert replay.surprises == []

    @property
    def slot(self) -> str:
        """The slot's name."""
        return self.source.slot_name

    def confirmed(self) -> int:
        """How far the server believes the log to be."""
        query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
        return parse_lsn(self.database.execute(query, (self.slot,))[0][0])

    def end_walsender(self) -> None:
        """Break the connection from the server's side."""
        query = (
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s"
        )
        self.database.execute(query, (self.slot,))


@contextmanager
def captured(
    database: PostgresDatabase, folder: Path, *, start: bool = True, **settings: Any
) -> Iterator[Captured]:
    """Capture a database; the block begins when what was there is copied."""
    with Log.open(folder / "log") as log:
        feed = Captured(database, log, postgres(database, **settings))
        with feed.running(start=start):
            yield feed


def assert_mended_by_a_full_copy(feed: Captured) -> None:
    """What the hint of a lost position says helps."""
    assert f"headrace snapshot {feed.source.name}" in feed.status.hint
    feed.capture.copy_again([])
    feed.until_streaming()
    feed.database.execute("INSERT INTO users VALUES (1000, 'after')")
    feed.assert_replays("users")


class Driven:
    """A source read batch by batch, so that a test can act in between."""

    def __init__(self, source: Source, log: Log) -> None:
        self.source = source
        self.log = log
        self.stream: Stream = source.open(log.resume(source.name), log.register)
        self._batches = iter(self.stream)

    def step(self) -> Batch:
        """The next batch, stored and acknowledged."""
        batch = self.peek()
        self.store(batch)
        return batch

    def peek(self) -> Batch:
        """The next batch, which is lost unless it is stored."""
        return next(self._batches)

    def store(self, batch: Batch) -> None:
        """What a capture does with a batch."""
        self.log.append(self.source.name, batch)
        if batch.resume is not None:
            self.stream.ack(batch.resume)

    def until(self, wanted: Callable[[Batch], bool], timeout: float = TIMEOUT) -> Batch:
        """Go on to the first batch that is wanted."""
        deadline = time.monotonic() + timeout
        while not wanted(batch := self.step()):
            assert time.monotonic() < deadline, "no such batch came"
        return batch

    def close(self) -> None:
        """Let go in the middle of everything, as a process that ends does."""
        self.stream.close()
        for _ in self._batches:
            pass  # what nobody has stored is lost with the process
        self.log.abandon(self.source.name)


@contextmanager
def driven(source: Source, log: Log) -> Iterator[Driven]:
    """A source that is open while the block runs."""
    reading = Driven(source, log)
    try:
        yield reading
    finally:
        reading.close()


def image(data: bytes | None) -> Row | None:
    """An image as Python values."""
    return None if data is None else msgspec.json.decode(data)


def rows_of(database: PostgresDatabase, table: str) -> list[Row]:
    """What a table of the schema public holds, for columns whose values Python and JSON share."""
    statement = sql.SQL("SELECT * FROM ONLY {}").format(sql.Identifier("public", table))
    with database.connect() as connection:
        cursor = connection.execute(statement)
        names = [column.name for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor]


def ordered(rows: list[Row]) -> list[Row]:
    """Rows in an order that depends on nothing but themselves."""
    return sorted(rows, key=lambda row: msgspec.json.encode(row, order="sorted"))


def _is_mark(change: Change) -> bool:
    return change.op is Op.MESSAGE and f'"{_MARK}"'.encode() in (change.after or b"")
