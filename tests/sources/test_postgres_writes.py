"""No statement of an application fails because its database is captured."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headrace.change.event import Change, Op
from headrace.change.replay import TableName
from headrace.testing import PostgresDatabase, wait_until
from tests.sources.capturing import Captured, captured, image

WHOLE = {
    "keyed": "CREATE TABLE keyed (id int PRIMARY KEY, v int)",
    "filled": "CREATE TABLE filled (id int, v int); ALTER TABLE filled REPLICA IDENTITY FULL",
    "by_index": """CREATE TABLE by_index (id int NOT NULL, v int);
        CREATE UNIQUE INDEX by_index_id ON by_index (id);
        ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_id""",
    "parted": """CREATE TABLE parted (id int, v int, PRIMARY KEY (id)) PARTITION BY RANGE (id);
        CREATE TABLE parted_1 PARTITION OF parted DEFAULT""",
    "parent": "CREATE TABLE parent (id int PRIMARY KEY, v int)",
    "computed": """CREATE TABLE computed (id int PRIMARY KEY, v int,
        w int GENERATED ALWAYS AS (v + 1) STORED)""",
}
INSERTS_ONLY = {
    "bare": "CREATE TABLE bare (id int, v int)",
    "nullable": "CREATE TABLE nullable (id int UNIQUE, v int)",
    "deferred": "CREATE TABLE deferred (id int PRIMARY KEY DEFERRABLE, v int)",
    "silent": "CREATE TABLE silent (id int PRIMARY KEY, v int); "
    "ALTER TABLE silent REPLICA IDENTITY NOTHING",
    "index_gone": """CREATE TABLE index_gone (id int NOT NULL, v int);
        CREATE UNIQUE INDEX index_gone_id ON index_gone (id);
        ALTER TABLE index_gone REPLICA IDENTITY USING INDEX index_gone_id;
        DROP INDEX index_gone_id""",
    "split": """CREATE TABLE split (id int, v int) PARTITION BY RANGE (id);
        CREATE TABLE split_low PARTITION OF split FOR VALUES FROM (MINVALUE) TO (50);
        CREATE TABLE split_high PARTITION OF split DEFAULT;
        ALTER TABLE split_low ADD PRIMARY KEY (id)""",
    "half": """CREATE TABLE half (id int PRIMARY KEY, v int) PARTITION BY RANGE (id);
        CREATE TABLE half_1 PARTITION OF half DEFAULT;
        ALTER TABLE half_1 REPLICA IDENTITY NOTHING""",
    "child": "CREATE TABLE child () INHERITS (parent)",
}


class Application:
    """Writes to tables all the time, each statement in a transaction of its own."""

    def __init__(self, database: PostgresDatabase, *tables: str) -> None:
        self.failures: list[str] = []
        self.written = 0  # rows 1 to here have been inserted into each table
        self.slowest = 0.0  # seconds
        self._database = database
        self._tables = tables

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write while the block runs."""
        stopping = threading.Event()

        def run() -> None:
            with self._database.connect(autocommit=True) as connection:
                while not stopping.wait(0.01):
                    self.write(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()

    def write(self, connection: psycopg.Connection[Any]) -> None:
        """One round over all tables."""
        number = self.written + 1
        for table in self._tables:
            for statement in (
                f"INSERT INTO {table} (id, v) VALUES ({number}, 0)",
                f"UPDATE {table} SET v = v + 1 WHERE id % 7 = {number % 7}",
                f"DELETE FROM {table} WHERE id % 11 = 3 AND id < {number - 20}",
            ):
                began = time.monotonic()
                try:
                    connection.execute(statement.encode())
                except psycopg.Error as error:
                    self.failures.append(f"{statement}: {error}")
                self.slowest = max(self.slowest, time.monotonic() - began)
        self.written = number

    def progress(self, rounds: int = 3) -> None:
        """Wait until every table was written to some more times."""
        goal = self.written + rounds
        wait_until(lambda: self.written >= goal, timeout=60, message="the application writes")


def create(database: PostgresDatabase, *tables: dict[str, str]) -> None:
    for each in tables:
        for statements in each.values():
            database.execute(statements)


def number(change: Change) -> int:
    """The id in a row."""
    row = image(change.after)
    assert row is not None
    return int(row["id"])


def expect_all_inserts(feed: Captured, tables: Iterable[str], first: int, last: int) -> None:
    """The log has each row that was inserted into a table of the schema public, once."""
    for table in tables:
        inserted = [number(change) for change in feed.stored(Op.INSERT, table=table)]
        read = {number(change) for change in feed.stored(Op.READ, table=table)}
        assert len(inserted) == len(set(inserted)), table
        assert set(range(first, last + 1)) <= read | set(inserted), table


def expect_replays(feed: Captured, tables: Iterable[str]) -> None:
    """The log adds up to the rows of these tables."""
    replay = feed.replay()
    for table in tables:
        rows = replay.rows(TableName(feed.source.name, "public", table))
        only = "ONLY " if table == "parent" else ""
        found = feed.database.execute(f"SELECT id, v FROM {only}{table} ORDER BY 1, 2")
        assert sorted((row["id"], row["v"]) for row in rows) == found, table


def is_whole(feed: Captured) -> bool:
    """Whether all is captured of every table, and what was missed has been read again."""
    status = feed.status
    return not status.inserts_only and all(copy.done for copy in status.copies)


def published(database: PostgresDatabase) -> dict[str, list[str]]:
    """The tables of each publication."""
    found: dict[str, list[str]] = {}
    query = "SELECT pubname, tablename FROM pg_publication_tables ORDER BY 1, 2"
    for name, table in database.execute(query):
        found.setdefault(name, []).append(table)
    return found


@pytest.mark.requirement("P-01")
def test_no_statement_fails_on_any_kind_of_table(any_pg: PostgresDatabase, tmp_path: Path) -> None:
    create(any_pg, WHOLE, INSERTS_ONLY)
    application = Application(any_pg, *WHOLE, *INSERTS_ONLY)
    with application.writing():
        application.progress(20)
        with captured(any_pg, tmp_path) as feed:
            first = application.written + 1
            application.progress()
        for _ in range(2):
            with captured(any_pg, tmp_path) as feed:
                application.progress()
        assert set(feed.status.inserts_only) == {f"public.{name}" for name in INSERTS_ONLY}
    assert application.failures == []
    with captured(any_pg, tmp_path) as feed:
        expect_replays(feed, WHOLE)
        expect_all_inserts(feed, INSERTS_ONLY, first, application.written)
        with application.writing():
            # What the status says makes them whole does, and what was missed is read again.
            for statements in feed.status.inserts_only.values():
                any_pg.execute(statements)
            feed.until(lambda: is_whole(feed), "every table is captured as a whole")
            application.progress()
        expect_replays(feed, [*WHOLE, *INSERTS_ONLY])
    with application.writing():
        assert all(not each.error for each in feed.source.remove(None))
        application.progress()
    assert application.failures == []
