"""A table is kept with its foreign keys, as they are while its rows are written."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import LiteralString

import pytest

from headrace.change.event import Change, Op, Reference, Table
from headrace.testing import PostgresDatabase, PostgresServer, wait_until
from tests.conftest import Servers
from tests.sources.capturing import Captured, captured, postgres

TABLES: LiteralString = """
    CREATE SCHEMA crm;
    CREATE TABLE crm.people (id int PRIMARY KEY, email text UNIQUE, boss int REFERENCES crm.people);
    CREATE TABLE docs (tenant int, number int, title text, PRIMARY KEY (tenant, number),
                       UNIQUE (number, title));
    CREATE TABLE notes (
        id int PRIMARY KEY,
        title text,
        number int,
        tenant int,
        author text CONSTRAINT b REFERENCES crm.people (email),
        reader int CONSTRAINT a REFERENCES crm.people ON DELETE CASCADE,
        CONSTRAINT d FOREIGN KEY (tenant, number) REFERENCES docs,
        CONSTRAINT c FOREIGN KEY (title, number) REFERENCES docs (title, number),
        CONSTRAINT e FOREIGN KEY (reader) REFERENCES crm.people DEFERRABLE NOT VALID
    );
    ALTER TABLE notes DROP COLUMN title, ADD COLUMN title text;
    ALTER TABLE notes ADD CONSTRAINT c FOREIGN KEY (number, title) REFERENCES docs (number, title);
    CREATE TABLE events (id int, region text, note int REFERENCES notes, PRIMARY KEY (id, region))
        PARTITION BY LIST (region);
    CREATE TABLE events_eu PARTITION OF events FOR VALUES IN ('eu');
    CREATE TABLE events_us (note int, extra int, region text NOT NULL, id int NOT NULL);
    ALTER TABLE events_us DROP COLUMN extra;
    ALTER TABLE events ATTACH PARTITION events_us FOR VALUES IN ('us');
    CREATE TABLE alarms (
        id int PRIMARY KEY,
        event int,
        region text,
        other int,
        FOREIGN KEY (event, region) REFERENCES events,
        FOREIGN KEY (other, region) REFERENCES events_us (id, region)
    );
"""
REFERENCES = {
    "people": [Reference(("boss",), "crm", "people", ("id",))],
    "docs": [],
    # In the order of their first columns: number, tenant, author, reader.
    "notes": [
        Reference(("number", "title"), "public", "docs", ("number", "title")),
        Reference(("tenant", "number"), "public", "docs", ("tenant", "number")),
        Reference(("author",), "crm", "people", ("email",)),
        Reference(("reader",), "crm", "people", ("id",)),
    ],
    "events": [Reference(("note",), "public", "notes", ("id",))],
    "alarms": [
        Reference(("event", "region"), "public", "events", ("id", "region")),
        Reference(("other", "region"), "public", "events", ("id", "region")),
    ],
}
ROWS: LiteralString = """
    INSERT INTO crm.people VALUES (1, 'a@b', 1);
    INSERT INTO docs VALUES (1, 1, 'doc');
    INSERT INTO notes VALUES (1, 1, 1, 'a@b', 1, 'doc');
    INSERT INTO events VALUES (1, 'eu', 1), (1, 'us', 1);
    INSERT INTO alarms VALUES (1, 1, 'us', 1);
"""


@pytest.fixture
def shop(pg: PostgresDatabase, tmp_path: Path) -> Iterator[Captured]:
    """A captured database with parents and children that do not refer to them yet."""
    pg.execute("CREATE TABLE parents (id int PRIMARY KEY)")
    pg.execute("CREATE TABLE children (id int PRIMARY KEY, parent int)")
    pg.execute("INSERT INTO parents VALUES (1)")
    with captured(pg, tmp_path) as feed:
        yield feed


PARENT = Reference(("parent",), "public", "parents", ("id",))
ADD: LiteralString = (
    "ALTER TABLE children ADD CONSTRAINT fk FOREIGN KEY (parent) REFERENCES parents"
)


def references(tables: list[Table]) -> dict[str, list[Reference]]:
    return {table.name: list(table.references) for table in tables}


def told(changes: list[Change]) -> list[tuple[Op, tuple[Reference, ...]]]:
    return [(change.op, change.table.references) for change in changes]


# --- every kind ----------------------------------------------------------------------------------


def test_copy_and_stream_know_every_kind_of_foreign_key(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    any_pg.execute(TABLES)
    with captured(any_pg, tmp_path, ddl=True) as feed:
        assert references(feed.log.tables()) == REFERENCES
        any_pg.execute(ROWS)
        feed.restart()
        any_pg.execute("UPDATE notes SET reader = NULL; UPDATE events SET note = NULL")
        changes = feed.changes()
        rows = [change for change in changes if change.op is not Op.MESSAGE]
        # Nothing was altered, so nothing has another version, nor was any table told twice.
        assert len(feed.log.tables()) == len(REFERENCES) + 1  # and that of the messages
        assert len([change for change in rows if change.op is Op.SCHEMA]) == len(REFERENCES)
    for change in rows:
        assert list(change.table.references) == REFERENCES[change.table.name]


def test_the_tables_that_would_be_captured_are_those_that_then_are(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    any_pg.execute(TABLES)
    any_pg.execute("CREATE TABLE sums (id int PRIMARY KEY, s int GENERATED ALWAYS AS (1) STORED)")
    if any_pg.server.install.version >= 18:
        any_pg.execute("ALTER TABLE sums ADD COLUMN v int GENERATED ALWAYS AS (id)")
    wanted = ("notes", "crm.*", "public.sums", "public.events*", "nothing")
    before = postgres(any_pg, tables=wanted).captured_tables()
    assert [f"{table.schema}.{table.name}" for table in before] == [
        "crm.people", "public.events", "public.notes", "public.sums",
    ]  # fmt: skip
    with captured(any_pg, tmp_path, tables=wanted) as feed:
        then = {table.name: table for table in feed.log.tables()}
        after = feed.source.captured_tables()
    for table in before:
        captured_as = then[table.name]
        assert table.columns == captured_as.columns
        assert table.references == captured_as.references
        assert (table.identity, table.relation) == (captured_as.identity, captured_as.relation)
    assert before == after


def test_columns_that_are_not_captured_refer_to_nothing(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(TABLES)
    pg.execute(
        "CREATE PUBLICATION ours FOR TABLE notes (id, number, tenant, author)"
        " WITH (publish_via_partition_root)"
    )
    with captured(pg, tmp_path, tables=("notes",), publication="ours") as feed:
        pg.execute(ROWS)
        [insert] = feed.streamed(Op.INSERT)
        [table] = feed.source.captured_tables()
    assert [reference.columns for reference in insert.table.references] == [
        ("tenant", "number"), ("author",),
    ]  # fmt: skip
    assert (table.columns, table.references) == (insert.table.columns, insert.table.references)


def test_a_key_over_periods_names_no_row_and_is_left_out(
    servers: Servers,
) -> None:
    with servers[18].database() as database:
        database.execute(
            "CREATE TABLE rooms (id int4range, during daterange,"
            " PRIMARY KEY (id, during WITHOUT OVERLAPS));"
            "CREATE TABLE stays (id int PRIMARY KEY, room int4range, during daterange,"
            " FOREIGN KEY (room, PERIOD during) REFERENCES rooms)"
        )
        tables = postgres(database).captured_tables()
    assert references(tables) == {"rooms": [], "stays": []}


# --- added and dropped later ---------------------------------------------------------------------


def test_a_foreign_key_counts_from_the_first_row_after_it(shop: Captured) -> None:
    # The catalogs show the present, so each step is in the log before the next one.
    shop.database.execute("INSERT INTO children VALUES (1, 1)")
    shop.until_caught_up()
    shop.database.execute(ADD)
    shop.database.execute("INSERT INTO children VALUES (2, 1)")
    shop.until_caught_up()
    shop.database.execute("ALTER TABLE children DROP CONSTRAINT fk")
    shop.database.execute("INSERT INTO children VALUES (3, 1)")
    changes = shop.streamed()
    assert told(changes) == [
        (Op.INSERT, ()),
        (Op.SCHEMA, (PARENT,)),
        (Op.INSERT, (PARENT,)),
        (Op.SCHEMA, ()),
        (Op.INSERT, ()),
    ]
    versions = [change.table.version for change in changes]
    assert versions == sorted(versions)
    assert len(set(versions)) == 3


def test_a_foreign_key_counts_for_the_rows_that_follow_in_its_own_transaction(
    shop: Captured,
) -> None:
    with shop.database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO children VALUES (1, 1)")
        connection.execute(ADD)
        connection.execute("INSERT INTO children VALUES (2, 1)")
    *before, last = told(shop.streamed())
    assert last == (Op.INSERT, (PARENT,))
    # The catalogs show it only when the transaction has ended, so the first row may have it too.
    assert sorted(op for op, _ in before) == [Op.INSERT, Op.SCHEMA]


def test_a_foreign_key_goes_with_the_table_it_names(shop: Captured) -> None:
    shop.database.execute(ADD)
    shop.database.execute("INSERT INTO children VALUES (1, 1)")
    shop.until_caught_up()
    shop.database.execute("DROP TABLE parents CASCADE")
    shop.database.execute("INSERT INTO children VALUES (2, 1)")
    assert told(shop.streamed()) == [
        (Op.SCHEMA, (PARENT,)),
        (Op.INSERT, (PARENT,)),
        (Op.SCHEMA, ()),
        (Op.INSERT, ()),
    ]


def test_with_the_event_trigger_a_foreign_key_is_told_at_once(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE parents (id int PRIMARY KEY)")
    pg.execute("CREATE TABLE children (id int PRIMARY KEY, parent int)")
    with captured(pg, tmp_path, ddl=True) as feed:
        pg.execute(ADD)
        feed.until_caught_up()
        pg.execute("ALTER TABLE children DROP CONSTRAINT fk")
        pg.execute("INSERT INTO children VALUES (1, 1)")
        changes = feed.streamed(table="children")
    assert told(changes) == [(Op.SCHEMA, (PARENT,)), (Op.SCHEMA, ()), (Op.INSERT, ())]


def test_what_changes_no_foreign_key_makes_no_version(shop: Captured) -> None:
    shop.database.execute(ADD)
    shop.database.execute("INSERT INTO children VALUES (1, 1)")
    for number, statement in enumerate(
        (
            "ANALYZE children",
            "ALTER TABLE children SET (fillfactor = 50)",
            "CREATE INDEX ON children (parent)",
            "CREATE TABLE grandchildren (id int PRIMARY KEY, child int REFERENCES children)",
            "ALTER TABLE children RENAME CONSTRAINT fk TO other",
            "DROP TABLE grandchildren",
        ),
        start=2,
    ):
        shop.database.execute(statement)
        shop.database.execute("INSERT INTO children VALUES (%s, 1)", (number,))
    shop.restart()
    shop.database.execute("INSERT INTO children VALUES (100, 1)")
    changes = shop.streamed(table="children")
    assert [change.op for change in changes] == [Op.SCHEMA] + [Op.INSERT] * 8
    assert len({change.table.version for change in changes}) == 1


# --- synchronous standbys ------------------------------------------------------------------------

WAITS: LiteralString = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
LOOKS: LiteralString = """
    SELECT 1 FROM pg_stat_activity
    WHERE query LIKE '%pg_visible_in_snapshot%' AND pid <> pg_backend_pid()
"""


def test_a_commit_that_waits_for_a_standby_shows_its_foreign_keys_all_the_same(
    own_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.postgres.catalog._UNSEEN_SECONDS", 20.0)
    with own_server.database() as database:
        database.execute("CREATE TABLE parents (id int PRIMARY KEY)")
        database.execute("CREATE TABLE children (id int PRIMARY KEY, parent int)")
        with captured(database, tmp_path) as feed:
            writing = threading.Thread(
                target=database.execute, args=(f"{ADD}; INSERT INTO children VALUES (1)",)
            )
            with standby_missing(database):
                writing.start()
                # The server has sent the transaction, and still hides it from everybody else.
                wait_until(lambda: database.execute(WAITS), message="the commit waits")
                wait_until(lambda: database.execute(LOOKS), message="the table is looked at")
            writing.join()
            changes = feed.streamed()
    assert told(changes) == [(Op.SCHEMA, (PARENT,)), (Op.INSERT, (PARENT,))]


@contextmanager
def standby_missing(database: PostgresDatabase) -> Iterator[None]:
    """Commits wait for a standby that is not there, until the block ends."""
    set_standby(database, "nobody")
    try:
        yield
    finally:
        set_standby(database, "")


def set_standby(database: PostgresDatabase, name: str) -> None:
    with database.connect() as connection:
        connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
        connection.execute("SELECT pg_reload_conf()")
    wait_until(
        lambda: database.execute("SHOW synchronous_standby_names") == [(name,)],
        message="the server has taken the setting",
    )
