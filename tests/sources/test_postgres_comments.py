"""Comments of tables and columns are part of a table's description in the log."""

from pathlib import Path
from typing import LiteralString

from psycopg import sql

from headrace.change.event import COMMENT_BYTES, Op, Table
from headrace.testing import PostgresDatabase
from tests.sources.capturing import Captured, captured, image
from tests.sources.test_postgres_server import BAD, lawless  # noqa: F401 - a fixture

TABLE: LiteralString = """
    CREATE TABLE users (id int PRIMARY KEY, gone text, name text, ssn text);
    ALTER TABLE users DROP COLUMN gone;
    COMMENT ON TABLE users IS 'people "we" know';
    COMMENT ON COLUMN users.name IS E'it''s\\ntheir \U0001f600 name';
    COMMENT ON COLUMN users.ssn IS 'never shown';
    COMMENT ON INDEX users_pkey IS 'of an index';
"""
NAME = "it's\ntheir \U0001f600 name"


def latest(feed: Captured, name: str = "users") -> Table:
    """The newest version of a table."""
    return [table for table in feed.log.tables() if table.name == name][-1]


def comments(table: Table) -> dict[str, str]:
    return {column.name: column.comment for column in table.columns}


def comment(database: PostgresDatabase, text: str | None, on: LiteralString = "TABLE users") -> str:
    """Comment on something; returns the statement."""
    statement = sql.SQL("COMMENT ON " + on + " IS {}").format(sql.Literal(text))
    with database.connect(autocommit=True) as connection:
        connection.execute(statement)
        return statement.as_string(connection)


def test_a_table_is_described_with_its_comments(any_pg: PostgresDatabase, tmp_path: Path) -> None:
    any_pg.execute(TABLE)
    any_pg.execute("CREATE TABLE plain (id int PRIMARY KEY, note text)")
    comment(any_pg, "x" + "é" * 1_000_000, "COLUMN plain.note")
    comment(any_pg, "where a row is", "COLUMN plain.ctid")
    with captured(any_pg, tmp_path) as feed:
        users, plain = latest(feed), latest(feed, "plain")
        assert (users.comment, plain.comment) == ('people "we" know', "")
        assert comments(users) == {"id": "", "name": NAME, "ssn": "never shown"}
        assert comments(plain)["note"] == "x" + "é" * ((COMMENT_BYTES - 1) // 2)
        any_pg.execute("INSERT INTO users VALUES (1, 'ann')")
        [inserted] = feed.streamed()
        assert inserted.table == users, "the stream describes it as the copy did"


def test_without_the_event_trigger_a_comment_comes_with_the_next_session(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(TABLE)
    with captured(pg, tmp_path) as feed:
        pg.execute("INSERT INTO users VALUES (1, 'ann')")
        feed.until_caught_up()
        comment(pg, "customers")
        pg.execute("INSERT INTO users VALUES (2, 'bob')")
        assert {change.table.comment for change in feed.streamed()} == {'people "we" know'}
        feed.restart()
        feed.until_streaming()
        pg.execute("INSERT INTO users VALUES (3, 'eve')")
        *_, schema, last = feed.streamed()
        assert (schema.op, last.op) == (Op.SCHEMA, Op.INSERT)
        assert schema.table == last.table == latest(feed)
        assert last.table.comment == "customers"
        assert not [each for each in feed.streamed() if each.op in (Op.READ, Op.TRUNCATE)]
        feed.assert_replays("users")


def test_the_event_trigger_says_a_comment_where_it_was_made(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(TABLE)
    pg.execute("CREATE VIEW adults AS SELECT * FROM users")
    with captured(pg, tmp_path, ddl=True) as feed:
        pg.execute("INSERT INTO users VALUES (1, 'ann')")
        feed.until_caught_up()  # comments are read from the catalogs of now
        statement = comment(pg, "customers", "COLUMN users.name")
        pg.execute("INSERT INTO users VALUES (2, 'bob')")
        first, schema, second = feed.streamed()
        assert schema.op is Op.SCHEMA
        assert first.table.version < schema.table.version
        assert schema.table == second.table
        assert comments(second.table)["name"] == "customers"
        shown = image(schema.after) or {}
        assert (shown["ddl_type"], shown["ddl_command"]) == ("COMMENT", statement)
        shown_name = {"name": "name", "type": "text", "key": False, "number": 3}
        assert shown["columns"][1] == shown_name

        for other in ("VIEW adults", "COLUMN adults.name", "INDEX users_pkey", "SCHEMA public"):
            comment(pg, "not of a captured table", other)
        comment(pg, None)
        comment(pg, "é" * 1_000_000, "COLUMN users.name")
        removed, long = feed.streamed()[3:]
        assert removed.table.comment == ""
        assert len(comments(long.table)["name"].encode()) == COMMENT_BYTES
        assert len(long.after or b"") < 20_000


def test_the_trigger_of_an_earlier_version_goes_on_and_gets_the_one_for_comments(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(TABLE)
    with captured(pg, tmp_path, ddl=True) as feed:
        feed.capture.stop()
        pg.execute("DROP EVENT TRIGGER headrace_comments")
        comment(pg, "headrace 0123456789abcdef", "FUNCTION headrace.tell_ddl()")
        pg.execute("ALTER TABLE users ADD COLUMN age int")
        feed.start()
        feed.until_streaming()
        comment(pg, "years", "COLUMN users.age")
        added, commented = feed.streamed()
        assert [(image(each.after) or {})["ddl_type"] for each in (added, commented)] == [
            "ALTER_TABLE",
            "COMMENT",
        ]
        assert comments(commented.table)["age"] == "years"


def test_bytes_that_are_no_text_stop_nothing(lawless: PostgresDatabase, tmp_path: Path) -> None:  # noqa: F811
    lawless.execute(TABLE)
    lawless.execute(f"DO $$ BEGIN EXECUTE format('COMMENT ON TABLE users IS %L', {BAD}); END $$")
    with captured(lawless, tmp_path) as feed:
        assert latest(feed).comment == "b\ufffdd"
        assert comments(latest(feed))["name"] == NAME
        lawless.execute("INSERT INTO users VALUES (1, 'ann')")
        feed.assert_replays("users")
