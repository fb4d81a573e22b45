"""What was there before is copied, and copy and stream meet exactly."""

import threading
from pathlib import Path
from typing import Any, LiteralString

import pytest

from headrace.change.block import LARGEST, BlockRows, RowBlock
from headrace.change.event import Batch, Op
from headrace.errors import SourceError
from headrace.sources.postgres import slot
from headrace.testing import PostgresDatabase, wait_until
from tests.changes import wal_position
from tests.sources.capturing import (
    captured,
    image,
)
from tests.sources.writing import create, writers

WAITS: LiteralString = """
    SELECT 1 FROM pg_stat_activity
    WHERE wait_event_type = 'Lock' AND backend_type = 'walsender' AND datname = current_database()
"""


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of four blocks, so that small tables have several, and a look a moment."""
    monkeypatch.setattr("headrace.sources.postgres.snapshot.RANGE_BLOCKS", 4)
    monkeypatch.setattr("headrace.sources.postgres.stream._WATCH_SECONDS", 0.05)


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
    for change in changes:  # the stream goes on where the copy stands
        at = wal_position(change)
        assert at.end_lsn == (at.commit_lsn if change.last else 0)
    assert len({change.transaction.id for change in changes}) == sum(starts)


def test_copy_and_stream_meet_exactly_while_everybody_writes(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "users", "orders", rows=3000)
    with (
        writers(pg, "users", "orders", "users") as more,
        captured(pg, tmp_path, snapshot_workers=3),
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
        feed.until_streaming()  # until then it is read beside the stream, which goes ahead
        feed.assert_replays("orders")
        feed.capture.stop()
        create(pg, "items", rows=5)
        feed.start()
        feed.until(lambda: len(feed.stored(Op.READ)) == 10, "the table made meanwhile is copied")
        feed.until_streaming()
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
            stopping.join(120)
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
        create_point = slot.create_point

        def slow_point(*given: Any) -> Any:
            point = create_point(*given)
            # Busy servers commit and send much before the answer has reached us.
            with pg.connect() as connection:
                for number in range(200):
                    connection.execute("INSERT INTO orders VALUES (%s, 'x')", (1000 + number,))
            sent = "SELECT 1 FROM pg_stat_replication WHERE sent_lsn < pg_current_wal_insert_lsn()"
            wait_until(lambda: not pg.execute(sent), message="all is sent")
            return point

        monkeypatch.setattr(slot, "create_point", slow_point)
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
        with pg.connect(autocommit=False) as connection:  # nobody sees that it is gone
            connection.execute("DROP TABLE users")
            connection.execute("CREATE TABLE users (id int PRIMARY KEY, email text)")
            connection.execute("INSERT INTO users VALUES (1, 'a@b')")
        feed.until(lambda: feed.stored(Op.TRUNCATE), "the new table is copied")
        feed.until_streaming()
        pg.execute("INSERT INTO users VALUES (2, 'c@d')")
        feed.assert_replays("users", "other")
        changes = feed.streamed(table="users")
    ops = [c.op for c in changes]
    assert ops == [Op.SCHEMA, Op.SCHEMA, Op.TRUNCATE, Op.READ, Op.INSERT]
    dropped, created, truncate = changes[:3]
    assert image(dropped.after) == {"dropped": True}
    assert dropped.table.relation != created.table.relation
    assert image(truncate.after) == {"snapshot": True, "relations": [truncate.table.relation]}


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


# --- blocks --------------------------------------------------------------------------------------


@pytest.mark.requirement("C-28")
def test_a_batch_of_rows_is_one_value_of_the_log(pg: PostgresDatabase, tmp_path: Path) -> None:
    create(pg, "users", rows=3000)
    with captured(pg, tmp_path) as feed:
        feed.assert_replays("users")
        latest, after, parts = feed.log.latest_sequence, 0, []
        while part := feed.log.stored(after, upto=latest):
            parts.append(part)
            after = part.last
        blocks = [part for part in parts if isinstance(part, BlockRows)]
        assert sum(block.count for block in blocks) == len(feed.changes(Op.READ)) == 3000
        assert {block.block.transaction.id for block in blocks} == {
            change.transaction.id for change in feed.changes(Op.READ)
        }


@pytest.mark.requirement("C-28")
def test_rows_that_no_block_can_hold_are_stored_one_by_one(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE texts (id int PRIMARY KEY, body text)")
    pg.execute("INSERT INTO texts SELECT g, repeat('x', 700000) FROM generate_series(1, 4) g")
    pg.execute(
        "INSERT INTO texts SELECT g, repeat(E'\\n\\x01', 150000) FROM generate_series(5, 6) g"
    )
    pg.execute("INSERT INTO texts SELECT g, repeat('y', 50000) FROM generate_series(7, 60) g")
    with captured(pg, tmp_path) as feed:
        feed.assert_replays("texts")
        stored = [run.content for run in feed.log._runs(1, feed.log.latest_sequence)]
        assert max(len(some.value) for some in stored if isinstance(some, RowBlock)) <= LARGEST
        assert max(len(one) for some in stored if isinstance(some, list) for one in some) > 700_000
