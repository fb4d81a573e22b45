"""What is told by triggers is what logical replication tells, and a little more."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headrace.event import BeforeKind, Change, EventTablePosition, Op
from headrace.secret import Secret
from headrace.sources.postgres_events import PostgresEvents
from headrace.testing import PostgresDatabase, Reading, reading, session
from tests.sources.capturing import captured, image
from tests.sources.places import PostgresPlace
from tests.sources.test_postgres_types import SETUP, TYPES, fill, supported


def events(database: PostgresDatabase, **settings: Any) -> PostgresEvents:
    """The source that captures a database."""
    given: dict[str, Any] = {"name": "shop", "url": Secret(database.url), "poll_seconds": 0.02}
    return PostgresEvents(**given | settings)


def place_of(database: PostgresDatabase, **settings: Any) -> PostgresPlace:
    """A database and its source."""
    return PostgresPlace(database, lambda database: events(database, **settings))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look for new tables every moment."""
    monkeypatch.setattr("headrace.sources._pgestream._WATCH_SECONDS", 0.05)


@pytest.fixture
def feed(pg: PostgresDatabase, tmp_path: Path) -> Iterator[Reading]:
    """A captured table of users."""
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    with reading(place_of(pg), tmp_path) as opened:
        opened.catch_up()
        yield opened


def streamed(feed: Reading, table: str = "users") -> list[Change]:
    """What came after the copy."""
    feed.catch_up()
    return [c for c in feed.changes(table=table) if c.transaction.id.isdigit()]


# --- as logical replication tells it -------------------------------------------------------------


@pytest.mark.requirement("S1-30", "S1-32")
def test_images_are_those_of_logical_replication(any_pg: PostgresDatabase, tmp_path: Path) -> None:
    types = supported(any_pg, TYPES)
    any_pg.execute(SETUP)
    declared = ", ".join(f"c{at} {name}" for at, name in enumerate(types))
    any_pg.execute(
        f"CREATE TABLE everything (copy int, number int, {declared}, PRIMARY KEY (copy, number));"
        "ALTER TABLE everything REPLICA IDENTITY FULL"
    )
    any_pg.execute(
        """CREATE TABLE parted (id int, part int, made int GENERATED ALWAYS AS (id * 2) STORED,
                                name text, PRIMARY KEY (id, part)) PARTITION BY LIST (part);
           CREATE TABLE first_part PARTITION OF parted FOR VALUES IN (1);
           CREATE TABLE second_part (name text, extra int, part int NOT NULL,
               made int GENERATED ALWAYS AS (id * 2) STORED, id int NOT NULL);
           ALTER TABLE second_part DROP COLUMN extra;
           ALTER TABLE parted ATTACH PARTITION second_part FOR VALUES IN (2);
           ALTER TABLE parted REPLICA IDENTITY FULL;
           ALTER TABLE first_part REPLICA IDENTITY FULL;
           ALTER TABLE second_part REPLICA IDENTITY FULL"""
    )
    # Whoever writes may have set what values are printed by.
    contrary = "-c DateStyle=German -c TimeZone=Asia/Kolkata -c bytea_output=escape"
    contrary += " -c extra_float_digits=-10 -c IntervalStyle=postgres_verbose"
    with (
        captured(any_pg, tmp_path / "wal", tables=("public.*",)) as wal,
        reading(place_of(any_pg), tmp_path / "events") as told,
    ):
        told.catch_up()
        after = wal.log.latest_sequence
        fill(PostgresDatabase(any_pg.server, any_pg.name), types, copy=2)
        with psycopg.connect(any_pg.url, options=contrary, autocommit=True) as writer:
            writer.execute("UPDATE everything SET copy = 3 WHERE copy = 2")
            writer.execute("DELETE FROM everything WHERE copy = 3")
            writer.execute("INSERT INTO parted (id, part, name) VALUES (1, 1, 'a'), (2, 2, 'b')")
            writer.execute("UPDATE parted SET part = 2 WHERE id = 1")
            writer.execute("UPDATE second_part SET name = NULL")
            writer.execute("TRUNCATE everything, parted")
        for table in ("everything", "parted"):
            expected = [_told(c) for c in wal.changes(table=table, after=after)]
            assert [c for c in map(_told, streamed(told, table)) if c[0] is not Op.SCHEMA] == [
                c for c in expected if c[0] is not Op.SCHEMA
            ]
        tables = {c.table.name: c.table for c in wal.stored()}
        for change in told.changes():
            if change.table.name in ("everything", "parted"):
                known = tables[change.table.name]
                assert change.table.columns == known.columns
                assert change.table.origin == known.origin
                assert change.table.relation == known.relation


def _told(change: Change) -> tuple[object, ...]:
    if change.op is Op.TRUNCATE:
        return (change.op,)
    return (change.op, change.key, change.before, change.before_kind, change.after, change.changed)


def test_the_old_row_is_whole_whatever_the_replica_identity(feed: Reading) -> None:
    with session(feed.place) as writer:
        writer.execute("INSERT INTO users VALUES (1, repeat('long', 5000))")
        writer.execute("UPDATE users SET id = 2")
        writer.execute("DELETE FROM users")
    insert, update, delete = streamed(feed)
    assert update.before == insert.after
    assert (update.before_kind, update.changed, update.unchanged) == (BeforeKind.FULL, ("id",), ())
    assert (delete.before, delete.after) == (update.after, None)
    assert insert.table.identity == "full"
    assert {change.transaction.id for change in (insert, update, delete)} == {
        str(insert.position.commit)
    }
    entries = [change.position.own for change in (insert, update, delete)]
    assert entries == sorted(set(entries))
    assert isinstance(insert.position, EventTablePosition)
    assert insert.position.lsn > 0


# --- transactions --------------------------------------------------------------------------------


def test_a_transaction_that_waited_for_another_comes_after_it(feed: Reading) -> None:
    """Although its number is lower, and both are seen for the first time at once."""
    with session(feed.place) as writer:
        writer.execute("INSERT INTO users VALUES (1, 'ann'), (2, 'bob')")
    feed.catch_up()
    first, second = feed.place.connect(), feed.place.connect()
    first.execute("UPDATE users SET name = 'first' WHERE id = 1")
    second.execute("UPDATE users SET name = 'second' WHERE id = 2")
    second.commit()
    first.execute("UPDATE users SET name = 'first' WHERE id = 2")
    first.commit()
    first.close()
    second.close()
    updates = [c for c in streamed(feed) if c.op is Op.UPDATE]
    assert [image(c.after) for c in updates] == [
        {"id": 2, "name": "second"},
        {"id": 1, "name": "first"},
        {"id": 2, "name": "first"},
    ]
    assert updates[0].position.commit > updates[1].position.commit


def test_a_prepared_transaction_comes_when_it_commits(feed: Reading) -> None:
    writer = feed.place.connect()
    writer.execute("INSERT INTO users VALUES (1, 'prepared')")
    writer.execute("PREPARE TRANSACTION 'users'")
    writer.close()
    feed.place.database.execute("INSERT INTO users VALUES (2, 'meanwhile')")  # type: ignore[attr-defined]
    assert [image(c.after)["id"] for c in streamed(feed)] == [2]  # type: ignore[index]
    feed.place.database.execute("COMMIT PREPARED 'users'")  # type: ignore[attr-defined]
    assert [image(c.after)["id"] for c in streamed(feed)] == [2, 1]  # type: ignore[index]
