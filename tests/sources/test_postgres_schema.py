"""A table may change while it is captured: every row keeps the columns it was written with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.change.event import Change, Op
from headrace.log import Log
from headrace.testing import PostgresDatabase, wait_until
from tests.conftest import Servers
from tests.sources.capturing import Captured, captured, driven, image, postgres


@pytest.fixture
def shop(pg: PostgresDatabase, tmp_path: Path) -> Iterator[Captured]:
    """A captured database with one plain table."""
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    with captured(pg, tmp_path) as feed:
        yield feed


@pytest.fixture
def told(pg: PostgresDatabase, tmp_path: Path) -> Iterator[Captured]:
    """The same with the event trigger that tells DDL."""
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    with captured(pg, tmp_path, ddl=True) as feed:
        yield feed


def columns(change: Change) -> list[tuple[str, str]]:
    """Names and types that a SCHEMA change tells."""
    said = image(change.after)
    assert said is not None
    return [(column["name"], column["type"]) for column in said["columns"]]


def ddl(change: Change) -> Any:
    """What a SCHEMA change says of its statement."""
    said = image(change.after) or {}
    return said.get("ddl_type"), said.get("ddl_command")


# --- seen with the next row ----------------------------------------------------------------------


def test_the_copy_tells_the_columns_before_the_first_row(shop: Captured) -> None:
    shop.database.execute("INSERT INTO users VALUES (1, 'ann')")
    schema, insert = shop.changes()
    assert schema.op is Op.SCHEMA
    assert columns(schema) == [("id", "integer"), ("name", "text")]
    assert (image(schema.after) or {})["columns"][0]["key"] is True
    assert insert.table.version == schema.table.version


def test_each_change_of_columns_is_told_before_the_first_row_that_has_it(shop: Captured) -> None:
    steps = [
        "ALTER TABLE users ADD COLUMN age int DEFAULT 7",
        "ALTER TABLE users ALTER COLUMN age TYPE numeric(6,2)",
        "ALTER TABLE users RENAME COLUMN age TO years",
        "ALTER TABLE users DROP COLUMN years",
        "ALTER TABLE users REPLICA IDENTITY FULL",
    ]
    for number, step in enumerate(steps):
        shop.database.execute(step)
        shop.database.execute("INSERT INTO users (id) VALUES (%s)", (number,))
    # A column that gets another type makes the table be copied again, sooner or later.
    changes = shop.streamed(Op.SCHEMA, Op.INSERT)
    assert [change.op for change in changes] == [Op.SCHEMA, Op.INSERT] * 5
    schemas, rows = changes[::2], changes[1::2]
    plain = [("id", "integer"), ("name", "text")]
    assert [columns(change) for change in schemas] == [
        [*plain, ("age", "integer")],
        [*plain, ("age", "numeric(6,2)")],
        [*plain, ("years", "numeric(6,2)")],
        plain,
        plain,
    ]
    assert [c.table.version for c in schemas] == [c.table.version for c in rows] == [2, 3, 4, 5, 6]
    assert [image(change.after) for change in rows[:2]] == [
        {"id": 0, "name": None, "age": 7},
        {"id": 1, "name": None, "age": "7.00"},
    ]
    assert [change.table.identity for change in schemas] == ["default"] * 4 + ["full"]


def test_columns_that_come_back_are_told_again(shop: Captured) -> None:
    shop.database.execute("ALTER TABLE users ADD COLUMN age int")
    shop.database.execute("INSERT INTO users VALUES (1, 'a', 1)")
    shop.database.execute("ALTER TABLE users DROP COLUMN age")
    shop.database.execute("INSERT INTO users VALUES (2, 'b')")
    there, _, back, last = shop.streamed()
    assert (there.op, back.op) == (Op.SCHEMA, Op.SCHEMA)
    assert columns(back) == [("id", "integer"), ("name", "text")]
    assert back.table.version > there.table.version
    assert last.table.version == back.table.version
    shop.assert_replays("users")


def test_a_change_of_columns_inside_a_transaction_divides_its_rows(shop: Captured) -> None:
    with shop.database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO users VALUES (1, 'a')")
        connection.execute("ALTER TABLE users ADD COLUMN age int")
        connection.execute("INSERT INTO users VALUES (2, 'b', 2)")
        connection.execute("ALTER TABLE users DROP COLUMN name")
        connection.execute("INSERT INTO users VALUES (3, 3)")
    first, *rest = shop.streamed()
    # Which columns the first row had is uncertain: a snapshot follows.
    changes = [first, *(c for c in rest if c.transaction.id == first.transaction.id)]
    assert [change.op for change in changes] == [
        Op.INSERT, Op.SCHEMA, Op.INSERT, Op.SCHEMA, Op.INSERT,
    ]  # fmt: skip
    assert [image(change.after) for change in changes[::2]] == [
        {"id": 1, "name": "a"},
        {"id": 2, "name": "b", "age": 2},
        {"id": 3, "age": 3},
    ]


def test_a_new_label_of_an_enum_needs_no_new_version(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TYPE mood AS ENUM ('sad')")
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, mood mood)")
    with captured(pg, tmp_path) as feed:
        pg.execute("INSERT INTO users VALUES (1, 'sad')")
        pg.execute("ALTER TYPE mood ADD VALUE 'happy'")
        pg.execute("INSERT INTO users VALUES (2, 'happy')")
        assert [image(change.after) for change in feed.streamed()] == [
            {"id": 1, "mood": "sad"},
            {"id": 2, "mood": "happy"},
        ]


def test_a_type_made_while_streaming_is_read_as_what_it_is(shop: Captured) -> None:
    shop.database.execute("INSERT INTO users VALUES (1, 'a')")
    shop.until_caught_up()
    shop.database.execute("CREATE TYPE pair AS (x int, y text); CREATE DOMAIN score AS int")
    shop.database.execute("ALTER TABLE users ADD COLUMN p pair, ADD COLUMN s score[]")
    shop.database.execute("""INSERT INTO users VALUES (2, 'b', (1, 'one'), '{1,2}')""")
    assert image(shop.streamed()[-1].after) == {
        "id": 2, "name": "b", "p": {"x": 1, "y": "one"}, "s": [1, 2],
    }  # fmt: skip


def test_a_type_altered_in_silence_makes_its_table_be_copied_again(shop: Captured) -> None:
    # The server does not tell that a type has new fields: what is in the log is not what rows have.
    shop.database.execute("CREATE TYPE pair AS (x int)")
    shop.database.execute("ALTER TABLE users ADD COLUMN p pair")
    shop.database.execute("INSERT INTO users (id, p) VALUES (1, ROW(1))")
    shop.until_caught_up()
    shop.database.execute("ALTER TYPE pair ADD ATTRIBUTE y text")
    shop.database.execute("INSERT INTO users (id, p) VALUES (2, (2, 'two'))")
    shop.until(lambda: shop.stored(Op.READ), "the table is copied again")
    shop.until_streaming()
    shop.database.execute("INSERT INTO users (id, p) VALUES (3, (3, 'three'))")
    truncate, *rows = shop.streamed()[-4:]
    assert not shop.status.errored
    assert truncate.op is Op.TRUNCATE
    assert [(image(change.after) or {})["p"] for change in rows] == [
        {"x": 1, "y": None},
        {"x": 2, "y": "two"},
        {"x": 3, "y": "three"},
    ]


def test_columns_are_told_once_however_often_headrace_starts(shop: Captured) -> None:
    shop.database.execute("ALTER TABLE users ADD COLUMN age int")
    shop.database.execute("INSERT INTO users VALUES (1, 'a', 1)")
    shop.until_caught_up()
    for number in (2, 3):
        shop.restart()
        shop.database.execute("INSERT INTO users VALUES (%s, 'b', 2)", (number,))
        shop.until_caught_up()
    assert [c.op for c in shop.streamed()] == [Op.SCHEMA, Op.INSERT, Op.INSERT, Op.INSERT]


def test_columns_told_by_a_transaction_that_was_not_stored_are_told_again(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    source = postgres(pg, snapshot=False)
    with Log.open(tmp_path / "log") as log:
        with driven(source, log) as reading:
            reading.step()
        pg.execute("INSERT INTO users VALUES (1)")
        with pg.connect(autocommit=False) as connection:
            connection.execute("ALTER TABLE users ADD COLUMN age int")
            connection.execute("INSERT INTO users SELECT n FROM generate_series(2, 20000) n")
        with driven(source, log) as reading:
            # Both transactions lie ready: the second is being read when the first is stored.
            reading.until(lambda batch: bool(batch.changes))
        with driven(source, log) as reading:
            reading.until(lambda batch: any(change.last for change in batch.changes))
        found = [change.op for change in log.read(0, limit=5)]
    assert found == [Op.SCHEMA, Op.INSERT, Op.SCHEMA, Op.INSERT, Op.INSERT]


KINDS = """
    CREATE TYPE mood AS ENUM ('sad', 'happy');
    CREATE DOMAIN score AS numeric(6, 2);
    CREATE TABLE k_default (id int PRIMARY KEY, price numeric(12,2), tags varchar(9)[], m mood);
    CREATE TABLE k_full (id int PRIMARY KEY, s score, at timestamptz(3));
    ALTER TABLE k_full REPLICA IDENTITY FULL;
    CREATE TABLE k_index (id int PRIMARY KEY, code char(3) NOT NULL UNIQUE);
    ALTER TABLE k_index REPLICA IDENTITY USING INDEX k_index_code_key;
    CREATE TABLE k_nothing (id int PRIMARY KEY); ALTER TABLE k_nothing REPLICA IDENTITY NOTHING;
    CREATE TABLE k_keyless (id int);
    CREATE TABLE k_keyless_full (id int); ALTER TABLE k_keyless_full REPLICA IDENTITY FULL;
    CREATE TABLE k_deferrable (id int PRIMARY KEY DEFERRABLE);
    CREATE TABLE k_dropped (gone int, id int, left_over int, PRIMARY KEY (id));
    ALTER TABLE k_dropped DROP COLUMN gone;
    CREATE TABLE k_generated (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED);
    CREATE TABLE k_identity (id int GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY);
    CREATE TABLE k_parts (id int, at date DEFAULT now(), PRIMARY KEY (id, at))
        PARTITION BY RANGE (at);
    CREATE TABLE k_parts_all PARTITION OF k_parts DEFAULT;
    CREATE TABLE k_parts_full (id int, x int) PARTITION BY HASH (id);
    CREATE TABLE k_parts_full_0 PARTITION OF k_parts_full FOR VALUES WITH (MODULUS 1, REMAINDER 0);
    ALTER TABLE k_parts_full REPLICA IDENTITY FULL;
    ALTER TABLE k_parts_full_0 REPLICA IDENTITY FULL;
    CREATE TABLE k_parent (id int PRIMARY KEY);
    CREATE TABLE k_child (PRIMARY KEY (id)) INHERITS (k_parent);
    CREATE TABLE k_refers (id int PRIMARY KEY, a int REFERENCES k_parent,
                           b int REFERENCES k_refers);
"""


def test_copy_stream_and_ddl_describe_every_kind_of_table_alike(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    any_pg.execute(KINDS)
    if any_pg.server.install.version >= 18:
        any_pg.execute(
            "CREATE TABLE k_virtual (id int PRIMARY KEY, v int GENERATED ALWAYS AS (id))"
        )
    tables = [
        name
        for (name,) in any_pg.execute(
            "SELECT relname FROM pg_class WHERE relname ~ '^k_' AND relkind IN ('r', 'p')"
            " AND NOT relispartition"
        )
    ]
    with captured(any_pg, tmp_path, ddl=True) as feed:
        for table in tables:
            row = "(id, code) VALUES (1, 'abc')" if table == "k_index" else "(id) VALUES (1)"
            any_pg.execute(f"INSERT INTO {table} {row}")
            # DDL that changes nothing that is captured.
            any_pg.execute(f"ALTER TABLE {table} OWNER TO CURRENT_USER")
        changes = feed.changes()
        for table in tables:
            versions = {change.table.version for change in changes if change.table.name == table}
            assert len(versions) == 1, table
            described = [c for c in changes if c.table.name == table and ddl(c) == (None, None)]
            assert [c.op for c in described if c.op is Op.SCHEMA] == [Op.SCHEMA], table
            assert [c.op for c in described if c.op is not Op.SCHEMA] == [Op.INSERT], table


# --- told by the event trigger -------------------------------------------------------------------


def test_ddl_is_told_where_it_happened_with_its_text(told: Captured) -> None:
    told.database.execute("INSERT INTO users VALUES (1, 'a')")
    told.database.execute("ALTER TABLE users ADD COLUMN age int")
    told.database.execute("ALTER TABLE users RENAME COLUMN age TO years")
    told.database.execute("INSERT INTO users VALUES (2, 'b', 2)")
    insert, added, renamed, last = told.streamed()
    assert [c.op for c in (insert, added, renamed, last)] == [
        Op.INSERT, Op.SCHEMA, Op.SCHEMA, Op.INSERT,
    ]  # fmt: skip
    assert ddl(added) == ("ALTER_TABLE", "ALTER TABLE users ADD COLUMN age int")
    assert columns(added)[-1] == ("age", "integer")
    assert columns(renamed)[-1] == ("years", "integer")
    assert last.table.version == renamed.table.version


def test_ddl_that_was_rolled_back_is_not_told(told: Captured) -> None:
    with told.database.connect(autocommit=False) as connection:
        connection.execute("ALTER TABLE users ADD COLUMN age int")
        connection.rollback()
    told.database.execute("INSERT INTO users VALUES (1, 'a')")
    assert [change.op for change in told.streamed()] == [Op.INSERT]


def test_ddl_among_rows_of_a_transaction_keeps_its_place(told: Captured) -> None:
    with told.database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO users VALUES (1, 'a')")
        connection.execute("ALTER TABLE users ADD COLUMN age int")
        connection.execute("INSERT INTO users VALUES (2, 'b', 2)")
    changes = told.streamed()
    assert [change.op for change in changes] == [Op.INSERT, Op.SCHEMA, Op.INSERT]
    assert [change.ordinal for change in changes] == [1, 2, 3]


@pytest.mark.parametrize("used", [True, False])
def test_a_dropped_table_is_told(told: Captured, used: bool) -> None:
    if used:
        told.database.execute("INSERT INTO users VALUES (1, 'a')")
    told.database.execute("DROP TABLE users")
    dropped = told.streamed()[-1]
    assert (dropped.op, dropped.table.name) == (Op.SCHEMA, "users")
    assert ddl(dropped) == ("DROP_TABLE", "DROP TABLE users")
    assert (image(dropped.after) or {})["dropped"] is True


def test_ddl_of_tables_that_are_not_captured_is_not_told(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY); CREATE TABLE other (id int)")
    with captured(pg, tmp_path, tables=("public.users",), ddl=True) as feed:
        pg.execute("ALTER TABLE other ADD COLUMN x int")
        pg.execute("DROP TABLE other")
        pg.execute("CREATE TEMP TABLE scratch (id int)")
        assert feed.streamed() == []


def test_the_event_trigger_is_installed_once_and_found_again(told: Captured) -> None:
    told.restart()
    told.until_streaming()
    triggers = told.database.execute("SELECT evtname FROM pg_event_trigger ORDER BY 1")
    names = [
        "headrace_comments",
        "headrace_ddl",
        "headrace_drop",
        "headrace_keys",
        "headrace_keys_drop",
        "headrace_rewrite",
    ]
    assert [name for (name,) in triggers] == names
    told.database.execute("ALTER TABLE users ADD COLUMN age int")
    assert [ddl(change) for change in told.streamed()] == [
        ("ALTER_TABLE", "ALTER TABLE users ADD COLUMN age int")
    ]


@pytest.mark.parametrize(
    "column",
    ['{"name": "x", "type_id": 99999999999, "modifier": -1, "key": false}',
     '{"name": "x", "type_id": -5, "modifier": -1, "key": false}',
     '{"name": "x", "type_id": 23, "modifier": 99999999999, "key": false}'],
)  # fmt: skip
def test_a_forged_word_of_ddl_does_not_stop_the_capture(shop: Captured, column: str) -> None:
    [(oid,)] = shop.database.execute("SELECT 'users'::regclass::oid::bigint")
    forged = (
        f'{{"tag": "ALTER TABLE", "sql": "", "tables": [{{"oid": {oid}, "schema": "public",'
        f' "name": "users", "identity": "default", "columns": [{column}]}}]}}'
    )
    shop.database.execute("SELECT pg_logical_emit_message(true, 'headrace.ddl', %s)", (forged,))
    assert [change.op for change in shop.streamed()] == [Op.MESSAGE]


# --- other names ---------------------------------------------------------------------------------


def test_a_renamed_table_goes_on_under_its_new_name(
    pg: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.postgres.stream._WATCH_SECONDS", 0.05)
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    pg.execute("INSERT INTO users VALUES (1, 'a'), (2, 'b')")
    with captured(pg, tmp_path) as feed:
        pg.execute("ALTER TABLE users RENAME TO people")
        pg.execute("UPDATE people SET name = 'c' WHERE id = 1")
        wait_until(lambda: [c.table for c in feed.status.copies if c.done] == ["public.people"])
        pg.execute("DELETE FROM people WHERE id = 2")
        feed.assert_replays("people", surprises=True)


def test_virtual_columns_are_left_out(servers: Servers, tmp_path: Path) -> None:
    with servers[18].database() as database:
        database.execute("CREATE TABLE sums (id int PRIMARY KEY, v int GENERATED ALWAYS AS (id))")
        database.execute("INSERT INTO sums VALUES (1)")
        with captured(database, tmp_path) as feed:
            database.execute("INSERT INTO sums VALUES (2)")
            _, read, insert = feed.changes()
    assert [image(change.after) for change in (read, insert)] == [{"id": 1}, {"id": 2}]
