"""What was there before is copied, and copy and stream meet exactly."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest

from headrace.errors import SourceError
from headrace.event import Batch, Op
from headrace.log import Log
from headrace.replay import Replay, TableName
from headrace.sources import _pgslot
from headrace.testing import PostgresDatabase, wait_until
from tests.sources.capturing import (
    SOURCE,
    Driven,
    captured,
    driven,
    image,
    ordered,
    postgres,
    rows_of,
)

# Large enough, and hard enough to compress, that updates do not send it again.
BIG: LiteralString = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 300) n)"

WAITS: LiteralString = """
    SELECT 1 FROM pg_stat_activity
    WHERE wait_event_type = 'Lock' AND backend_type = 'walsender' AND datname = current_database()
"""


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of four blocks, so that small tables have several, and a look a moment."""
    monkeypatch.setattr("headrace.sources._pgcopy.RANGE_BLOCKS", 4)
    monkeypatch.setattr("headrace.sources._pgstream._WATCH_SECONDS", 0.05)


def create(database: PostgresDatabase, *tables: str, rows: int = 0) -> None:
    """Plain tables with a key, each with the rows 1 … `rows`."""
    for table in tables:
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, name text, big text)")
        database.execute(
            f"INSERT INTO {table} SELECT n, 'row ' || n FROM generate_series(1, {rows}) n"
        )


@contextmanager
def writers(database: PostgresDatabase, *tables: str) -> Iterator[Callable[[], None]]:
    """Sessions that insert, update, delete and move rows until the block ends.

    Gives a function that waits until each has committed some more.
    """
    ending = threading.Event()
    counts = [0] * len(tables)
    failures: list[BaseException] = []

    def write(at: int, table: str) -> None:
        rng = random.Random(at)
        try:
            with database.connect(autocommit=False) as connection:
                while not ending.is_set():
                    for _ in range(rng.randint(1, 4)):
                        connection.execute(*_statement(rng, table))
                    (connection.rollback if rng.random() < 0.1 else connection.commit)()
                    counts[at] += 1
        except psycopg.Error as error:
            failures.append(error)

    def progress() -> None:
        aim = [count + 20 for count in counts]
        wait_until(
            lambda: failures or all(c >= a for c, a in zip(counts, aim, strict=True)),
            message="the writers write",
        )

    threads = [
        threading.Thread(target=write, args=(at, table), daemon=True)
        for at, table in enumerate(tables)
    ]
    for thread in threads:
        thread.start()
    try:
        progress()
        yield progress
    finally:
        ending.set()
        for thread in threads:
            thread.join()
    assert failures == []


def _statement(rng: random.Random, table: str) -> tuple[LiteralString, tuple[Any, ...]]:
    key = rng.randint(1, 3000)
    kinds: list[tuple[str, tuple[Any, ...]]] = [
        (f"INSERT INTO {table} VALUES (%s, 'new') ON CONFLICT DO NOTHING", (key,)),
        (f"UPDATE {table} SET name = name || '+' WHERE id = %s", (key,)),
        (f"UPDATE {table} SET big = {BIG} WHERE id = %s", (key,)),
        (f"DELETE FROM {table} WHERE id = %s", (key,)),
        (
            f"UPDATE {table} SET id = -id WHERE id = %s"
            f" AND NOT EXISTS (SELECT FROM {table} WHERE id = %s)",
            (key, -key),
        ),
    ]
    return rng.choice(kinds)


# --- the first copy ------------------------------------------------------------------------------


@pytest.mark.requirement("S1-31")
def test_every_row_that_was_there_is_read_once(pg: PostgresDatabase, tmp_path: Path) -> None:
    create(pg, "users", "orders", rows=3000)
    create(pg, "nothing")
    with captured(pg, tmp_path) as feed:
        reads = feed.changes(Op.READ)
        feed.assert_replays("users", "orders", "nothing")
        copies = {copy.table: (copy.rows, copy.done) for copy in feed.status.copies}
    assert len(reads) == 6000
    assert len({change.id for change in reads}) == 6000
    assert copies == {
        "public.users": (3000, True),
        "public.orders": (3000, True),
        "public.nothing": (0, True),
    }


def test_each_batch_of_a_copy_is_a_transaction(pg: PostgresDatabase, tmp_path: Path) -> None:
    create(pg, "users", rows=3000)
    with captured(pg, tmp_path) as feed:
        changes = feed.changes()
    starts = [change.ordinal == 1 for change in changes]
    assert starts == [True, *(change.last for change in changes[:-1])]
    assert changes[-1].last
    assert len({change.transaction.id for change in changes}) == sum(starts)


def test_copy_and_stream_meet_exactly_while_everybody_writes(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "users", "orders", rows=3000)
    with (
        writers(pg, "users", "orders", "users") as more,
        captured(pg, tmp_path, copy_workers=3),
    ):
        more()
    feed_after(pg, tmp_path, "users", "orders")


def feed_after(pg: PostgresDatabase, tmp_path: Path, *tables: str) -> None:
    """Start again on the same log, catch up, and compare."""
    with captured(pg, tmp_path) as feed:
        feed.assert_replays(*tables)


def test_a_table_without_columns_is_captured(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TABLE empty (); INSERT INTO empty DEFAULT VALUES")
    with captured(pg, tmp_path) as feed:
        pg.execute("INSERT INTO empty DEFAULT VALUES")
        assert [image(change.after) for change in feed.changes(Op.INSERT)] == [{}]


def test_without_snapshot_only_what_comes_later_is_captured(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "users", rows=5)
    with captured(pg, tmp_path, snapshot=False) as feed:
        pg.execute("INSERT INTO users VALUES (6, 'x')")
        pg.execute("UPDATE users SET name = 'y' WHERE id = 1")
        assert [change.op for change in feed.changes()] == [Op.SCHEMA, Op.INSERT, Op.UPDATE]


def test_without_snapshot_a_table_that_appears_later_is_captured_whole(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "users", rows=5)
    with captured(pg, tmp_path, snapshot=False) as feed:
        create(pg, "orders", rows=5)
        feed.until(lambda: len(feed.stored(Op.READ)) == 5, "the new table is copied")
        pg.execute("INSERT INTO orders VALUES (6, 'x')")
        feed.assert_replays("orders")
        feed.capture.stop()
        create(pg, "items", rows=5)
        feed.start()
        feed.until(lambda: len(feed.stored(Op.READ)) == 10, "the table made meanwhile is copied")
        feed.assert_replays("orders", "items")


def test_without_snapshot_a_copy_that_is_asked_for_is_made(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "users", "orders", rows=5)
    with captured(pg, tmp_path, snapshot=False) as feed:
        feed.capture.copy_again(["public.users"])
        feed.until(lambda: len(feed.stored(Op.READ)) == 5, "the table is copied")
        feed.assert_replays("users")
        feed.until_streaming()
        feed.capture.copy_again([])
        feed.until(lambda: len(feed.stored(Op.READ)) == 15, "everything is copied")
        feed.assert_replays("users", "orders")


def test_a_copy_waits_for_transactions_that_are_open_and_sees_them(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "users", rows=5)
    with pg.connect(autocommit=False) as open_one:
        open_one.execute("INSERT INTO users VALUES (100, 'open')")
        with captured(pg, tmp_path, start=False) as feed:
            feed.start()
            wait_until(lambda: pg.execute(WAITS), message="the slot waits")
            open_one.commit()
            feed.until_streaming()
            feed.assert_replays("users")


def test_stopping_while_the_slot_waits_for_a_transaction_is_prompt(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "users", rows=5)
    with pg.connect(autocommit=False) as open_one:
        open_one.execute("INSERT INTO users VALUES (100, 'open')")
        with captured(pg, tmp_path, start=False) as feed:
            feed.start()
            wait_until(lambda: pg.execute(WAITS), message="the slot waits")
            stopping = threading.Thread(target=feed.capture.stop)
            stopping.start()
            stopping.join(5)
            assert not stopping.is_alive()


# --- tables that appear --------------------------------------------------------------------------


def test_a_table_created_later_is_copied_and_captured(pg: PostgresDatabase, tmp_path: Path) -> None:
    create(pg, "users", rows=10)
    with captured(pg, tmp_path) as feed:
        create(pg, "orders", rows=500)
        with writers(pg, "users", "orders") as more:
            feed.until(
                lambda: any(c.table == "public.orders" and c.done for c in feed.status.copies),
                "the new table is copied",
            )
            more()
        feed.assert_replays("users", "orders")


def test_what_is_committed_between_a_copys_point_and_its_start_is_not_lost(
    pg: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(pg, "users", rows=10)
    with captured(pg, tmp_path) as feed:
        create_point = _pgslot.create_point

        def slow_point(*given: Any) -> Any:
            point = create_point(*given)
            # Busy servers commit and send much before the answer has reached us.
            with pg.connect() as connection:
                for number in range(200):
                    connection.execute("INSERT INTO orders VALUES (%s, 'x')", (1000 + number,))
            sent = "SELECT 1 FROM pg_stat_replication WHERE sent_lsn < pg_current_wal_insert_lsn()"
            wait_until(lambda: not pg.execute(sent), message="all is sent")
            return point

        monkeypatch.setattr(_pgslot, "create_point", slow_point)
        create(pg, "orders", rows=10)
        feed.until(
            lambda: any(c.table == "public.orders" and c.done for c in feed.status.copies),
            "the new table is copied",
        )
        feed.assert_replays("users", "orders")


def test_a_table_dropped_and_created_again_begins_anew(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "users", "other", rows=10)
    with captured(pg, tmp_path) as feed:
        pg.execute("DROP TABLE users")
        pg.execute("CREATE TABLE users (id int PRIMARY KEY, email text)")
        pg.execute("INSERT INTO users VALUES (1, 'a@b')")
        feed.until(lambda: feed.stored(Op.TRUNCATE), "the new table is copied")
        feed.until_streaming()
        pg.execute("INSERT INTO users VALUES (2, 'c@d')")
        feed.assert_replays("users", "other")
        assert [c.op for c in feed.streamed(table="users")] == [
            Op.SCHEMA, Op.TRUNCATE, Op.READ, Op.INSERT,
        ]  # fmt: skip


def test_a_table_that_the_config_drops_and_takes_again_begins_anew(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "users", "orders", rows=10)
    with captured(pg, tmp_path):
        pass
    with captured(pg, tmp_path, tables=("public.users",)) as feed:
        pg.execute("DELETE FROM orders WHERE id < 5")
        pg.execute("INSERT INTO users VALUES (11, 'x')")
        assert [change.table.name for change in feed.streamed()] == ["users"]
        assert [copy.table for copy in feed.status.copies] == ["public.users"]
    with captured(pg, tmp_path) as feed:
        assert len(feed.stored(Op.TRUNCATE, table="orders")) == 1
        pg.execute("INSERT INTO orders VALUES (11, 'x')")
        feed.assert_replays("users", "orders")


# --- copied again --------------------------------------------------------------------------------


def test_one_table_is_copied_again_while_others_go_on(pg: PostgresDatabase, tmp_path: Path) -> None:
    create(pg, "users", "orders", rows=1500)
    with writers(pg, "users", "orders") as more, captured(pg, tmp_path) as feed:
        more()
        feed.capture.copy_again(["users"])
        feed.until(lambda: feed.stored(Op.TRUNCATE, table="users"), "the copy begins")
        feed.until_streaming()
        more()
        assert feed.stored(Op.TRUNCATE, table="orders") == []
    feed_after(pg, tmp_path, "users", "orders")


def test_everything_is_copied_again_with_a_new_slot(pg: PostgresDatabase, tmp_path: Path) -> None:
    create(pg, "users", "orders", rows=1500)
    with writers(pg, "users", "orders") as more, captured(pg, tmp_path) as feed:
        more()
        feed.capture.copy_again([])
        feed.until(lambda: feed.stored(Op.TRUNCATE, table="orders"), "the copy begins")
        feed.until_streaming()
        more()
    feed_after(pg, tmp_path, "users", "orders")


def test_a_table_that_is_not_captured_cannot_be_copied_again_and_nothing_stops(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "users", rows=3)
    with captured(pg, tmp_path) as feed:
        with pytest.raises(SourceError, match=r"shop has no table public\.userz"):
            feed.capture.copy_again(["userz"])
        pg.execute("INSERT INTO users VALUES (4, 'x')")
        feed.assert_replays("users")


# --- interrupted ---------------------------------------------------------------------------------


class Interrupted:
    """A copy of one table that ends after some batches, and goes on after a while."""

    def __init__(self, database: PostgresDatabase, log: Log) -> None:
        self.database = database
        self.log = log
        self.source = postgres(database, copy_workers=1)

    def copy_some(self, batches: int) -> set[int]:
        """Copy so many batches of rows, then let go; returns the ids that were read."""
        with driven(self.source, self.log) as reading:
            for _ in range(batches):
                reading.until(lambda batch: any(c.op is Op.READ for c in batch.changes))
        return self.read()

    def read(self, after: int = 0) -> set[int]:
        """The ids of all rows read so far."""
        return {
            (image(change.after) or {})["id"]
            for change in self.log.read(after, limit=1 << 30)
            if change.op is Op.READ
        }

    def finish(self, *tables: str) -> list[str]:
        """Take it up again to the end, compare, and return what is odd in the log."""
        with driven(self.source, self.log) as reading:
            reading.until(lambda _: all(copy.done for copy in reading.stream.status().copies))
            self._catch_up(reading)
        replay = Replay.of(self.log.read(0, limit=1 << 30))
        for table in tables:
            replayed = replay.rows(TableName(SOURCE, "public", table))
            assert ordered(replayed) == ordered(rows_of(self.database, table)), table
        return replay.surprises

    def _catch_up(self, reading: Driven) -> None:
        self.database.execute("SELECT pg_logical_emit_message(true, 'test.end', '')")

        def ends(batch: Batch) -> bool:
            return any(b"test.end" in (c.after or b"") for c in batch.changes)

        reading.until(ends)


@pytest.fixture
def interrupted(pg: PostgresDatabase, tmp_path: Path) -> Iterator[Interrupted]:
    with Log.open(tmp_path / "log") as log:
        yield Interrupted(pg, log)


def test_an_interrupted_copy_does_not_read_again_what_it_has(interrupted: Interrupted) -> None:
    create(interrupted.database, "users", rows=3000)
    done = interrupted.copy_some(2)
    assert 0 < len(done) < 3000
    so_far = interrupted.log.latest_sequence
    assert interrupted.finish("users") == []
    assert interrupted.read(after=so_far) == set(range(1, 3001)) - done


@pytest.mark.parametrize("batches", [1, 3])
def test_rows_changed_while_a_copy_was_interrupted_are_right(
    interrupted: Interrupted, batches: int
) -> None:
    database = interrupted.database
    create(database, "users", rows=3000)
    database.execute(f"UPDATE users SET big = {BIG} WHERE id % 100 = 7")
    database.execute("VACUUM users")
    interrupted.copy_some(batches)
    # Deleted rows make room in blocks that were read; updates move unread rows there.
    database.execute("DELETE FROM users WHERE id < 400")
    database.execute("VACUUM users")
    database.execute("UPDATE users SET name = name || '!' WHERE id % 3 = 0")
    database.execute("UPDATE users SET id = id + 10000 WHERE id % 100 = 7")
    database.execute("DELETE FROM users WHERE id % 50 = 0")
    database.execute("INSERT INTO users SELECT n, 'new' FROM generate_series(5001, 5200) n")
    interrupted.finish("users")


def test_a_copy_interrupted_again_and_again_ends_right(interrupted: Interrupted) -> None:
    database = interrupted.database
    create(database, "users", "orders", rows=3000)
    with writers(database, "users", "orders"):
        for _ in range(4):
            interrupted.copy_some(2)
    interrupted.finish("users", "orders")


def test_a_table_without_a_key_is_not_doubled_by_an_interruption(
    interrupted: Interrupted,
) -> None:
    database = interrupted.database
    database.execute("CREATE TABLE notes (id int, name text)")
    database.execute("ALTER TABLE notes REPLICA IDENTITY FULL")
    database.execute("INSERT INTO notes SELECT n, 'x' FROM generate_series(1, 3000) n")
    interrupted.copy_some(2)
    database.execute("INSERT INTO notes SELECT n, 'new' FROM generate_series(1, 10) n")
    database.execute("UPDATE notes SET name = 'y' WHERE id % 100 = 0")
    database.execute("DELETE FROM notes WHERE id % 100 = 1")
    interrupted.finish("notes")


@pytest.mark.parametrize(
    "rewrite",
    [
        "VACUUM FULL users",
        "TRUNCATE users; INSERT INTO users VALUES (1, 'first'), (2, 'second')",
        "ALTER TABLE users ALTER COLUMN id TYPE bigint",
        "ALTER TABLE users ADD COLUMN extra int",
        "ALTER TABLE users DROP COLUMN name",
    ],
)
def test_a_table_rewritten_while_its_copy_was_interrupted_is_right(
    interrupted: Interrupted, rewrite: str
) -> None:
    database = interrupted.database
    create(database, "users", rows=2000)
    interrupted.copy_some(2)
    database.execute(rewrite)
    database.execute("DELETE FROM users WHERE id % 2 = 0")
    interrupted.finish("users")


def test_partitions_added_and_moved_between_while_interrupted_are_right(
    interrupted: Interrupted,
) -> None:
    database = interrupted.database
    database.execute(
        "CREATE TABLE events (id int, half int, PRIMARY KEY (id, half)) PARTITION BY LIST (half);"
        "CREATE TABLE events_0 PARTITION OF events FOR VALUES IN (0);"
        "CREATE TABLE events_1 PARTITION OF events FOR VALUES IN (1);"
        "INSERT INTO events SELECT n, n % 2 FROM generate_series(1, 4000) n"
    )
    interrupted.copy_some(2)
    database.execute("UPDATE events SET half = 1 - half WHERE id % 5 = 0")
    interrupted.copy_some(1)
    database.execute("CREATE TABLE events_2 PARTITION OF events FOR VALUES IN (2)")
    database.execute("UPDATE events SET half = 2 WHERE id % 7 = 0")
    interrupted.finish()
    replay = Replay.of(interrupted.log.read(0, limit=1 << 30))
    replayed = {
        (row["id"], row["half"]) for row in replay.rows(TableName(SOURCE, "public", "events"))
    }
    assert replayed == set(database.execute("SELECT id, half FROM events"))


def test_a_table_dropped_while_its_copy_was_interrupted_does_not_stop_the_rest(
    interrupted: Interrupted,
) -> None:
    create(interrupted.database, "users", "orders", rows=2000)
    interrupted.copy_some(1)
    interrupted.database.execute("DROP TABLE orders")
    interrupted.finish("users")


# --- changed between the point and the copy ------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE users DROP COLUMN name",
        "ALTER TABLE users RENAME COLUMN name TO title",
        "ALTER TABLE users ADD COLUMN extra int",
        "ALTER TABLE users ALTER COLUMN id TYPE bigint",
        "TRUNCATE users; INSERT INTO users VALUES (1, 'first')",
        "VACUUM FULL users",
        "DROP TABLE users",
    ],
)
def test_a_table_changed_when_its_copy_is_about_to_begin_is_right(
    pg: PostgresDatabase, tmp_path: Path, statement: str
) -> None:
    create(pg, "users", "orders", rows=500)
    with captured(pg, tmp_path, start=False) as feed:
        append, done = feed.log.append, threading.Event()

        def appended(source: str, batch: Batch) -> int:
            # The last word before rows are read is the description of the tables.
            if not done.is_set() and any(c.table.name == "users" for c in batch.changes):
                done.set()
                pg.execute(statement)
            return append(source, batch)

        feed.log.append = appended  # type: ignore[method-assign]
        feed.start()
        feed.until_streaming()
        pg.execute("INSERT INTO orders VALUES (1000, 'x')")
        tables = ["orders"] if statement.startswith("DROP") else ["users", "orders"]
        if "users" in tables:
            pg.execute("INSERT INTO users (id) VALUES (1000)")  # new columns are told with a row
        feed.assert_replays(*tables, surprises=True)
