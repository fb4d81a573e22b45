"""What is told by triggers is what logical replication tells, and a little more."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headrace.change.event import Batch, BeforeKind, Change, Op, same_columns
from headrace.errors import PositionLost
from headrace.secret import Secret
from headrace.sources.postgres_events import PostgresEvents
from headrace.sources.postgres_events.outbox import Outbox
from headrace.sources.postgres_events.position import EventTablePosition
from headrace.testing import PostgresDatabase, Reading, reading, session
from tests.conftest import Servers
from tests.sources.capturing import captured, image
from tests.sources.places import PostgresPlace
from tests.sources.test_postgres_server import BAD, Lawless
from tests.sources.test_postgres_types import SETUP, TYPES, fill, supported


def events(database: PostgresDatabase, **settings: Any) -> PostgresEvents:
    """The source that captures a database."""
    given: dict[str, Any] = {"name": "shop", "url": Secret(database.url), "poll_seconds": 0.02}
    return PostgresEvents(**given | settings)


def position(change: Change) -> EventTablePosition:
    """Where a change stands in the event table."""
    assert isinstance(change.position, EventTablePosition)
    return change.position


def place_of(database: PostgresDatabase, **settings: Any) -> PostgresPlace:
    """A database and its source."""
    return PostgresPlace(database, lambda database: events(database, **settings))


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
            # Truncated partitions make their table be read anew, which begins with a TRUNCATE.
            found = wal.changes(table=table, after=after)
            expected = [_told(c) for c in found if c.transaction.id.isdigit()]
            assert [c for c in map(_told, streamed(told, table)) if c[0] is not Op.SCHEMA] == [
                c for c in expected if c[0] is not Op.SCHEMA
            ]
        tables = {c.table.name: c.table for c in wal.stored()}
        for change in told.changes():
            if change.table.name in ("everything", "parted"):
                known = tables[change.table.name]
                # An event does not say which column is which.
                assert same_columns(change.table.columns, known.columns)
                assert change.table.origin == known.origin
                assert change.table.relation == known.relation


def test_two_tables_whose_names_differ_only_by_where_a_dot_belongs_are_two(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(
        'CREATE SCHEMA x; CREATE SCHEMA "x.y"; CREATE TABLE "x.y".z (id int PRIMARY KEY);'
        'CREATE TABLE x."y.z" (id int PRIMARY KEY); INSERT INTO "x.y".z VALUES (1)'
    )
    with reading(place_of(pg, tables=("*", '"x.y".z', 'x."y.z"')), tmp_path) as told:
        told.catch_up()
        pg.execute('INSERT INTO "x.y".z VALUES (2); INSERT INTO x."y.z" VALUES (3)')
        told.catch_up()
        rows = [c for c in told.changes() if c.table.schema != "public" and c.op is not Op.SCHEMA]
    names = [(c.table.path, image(c.after)) for c in rows]
    assert names == [('"x.y".z', {"id": 1}), ('"x.y".z', {"id": 2}), ('x."y.z"', {"id": 3})]


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
    assert len({change.transaction.id for change in (insert, update, delete)}) == 1
    assert len({change.position.commit for change in (insert, update, delete)}) == 1
    entries = [change.position.own for change in (insert, update, delete)]
    assert entries == sorted(set(entries))
    assert position(insert).lsn > 0


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
    numbers = [position(change).transaction for change in updates[:2]]
    assert numbers[0] > numbers[1]
    assert updates[0].position.commit < updates[1].position.commit


def test_a_prepared_transaction_comes_when_it_commits(feed: Reading) -> None:
    writer = feed.place.connect()
    writer.execute("INSERT INTO users VALUES (1, 'prepared')")
    writer.execute("PREPARE TRANSACTION 'users'")
    writer.close()
    feed.place.database.execute("INSERT INTO users VALUES (2, 'meanwhile')")  # type: ignore[attr-defined]
    assert [image(c.after)["id"] for c in streamed(feed)] == [2]  # type: ignore[index]
    feed.place.database.execute("COMMIT PREPARED 'users'")  # type: ignore[attr-defined]
    assert [image(c.after)["id"] for c in streamed(feed)] == [2, 1]  # type: ignore[index]


# --- an outbox -----------------------------------------------------------------------------------


def test_rows_of_an_outbox_are_told_as_what_they_name(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute(
        """CREATE TABLE outbox (event_no int PRIMARY KEY, aggregatetype text, aggregateid text,
                                type text, payload jsonb, sent boolean);
           INSERT INTO outbox VALUES (1, 'order', 'o1', 'created', '{"n": 1.50}')"""
    )
    outbox = Outbox(table="public.outbox", id="event_no")
    with reading(place_of(pg, outbox=outbox), tmp_path) as feed:
        feed.catch_up()
        with session(feed.place) as writer:
            writer.execute("INSERT INTO outbox VALUES (2, 'order', 'o1', 'paid', '{}')")
            writer.execute("INSERT INTO outbox VALUES (3, 'customer', 'c1', 'moved', 'null')")
            writer.execute("UPDATE outbox SET sent = true")
            writer.execute("DELETE FROM outbox")
        feed.catch_up()
        feed.reopen()
        pg.execute("INSERT INTO outbox VALUES (4, 'order', 'o2', 'created', '[]')")
        pg.execute("TRUNCATE outbox")
        feed.catch_up()
        told = feed.changes()
        ids = {change.id for change in told}
    assert [(c.op, f"{c.table.schema}.{c.table.name}", c.key, c.ordinal, c.last) for c in told] == [
        (Op.SCHEMA, "outbox.order", None, 1, False),
        (Op.READ, "outbox.order", b'{"id":1}', 2, True),
        (Op.INSERT, "outbox.order", b'{"id":2}', 1, False),
        (Op.SCHEMA, "outbox.customer", None, 2, False),
        (Op.INSERT, "outbox.customer", b'{"id":3}', 3, True),
        (Op.INSERT, "outbox.order", b'{"id":4}', 1, True),
    ]
    assert told[1].after == (
        b'{"id":1,"aggregate_id":"o1","type":"created","payload":{"n": 1.50},"sent":null}'
    )
    assert [column.name for column in told[1].table.columns] == [
        "id", "aggregate_id", "type", "payload", "sent",
    ]  # fmt: skip
    assert told[1].table.key == ("id",)
    assert len(ids) == len(told)


def test_an_outbox_that_lacks_a_column_stops_alone(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TABLE outbox (id int PRIMARY KEY, aggregatetype text)")
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    with reading(place_of(pg, outbox=Outbox(table="public.outbox")), tmp_path) as feed:
        feed.catch_up()
        pg.execute("INSERT INTO outbox VALUES (1, 'order')")
        pg.execute("INSERT INTO users VALUES (1)")
        feed.catch_up()
        why = feed.stream.status().errored["public.outbox"]
        assert "no column aggregateid, type, payload" in why
        assert len(feed.changes(Op.INSERT, table="users")) == 1
        [kept] = feed.changes(Op.MESSAGE, table="outbox")
        assert image(kept.after)["operation"] == "INSERT"  # type: ignore[index]


# --- what else may happen ------------------------------------------------------------------------


def test_annotations_become_the_transactions_metadata(feed: Reading) -> None:
    with session(feed.place) as writer:
        writer.execute("""SET LOCAL headrace.metadata = '{"user": "ann", "n": 1.50}'""")
        writer.execute("INSERT INTO users VALUES (1, 'a')")
        writer.execute("""SET LOCAL headrace.metadata = '{"user": "bob"}'""")
        writer.execute("INSERT INTO users VALUES (2, 'b')")
    with session(feed.place) as writer:
        writer.execute("SET LOCAL headrace.metadata = 'no json'")
        writer.execute("INSERT INTO users VALUES (3, 'c')")
    with session(feed.place) as writer:
        writer.execute("INSERT INTO users VALUES (4, 'd')")
    told = [c.transaction.metadata for c in streamed(feed) if c.op is Op.INSERT]
    assert told == [b'{"user":"bob","n":1.50}'] * 2 + [b'{"annotation_error":"no json"}', None]


def test_columns_may_change_within_a_transaction_that_writes(feed: Reading) -> None:
    with session(feed.place) as writer:
        writer.execute("INSERT INTO users VALUES (1, '7')")
        writer.execute("ALTER TABLE users ALTER name TYPE int USING name::int")
        writer.execute("INSERT INTO users VALUES (2, 8)")
        writer.execute("SAVEPOINT a")
        writer.execute("ALTER TABLE users RENAME name TO number")
        writer.execute("INSERT INTO users VALUES (3, 9)")
        writer.execute("ROLLBACK TO SAVEPOINT a")
        writer.execute("INSERT INTO users VALUES (4, 10)")
        writer.execute("ALTER TABLE users DROP COLUMN name")
        writer.execute("UPDATE users SET id = 5 WHERE id = 4")
    told = [(c.op, c.before, c.after) for c in streamed(feed) if c.op is not Op.SCHEMA]
    assert told == [
        (Op.INSERT, None, b'{"id":1,"name":"7"}'),
        (Op.INSERT, None, b'{"id":2,"name":8}'),
        (Op.INSERT, None, b'{"id":4,"name":10}'),
        (Op.UPDATE, b'{"id":4}', b'{"id":5}'),
    ]


def test_a_table_whose_triggers_did_not_fire_is_copied_anew(
    feed: Reading, pg: PostgresDatabase
) -> None:
    ((oid,),) = pg.execute("SELECT 'users'::regclass::oid")
    with session(feed.place) as writer:
        writer.execute(f'ALTER TABLE users DISABLE TRIGGER "!headrace_insert_{oid}"')
        writer.execute("INSERT INTO users VALUES (1, 'untold')")
        writer.execute(f'ALTER TABLE users ENABLE TRIGGER "!headrace_insert_{oid}"')
    feed.until_change("users")
    assert [row["name"] for row in feed.rows("users")] == ["untold"]
    with session(feed.place) as writer:
        writer.execute(f'DROP TRIGGER "!headrace_insert_{oid}" ON users')
        writer.execute("INSERT INTO users VALUES (2, 'untold')")
    feed.until(lambda batch: any(c.op is Op.READ for c in batch.changes), take=feed.step)
    feed.catch_up()
    assert [row["id"] for row in feed.rows("users")] == [1, 2]


def test_events_are_removed_once_the_log_has_them(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    left = "SELECT count(*) FROM headrace.events WHERE entity_type = 'public.users'"
    with reading(place_of(pg, trim=False), tmp_path) as feed:
        feed.catch_up()
        pg.execute("INSERT INTO users SELECT generate_series(1, 10)")
        feed.catch_up()
        feed.catch_up()
        assert pg.execute(left) == [(10,)]
    with reading(place_of(pg), tmp_path) as feed:
        while pg.execute(left) != [(0,)]:
            feed.catch_up()
        resume = feed.log.resume("shop")
        assert len(feed.changes(Op.INSERT, table="users")) == 10
    pg.execute("UPDATE headrace.state SET trimmed = (trimmed::text::bigint + 1000000)::text::xid8")
    assert resume is not None
    stream = events(pg).open(resume, feed.log.register)
    with pytest.raises(PositionLost, match="somebody else reads this event table"):
        next(iter(stream))
    pg.execute("UPDATE headrace.state SET trimmed = '0', installation = gen_random_uuid()")
    stream = events(pg).open(resume, feed.log.register)
    with pytest.raises(PositionLost, match="installed anew"):
        next(iter(stream))


def test_a_busy_table_is_not_waited_for_without_end(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY); CREATE TABLE busy (id int PRIMARY KEY)")
    with pg.connect(autocommit=False) as writer:
        writer.execute("INSERT INTO busy VALUES (1)")
        with reading(place_of(pg), tmp_path) as feed:
            feed.catch_up()
            assert "once the transactions that write to it end" in str(
                feed.stream.status().errored["public.busy"]
            )
            writer.commit()
            feed.until_change("busy")
            feed.catch_up()
            assert feed.stream.status().errored == {}


def test_a_value_that_cannot_be_read_stops_only_its_table(servers: Servers, tmp_path: Path) -> None:
    server, name = servers[16], "lawless_events"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(
            f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'"
        )
        try:
            _read_what_is_not_utf8(Lawless(server, name), tmp_path)
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _read_what_is_not_utf8(lawless: PostgresDatabase, folder: Path) -> None:
    lawless.execute(
        "CREATE TABLE good (id int PRIMARY KEY, name text);"
        "CREATE TABLE users (id int PRIMARY KEY, name text); INSERT INTO users VALUES (1, 'ok')"
    )
    with reading(place_of(lawless), folder) as feed:
        feed.catch_up()
        lawless.execute(f"INSERT INTO users VALUES (2, {BAD})")
        lawless.execute("INSERT INTO good VALUES (1, 'grün')")
        lawless.execute("INSERT INTO users VALUES (3, 'fine')")
        feed.catch_up()
        assert "UTF-8" in feed.stream.status().errored["public.users"]
        [good] = feed.changes(Op.INSERT, table="good")
        assert image(good.after) == {"id": 1, "name": "grün"}
        kept = [image(change.after) or {} for change in feed.changes(Op.MESSAGE, table="users")]
        assert [base64.b64decode(each["new"]) for each in kept] == [b"(2,b\xffd)", b"(3,fine)"]
        # Mended, and copied again.
        lawless.execute("UPDATE users SET name = 'mended' WHERE id = 2")
        feed.close()
        resume = feed.source.copy_again(feed.log.resume("shop"), ["users"])
        feed.log.append("shop", Batch((), resume))
        feed.reopen()
        feed.catch_up()
        assert feed.stream.status().errored == {}
        assert [row["name"] for row in feed.rows("users")] == ["ok", "mended", "fine"]
