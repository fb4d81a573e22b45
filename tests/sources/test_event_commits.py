"""Of an event table nothing is missed, however late it commits and whoever else reads it."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from headrace.change.event import Op
from headrace.errors import PositionLost
from headrace.log import Log
from headrace.testing import PostgresDatabase, PostgresServer, Reading, reading, session
from tests.sources.capturing import image
from tests.sources.test_postgres_events import events, place_of

pytestmark = [pytest.mark.live, pytest.mark.requirement("S1-30", "S1-32")]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look for new tables every moment."""
    monkeypatch.setattr("headrace.sources.postgres_events.stream._WATCH_SECONDS", 0.05)


@pytest.fixture
def feed(pg: PostgresDatabase, tmp_path: Path) -> Iterator[Reading]:
    """A captured table of users."""
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    with reading(place_of(pg), tmp_path) as opened:
        opened.catch_up()
        yield opened


def inserted(feed: Reading) -> list[int]:
    """The ids of rows that were inserted, in the order of the log."""
    feed.catch_up()
    return [image(c.after)["id"] for c in feed.changes(Op.INSERT, table="users")]  # type: ignore[index]


# --- late commits --------------------------------------------------------------------------------


def test_subtransactions_belong_to_their_transaction_however_many_they_are(
    feed: Reading, pg: PostgresDatabase
) -> None:
    """A snapshot names at most 64 of them; more are looked up elsewhere."""
    late = feed.place.connect()
    for number in range(1, 201):
        late.execute("SAVEPOINT s")
        late.execute(f"INSERT INTO users VALUES ({number}, 'sub')")
        late.execute("ROLLBACK TO SAVEPOINT s" if number % 3 == 0 else "RELEASE SAVEPOINT s")
        if number % 50 == 0:
            pg.execute(f"INSERT INTO users VALUES ({1000 + number}, 'meanwhile')")
            feed.catch_up()
    late.commit()
    late.close()
    kept = [number for number in range(1, 201) if number % 3]
    assert inserted(feed) == [1050, 1100, 1150, 1200, *kept]
    last = feed.changes(Op.INSERT, table="users")[-len(kept) :]
    assert {change.transaction.id for change in last} == {last[0].transaction.id}
    assert [change.ordinal for change in last] == list(range(1, len(kept) + 1))


def test_a_transaction_stays_open_through_restarts_and_trimming(
    feed: Reading, pg: PostgresDatabase
) -> None:
    left = "SELECT count(*) FROM headrace.events WHERE entity_type = 'public.users'"
    late = feed.place.connect()
    late.execute("INSERT INTO users VALUES (1, 'late')")
    for number in range(2, 6):
        pg.execute(f"INSERT INTO users VALUES ({number}, 'early')")
        feed.catch_up()
        feed.reopen()
    feed.catch_up()
    assert pg.execute(left) == [(4,)]  # they are younger than one that has not ended
    late.execute("INSERT INTO users VALUES (6, 'late')")
    late.commit()
    late.close()
    assert inserted(feed) == [2, 3, 4, 5, 1, 6]
    while pg.execute(left) != [(0,)]:
        feed.catch_up()


def test_a_prepared_transaction_outlives_the_server(
    own_server: PostgresServer, tmp_path: Path
) -> None:
    with own_server.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
        with reading(place_of(database), tmp_path) as feed:
            feed.catch_up()
            writer = feed.place.connect()
            writer.execute("SAVEPOINT s")
            writer.execute("INSERT INTO users VALUES (1, 'prepared')")
            writer.execute("RELEASE SAVEPOINT s")
            writer.execute("PREPARE TRANSACTION 'one'")
            writer.execute("INSERT INTO users VALUES (2, 'undone')")
            writer.execute("PREPARE TRANSACTION 'two'")
            writer.close()
            database.execute("INSERT INTO users VALUES (3, 'meanwhile')")
            feed.catch_up()
            own_server.restart("immediate")
            database.execute("INSERT INTO users VALUES (4, 'meanwhile')")
            assert inserted(feed) == [3, 4]
            database.execute("COMMIT PREPARED 'one'")
            database.execute("ROLLBACK PREPARED 'two'")
            assert inserted(feed) == [3, 4, 1]


# --- statements ----------------------------------------------------------------------------------


def test_every_way_to_write_a_row_is_told(feed: Reading, pg: PostgresDatabase) -> None:
    pg.execute("INSERT INTO users VALUES (1, 'a')")
    pg.execute("INSERT INTO users VALUES (1, 'b') ON CONFLICT DO NOTHING")
    pg.execute("INSERT INTO users VALUES (1, 'c') ON CONFLICT (id) DO UPDATE SET name = 'd'")
    pg.execute(
        """MERGE INTO users u USING (VALUES (1, 'e'), (2, 'f')) v(id, name) ON u.id = v.id
           WHEN MATCHED THEN UPDATE SET name = v.name
           WHEN NOT MATCHED THEN INSERT VALUES (v.id, v.name)"""
    )
    with pg.connect() as connection:
        with connection.cursor().copy("COPY users FROM STDIN") as copy:
            copy.write_row((3, "g"))
        # As a replica applies rows, or a restore loads them.
        connection.execute("SET session_replication_role = replica")
        connection.execute("DELETE FROM users WHERE id = 2")
    feed.catch_up()
    told = feed.changes(Op.INSERT, Op.UPDATE, Op.DELETE, table="users")
    assert [(c.op, c.before, c.after) for c in told] == [
        (Op.INSERT, None, b'{"id":1,"name":"a"}'),
        (Op.UPDATE, b'{"id":1,"name":"a"}', b'{"id":1,"name":"d"}'),
        (Op.UPDATE, b'{"id":1,"name":"d"}', b'{"id":1,"name":"e"}'),
        (Op.INSERT, None, b'{"id":2,"name":"f"}'),
        (Op.INSERT, None, b'{"id":3,"name":"g"}'),
        (Op.DELETE, b'{"id":2,"name":"f"}', None),
    ]


# --- tables --------------------------------------------------------------------------------------


def test_tables_that_are_renamed_dropped_and_made_anew_are_followed(
    feed: Reading, pg: PostgresDatabase
) -> None:
    def names(table: str) -> list[object]:
        return [row["name"] for row in feed.rows(table, surprises=True)]

    pg.execute("INSERT INTO users VALUES (1, 'ann')")
    feed.catch_up()
    pg.execute("ALTER TABLE users RENAME TO people")
    pg.execute("INSERT INTO people VALUES (2, 'bob')")
    feed.until_change("people")
    feed.catch_up()
    assert names("people") == ["ann", "bob"]
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text, more text)")
    pg.execute("INSERT INTO users VALUES (7, 'new')")
    feed.until(lambda batch: any(c.key == b'{"id":7}' for c in batch.changes), take=feed.step)
    feed.catch_up()
    assert (names("users"), names("people")) == (["new"], ["ann", "bob"])
    pg.execute("DROP TABLE people; CREATE TABLE people (id int PRIMARY KEY, name text)")
    pg.execute("INSERT INTO people VALUES (9, 'again')")
    feed.until(lambda batch: any(c.key == b'{"id":9}' for c in batch.changes), take=feed.step)
    feed.catch_up()
    assert names("people") == ["again"]
    assert feed.stream.status().errored == {}


def test_a_table_that_has_another_name_for_a_while_misses_nothing(
    feed: Reading, pg: PostgresDatabase
) -> None:
    """Its name is its own again before anybody has looked."""
    with session(feed.place) as writer:
        writer.execute("INSERT INTO users VALUES (1, 'ann'), (2, 'bob')")
        writer.execute("ALTER TABLE users RENAME TO people")
        writer.execute("INSERT INTO people VALUES (3, 'cid')")
        writer.execute("DELETE FROM people WHERE id = 1")
        writer.execute("ALTER TABLE people RENAME TO users")
        writer.execute("INSERT INTO users VALUES (4, 'dan')")
    feed.until_change("users")
    feed.catch_up()
    assert [row["id"] for row in feed.rows("users")] == [2, 3, 4]
    assert feed.changes(table="people") == []
    with session(feed.place) as writer:
        writer.execute("ALTER TABLE users RENAME TO people")
        writer.execute("INSERT INTO people VALUES (5, 'eve')")
    feed.until_change("people")
    pg.execute("DELETE FROM people WHERE id = 5")
    feed.catch_up()
    assert [row["id"] for row in feed.rows("people")] == [2, 3, 4]


# --- other readers, other event tables -----------------------------------------------------------


def test_a_second_reader_of_one_event_table_halts_before_it_misses_anything(
    feed: Reading, pg: PostgresDatabase, tmp_path: Path
) -> None:
    """Its events are removed for the first one, while it is open and behind."""
    with Log.open(tmp_path / "second") as log:
        second = Reading(place_of(pg, name="second"), log)
        second.catch_up()
        # The first one stores and removes, and the second one has not looked yet.
        left = "SELECT count(*) FROM headrace.events WHERE entity_type = 'public.users'"
        pg.execute("INSERT INTO users VALUES (1, 'a')")
        while pg.execute(left) != [(0,)]:
            feed.catch_up()
        with pytest.raises(PositionLost, match="somebody else reads this event table"):
            second.until(lambda batch: False, take=second.step)
        second.close()


def test_events_that_are_removed_while_they_are_read_halt_it(
    pg: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a part of a transaction is told."""
    monkeypatch.setattr("headrace.sources.postgres_events.stream._PAGE", 4)
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    for entries in (3, 20):  # in one page, and in pieces
        with reading(place_of(pg), tmp_path / str(entries)) as feed:
            feed.catch_up()
            with session(feed.place) as writer:
                writer.execute(f"INSERT INTO users SELECT generate_series(1, {entries})")
            catalog = feed.stream._flow._catalog  # type: ignore[attr-defined]
            asked = catalog.transactions

            def removed(*given: object, asked: object = asked) -> Iterator[object]:
                for told in asked(*given):  # type: ignore[operator]
                    pg.execute("DELETE FROM headrace.events WHERE new LIKE '(2,%'")
                    yield told

            monkeypatch.setattr(catalog, "transactions", removed)
            with pytest.raises(PositionLost, match="while they were read"):
                feed.until(lambda batch: False, take=feed.step)
            assert feed.changes(Op.INSERT) == []
        pg.execute("DROP TABLE marks; TRUNCATE users; DROP SCHEMA headrace CASCADE")


def test_an_event_table_from_a_dump_is_not_the_one_that_was_followed(
    feed: Reading, pg: PostgresDatabase
) -> None:
    """It says the same of itself, and its server is the same."""
    pg.execute("INSERT INTO users VALUES (1, 'kept')")
    feed.catch_up()
    pg.execute(
        """ALTER TABLE headrace.events RENAME TO dumped;
           CREATE TABLE headrace.events (LIKE headrace.dumped INCLUDING ALL);
           DROP TABLE headrace.dumped; DELETE FROM users"""
    )
    with pytest.raises(PositionLost, match="installed anew"):
        feed.until(lambda batch: False, take=feed.step)
    stream = events(pg).open(feed.log.resume("shop"), feed.log.register)
    with pytest.raises(PositionLost, match="installed anew"):
        next(iter(stream))


def test_removed_while_it_is_captured_it_is_not_followed_silently(
    feed: Reading, pg: PostgresDatabase
) -> None:
    with psycopg.connect(pg.url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA headrace CASCADE")
        connection.execute("INSERT INTO users VALUES (1, 'untold')")
    with pytest.raises(PositionLost, match="no event table in schema headrace any more"):
        feed.until(lambda batch: False, take=feed.step)
    feed.reopen()  # which installs it anew
    with pytest.raises(PositionLost, match="installed anew"):
        feed.step()
