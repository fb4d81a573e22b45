"""The examples run, and show what they say."""

import os
import random
import runpy
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark.sql import SparkSession

from headrace.change.event import Op
from headrace.change.replay import Replay, TableName
from headrace.destination import Checkpoint, LogEvents, deliver
from headrace.formats.etl import Event
from headrace.log import LogReader
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.testing import PostgresDatabase, wait_until
from tests.sinks.lake import Lake, Row, put, remove
from tests.sources.capturing import Captured, captured, ordered, rows_of

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, **environment: str) -> dict[str, Any]:
    """What an example leaves behind."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in environment.items():
            patch.setenv(variable, value)
        return runpy.run_path(str(EXAMPLES / name))


def test_the_notebook_reads_a_log_and_fills_tables_that_equal_the_source(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = Lake(spark, tmp_path)
    orders = lake.table("orders")
    row: Row = {"status": "new", "amount": "1.00", "note": "-"}
    lake.commit(*(put(orders, id=number, **row) for number in range(4)))
    lake.commit(put(orders, Op.UPDATE, id=1, **row | {"status": "paid"}), remove(orders, id=2))
    left = run("spark_notebook.py", HEADRACE_LOG=str(lake.log.path), HEADRACE_LAKE=str(lake.path))
    kinds = {kind["op"]: kind["count"] for kind in left["kinds"].collect()}
    assert kinds == {"INSERT": 4, "UPDATE": 1, "DELETE": 1}
    assert left["typed"].count() == 6
    assert {kind["_change_type"] for kind in left["changelog"].collect()} == {
        "insert", "update_postimage", "delete"
    }  # fmt: skip
    assert [tuple(each) for each in left["happened"].collect()] == [
        ("Order", "entity:created", 4),
        ("Order", "entity:deleted", 1),
        ("Order", "entity:updated", 1),
    ]
    assert lake.rows() == lake.expected()
    found = spark.sql("SELECT id, status FROM current_rows ORDER BY id").collect()
    assert [tuple(each) for each in found] == [(0, "new"), (1, "paid"), (3, "new")]
    assert pl.read_delta(str(lake.path / "public" / "orders")).height == 3
    assert "last_change" in capsys.readouterr().out
    lake.log.close()


# --- a destination of ETL events -----------------------------------------------------------------

TABLES = ("users", "orders", "events", "docs", "notes")

SHOP = """
    CREATE TABLE users (id int PRIMARY KEY, name text);
    CREATE TABLE notes (id int PRIMARY KEY, a text, b text);
    INSERT INTO notes SELECT n, 'a' || n, 'b' || n FROM generate_series(1, 5) n;
    CREATE TABLE orders (id int PRIMARY KEY, buyer int REFERENCES users, note text);
    ALTER TABLE orders REPLICA IDENTITY FULL;
    CREATE TABLE events (kind text, at int);
    ALTER TABLE events REPLICA IDENTITY FULL;
    CREATE TABLE docs (id int, slug text NOT NULL UNIQUE, body text);
    ALTER TABLE docs ALTER body SET STORAGE EXTERNAL;
    ALTER TABLE docs REPLICA IDENTITY USING INDEX docs_slug_key;
    INSERT INTO users SELECT n, 'user ' || n FROM generate_series(1, 50) n;
    INSERT INTO orders SELECT n, n % 50 + 1, NULL FROM generate_series(1, 80) n;
    INSERT INTO events SELECT 'twin', 1 FROM generate_series(1, 5)"""

TRADE = """
    UPDATE users SET name = name || '!' WHERE id <= 10;
    UPDATE orders SET id = id + 1000 WHERE id <= 5;
    DELETE FROM orders WHERE id BETWEEN 6 AND 9;
    INSERT INTO events VALUES ('twin', 1), ('other', 2);
    DELETE FROM events WHERE ctid = (SELECT min(ctid) FROM events);
    SELECT pg_logical_emit_message(true, 'prices', 'changed')"""

# A large value that did not change is not sent again, neither with the row nor with its new key.
WRITING = """
    INSERT INTO docs SELECT n, 'doc-' || n, repeat('x', 9000) FROM generate_series(1, 6) n;
    UPDATE docs SET id = id + 10 WHERE id < 4;
    UPDATE docs SET slug = 'moved-' || id WHERE id < 6"""


def trade(database: PostgresDatabase) -> None:
    """All that a destination must follow, as often as one likes."""
    database.execute("TRUNCATE docs")
    database.execute(TRADE)
    # Each time one column is gone, the other has its name, and a third has a value in every row.
    database.execute("ALTER TABLE notes DROP a, ADD c int DEFAULT 7")
    database.execute("ALTER TABLE notes RENAME b TO a")
    database.execute("ALTER TABLE notes RENAME c TO b")
    database.execute(WRITING)
    database.execute("ALTER TABLE users ADD IF NOT EXISTS age int")
    database.execute("INSERT INTO users VALUES (100, 'cyn', 30)")
    database.execute("ALTER TABLE orders DROP IF EXISTS note")
    database.execute("UPDATE orders SET buyer = 2 WHERE id > 70")
    database.execute("TRUNCATE events, docs RESTART IDENTITY")
    database.execute("INSERT INTO events SELECT 'twin', n / 2 FROM generate_series(1, 9) n")
    database.execute("TRUNCATE users CASCADE")
    for number in range(40):
        database.execute("INSERT INTO users VALUES (%s, 'new', 1)", (number,))
    database.execute("INSERT INTO orders SELECT n, n FROM generate_series(1, 30) n")
    database.execute(WRITING)


def settle(feed: Captured) -> None:
    """Capture until the log adds up to the tables, some of which DDL makes be copied again."""

    def equal() -> bool:
        replay = Replay.of(feed.stored())
        return all(
            ordered(replay.rows(TableName(feed.source.name, "public", table)))
            == ordered(rows_of(feed.database, table))
            for table in TABLES
        )

    def still_equal() -> bool:
        feed.until_caught_up()
        feed.until(equal, "the log adds up to the tables")
        feed.capture.stop()  # a copy that begins now would be read in part
        if equal():
            return True
        feed.start()
        return False

    feed.until(still_equal, "the log adds up to the tables when capturing has ended")


def assert_equal(feed: Captured, file: Path) -> None:
    """The destination holds what the database holds."""
    rows = run("etl_destination.py")["Rows"](str(file))
    for table in TABLES:
        assert ordered(rows.of("public", table)) == ordered(rows_of(feed.database, table)), table
    rows.close()


def take_all(**environment: str) -> None:
    """Run the destination until it has what there is."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in environment.items():
            patch.setenv(variable, value)
        run("etl_destination.py")["main"]()


@pytest.mark.requirement("S2-02", "S2-14", "S2-21")
@pytest.mark.parametrize("batch", ["1", "7", "1000"])
def test_the_destination_equals_the_tables(
    pg: PostgresDatabase, tmp_path: Path, batch: str
) -> None:
    pg.execute(SHOP)
    file = tmp_path / "rows.sqlite"
    with captured(pg, tmp_path) as feed:
        settings = {"HEADRACE_SQLITE": str(file), "HEADRACE_BATCH": batch}
        take_all(HEADRACE_LOG=str(feed.log.path), **settings)
        assert_equal(feed, file)
        trade(pg)
        settle(feed)
        server = ServerSettings(port=0)
        app = create_app(feed.log, statuses=list, copy_again=None, settings=server)
        with BackgroundServer(app, server) as running:
            take_all(HEADRACE_URL=running.url, **settings)
        assert_equal(feed, file)
        commits = {change.position.commit for change in feed.log.read(0, limit=10_000)}
    database = sqlite3.connect(file)
    # The parts of a copy have one LSN, and count once.
    assert database.execute("SELECT count(*) FROM commits").fetchone() == (len(commits),)
    database.close()


@pytest.mark.requirement("S2-14", "S2-20", "S2-21")
def test_the_destination_equals_the_tables_after_writes_that_were_not_answered(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(SHOP)
    rows = run("etl_destination.py")["Rows"](str(tmp_path / "rows.sqlite"))
    chance = random.Random(4)

    class Shaky:
        def write_events(self, events: list[Event]) -> None:
            fate = chance.random()
            if fate < 0.2:
                raise OSError("did not write")
            rows.write_events(events)
            if fate > 0.6:
                raise OSError("wrote, and then lost the line")

    with captured(pg, tmp_path) as feed:
        trade(pg)
        settle(feed)
        latest = feed.log.latest_sequence
        reached, failures = [Checkpoint()], 0
        with LogReader.open(feed.log.path) as log:
            while reached[-1].sequence < latest:
                # Where it begins is older than what is stored: events come again.
                after = reached[max(len(reached) - 4, 0)]
                try:
                    reached.extend(
                        deliver(LogEvents(log), Shaky(), after=after, upto=latest, limit=9)
                    )
                except OSError:
                    failures += 1
        assert failures > 5
        rows.close()
        assert_equal(feed, tmp_path / "rows.sqlite")


@pytest.mark.requirement("S2-21")
def test_the_destination_equals_the_tables_after_it_was_killed(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(SHOP)
    file = tmp_path / "rows.sqlite"
    settings = {"HEADRACE_SQLITE": str(file), "HEADRACE_BATCH": "5"}
    with captured(pg, tmp_path) as feed:
        settings["HEADRACE_LOG"] = str(feed.log.path)
        for _ in range(3):
            trade(pg)
            feed.until_caught_up()
            _kill_on_the_way(file, settings)
        settle(feed)
        take_all(**settings)
        assert_equal(feed, file)


def _kill_on_the_way(file: Path, settings: dict[str, str]) -> None:
    """Let the destination write something, then kill it."""
    before = _sequence(file)
    command = [sys.executable, str(EXAMPLES / "etl_destination.py")]
    with subprocess.Popen(command, env=os.environ | settings | {"HEADRACE_FOLLOW": "1"}) as process:
        try:
            wait_until(lambda: _sequence(file) > before + 10, timeout=120, message="it writes")
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL


def _sequence(file: Path) -> int:
    if not file.exists():
        return 0
    database = sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=30)
    try:
        return int(database.execute("SELECT sequence FROM checkpoint").fetchone()[0])
    except (sqlite3.OperationalError, TypeError):
        return 0  # its tables are being made
    finally:
        database.close()
