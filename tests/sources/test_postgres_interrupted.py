"""A copy that was interrupted goes on where it stopped, whatever happened meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.change.event import Batch, Op
from headrace.change.lsn import parse_lsn
from headrace.change.replay import Replay, TableName
from headrace.log import Log
from headrace.testing import PostgresDatabase, wait_until
from tests.sources.capturing import (
    SOURCE,
    Driven,
    driven,
    image,
    ordered,
    postgres,
    rows_of,
)
from tests.sources.writing import BIG, create, writers


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of four blocks, so that small tables have several, and a look a moment."""
    monkeypatch.setattr("headrace.sources.postgres.snapshot.RANGE_BLOCKS", 4)
    monkeypatch.setattr("headrace.sources.postgres.stream._WATCH_SECONDS", 0.05)


class Interrupted:
    """A copy of one table that ends after some batches, and goes on after a while."""

    def __init__(self, database: PostgresDatabase, log: Log) -> None:
        self.database = database
        self.log = log
        self.source = postgres(database, snapshot_workers=1)

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


def test_the_server_learns_of_no_point_that_the_log_does_not_have(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    """A table without a key is in the second publication, which is named from a point on."""
    pg.execute("CREATE TABLE users (id int PRIMARY KEY); CREATE TABLE bare (n int)")
    source = postgres(pg)
    pg.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (source.slot_name,))
    with Log.open(tmp_path / "log") as log, driven(source, log) as reading:
        begun = reading.step()  # the slot is found, so that the copy needs a point of its own
        assert begun.resume is not None
        pg.execute("INSERT INTO users SELECT generate_series(1, 100)")
        position = msgspec.json.decode(begun.resume)["position"]
        batch = reading.peek()
        assert batch.resume is not None
        assert msgspec.json.decode(batch.resume)["position"] > position, "it is followed to"
        wait_until(lambda: has_reported(pg, source.slot_name))
        assert confirmed(pg, source.slot_name) <= position
        reading.store(batch)


def has_reported(database: PostgresDatabase, slot: str) -> bool:
    """Whether the session that reads a slot has sent the server a status."""
    query = """SELECT reply_time IS NOT NULL FROM pg_stat_replication
        JOIN pg_replication_slots ON pid = active_pid WHERE slot_name = %s"""
    return database.execute(query, (slot,)) == [(True,)]


def confirmed(database: PostgresDatabase, slot: str) -> int:
    query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
    return parse_lsn(database.execute(query, (slot,))[0][0])
