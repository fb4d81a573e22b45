"""DDL of the application: no statement fails, and the log still adds up to the database."""

import json
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from headrace.change.event import Op
from headrace.sources.sqlite import alter, install
from headrace.sources.sqlite.connections import rows
from headrace.sources.sqlite.schema import shapes
from headrace.sources.sqlite.triggers import ANNOTATE, drop, former_triggers
from tests.everywhere import differences_everywhere
from tests.sources.litedb import Captured, captured

CREATE = """
CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, email TEXT UNIQUE, age INT, note TEXT);
CREATE UNIQUE INDEX one_name ON users (name);
CREATE UNIQUE INDEX one_note ON users (lower(note));
CREATE TABLE pairs (a TEXT, b INT, c, PRIMARY KEY (a, b)) WITHOUT ROWID;
CREATE VIEW names AS SELECT id FROM users;
CREATE TRIGGER name_in INSTEAD OF INSERT ON names BEGIN SELECT 1; END;
CREATE TRIGGER name_out INSTEAD OF DELETE ON names BEGIN SELECT 1; END;
INSERT INTO users VALUES (1, 'ann', 'a@x', 30, 'n1'), (2, 'bob', 'b@x', 40, NULL);
INSERT INTO pairs VALUES ('p', 1, x'00'), ('q', 2, 'c');
"""

# Each runs in one transaction, so that no look comes between its statements.
DDL = {
    "a column with a default": "ALTER TABLE users ADD COLUMN level INT DEFAULT 7",
    "a generated column": "ALTER TABLE users ADD COLUMN twice INT GENERATED ALWAYS AS (age * 2)",
    "a renamed column": "ALTER TABLE users RENAME COLUMN age TO years",
    "a renamed key": "ALTER TABLE pairs RENAME COLUMN b TO bb",
    "a dropped column": "ALTER TABLE users DROP COLUMN age",
    "a column of an index": "DROP INDEX one_name; ALTER TABLE users DROP COLUMN name",
    "a column of an expression": "DROP INDEX one_note; ALTER TABLE users DROP COLUMN note",
    "another column of the same name":
        "DROP INDEX one_note; ALTER TABLE users DROP COLUMN note; "
        "ALTER TABLE users ADD COLUMN note TEXT; "
        "CREATE UNIQUE INDEX one_note ON users (lower(note))",
    "the same column with a default":
        "ALTER TABLE pairs DROP COLUMN c; ALTER TABLE pairs ADD COLUMN c DEFAULT 'd'",
    "the same last column": "ALTER TABLE pairs DROP COLUMN c; ALTER TABLE pairs ADD COLUMN c",
    "the same last column, and a view that takes triggers along":
        "ALTER TABLE pairs DROP COLUMN c; ALTER TABLE pairs ADD COLUMN c; DROP VIEW names",
    "the same last column, and a table made anew":
        "ALTER TABLE pairs DROP COLUMN c; ALTER TABLE pairs ADD COLUMN c; "
        "DROP TABLE users; CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT)",
    "a swap of names":
        "ALTER TABLE users RENAME COLUMN name TO x; ALTER TABLE users RENAME COLUMN email TO name; "
        "ALTER TABLE users RENAME COLUMN x TO email",
    "a renamed table": "ALTER TABLE users RENAME TO people",
    "a dropped table": "DROP TABLE pairs",
    "a table of the same name":
        "DROP TABLE pairs; CREATE TABLE pairs (a TEXT, b INT, c, PRIMARY KEY (a, b)) WITHOUT ROWID",
    "an edited schema":
        "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = replace(sql, 'age', 'old') "
        "WHERE name = 'users' AND type = 'table'; PRAGMA writable_schema = RESET; "
        "PRAGMA schema_version = 1000",
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    connection = apsw.Connection(str(path))
    connection.execute(CREATE)
    connection.close()
    install(str(path), ["*"])
    return path


@pytest.fixture
def database(path: Path) -> Iterator[apsw.Connection]:
    """The application, which knows nothing of Headrace."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(20_000)
    yield connection
    connection.close()


def write(database: apsw.Connection) -> None:
    """Change rows of all tables, whatever columns these have."""
    for table in ("users", "people", "pairs"):
        if rows(database, "SELECT 1 FROM sqlite_schema WHERE name = ?", table):
            if table != "pairs":
                database.execute(f"DELETE FROM {table} WHERE id = 2")
            names = [row[1] for row in rows(database, f"PRAGMA table_info({table})")]
            values = [f"'{name} {table}'" if name != "id" else "3" for name in names]
            listed = ", ".join(f'"{name}"' for name in names)
            database.execute(f"REPLACE INTO {table} ({listed}) VALUES ({', '.join(values)})")
            database.execute(f'UPDATE {table} SET "{names[1]}" = \'u\' WHERE "{names[1]}" = 1')


def run(database: apsw.Connection, statements: str) -> None:
    database.execute("BEGIN IMMEDIATE")
    database.execute(statements)
    database.execute("COMMIT")


@pytest.mark.requirement("P-01")
@pytest.mark.requirement("P-03")
@pytest.mark.parametrize("ddl", DDL.values(), ids=DDL)
def test_after_ddl_the_log_equals_the_database(
    path: Path, database: apsw.Connection, tmp_path: Path, ddl: str
) -> None:
    with captured(path, tmp_path) as feed:
        write(database)
        feed.catch_up()
        feed.capture.stop()
        run(database, ddl)
        write(database)
        feed.start()
        feed.assert_replays(surprises=True)
        write(database)
        feed.assert_replays(surprises=True)
    assert differences_everywhere(tmp_path / "log", tmp_path / "lakes", 0) == []


@pytest.mark.requirement("P-03")
@pytest.mark.parametrize("vacuum", [False, True])
def test_a_table_that_is_built_anew_with_its_triggers_is_read_anew(
    path: Path, database: apsw.Connection, tmp_path: Path, vacuum: bool
) -> None:
    with captured(path, tmp_path) as feed:
        feed.capture.stop()
        made = rows(database, "SELECT sql FROM sqlite_schema WHERE tbl_name = 'pairs' AND sql > ''")
        create, *triggers = [sql for (sql,) in made]
        rebuilt = create.replace("pairs", "new_pairs", 1)
        run(
            database,
            f"{rebuilt}; INSERT INTO new_pairs SELECT a, b + 10, c FROM pairs; DROP TABLE pairs;"
            f"ALTER TABLE new_pairs RENAME TO pairs; {'; '.join(triggers)}",
        )
        if vacuum:
            database.execute("VACUUM")
        feed.start()
        feed.assert_replays(surprises=True)


@pytest.mark.parametrize(
    "harmless",
    [
        "VACUUM", "ANALYZE", "CREATE INDEX i ON users (age)", "CREATE VIEW v AS SELECT 1",
        "BEGIN; CREATE TABLE scratch (x); DROP TABLE scratch; COMMIT",
    ],
)  # fmt: skip
def test_what_rewrites_no_row_costs_no_snapshot(
    path: Path, database: apsw.Connection, tmp_path: Path, harmless: str
) -> None:
    with captured(path, tmp_path, tables=("main.users", "main.pairs")) as feed:
        feed.capture.stop()
        database.execute(harmless)
        feed.start()
        feed.catch_up()
        database.execute("INSERT INTO pairs VALUES ('z', 9, 9)")
        feed.assert_replays()
        assert feed.changes(Op.TRUNCATE) == []


def test_a_default_that_is_a_word_without_quotes_is_no_obstacle(
    path: Path, database: apsw.Connection, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE words (id INTEGER PRIMARY KEY, w TEXT DEFAULT hello)")
    database.execute("INSERT INTO words (id) VALUES (1); INSERT INTO words VALUES (2, 'x')")
    with captured(path, tmp_path) as feed:
        feed.capture.stop()
        run(database, "ALTER TABLE words DROP COLUMN w")
        run(database, "ALTER TABLE words ADD COLUMN w TEXT DEFAULT hello")
        feed.start()
        feed.assert_replays(surprises=True)


def _altered(feed: Captured) -> list[dict[str, object]]:
    return [json.loads(change.after or b"") for change in feed.changes(Op.SCHEMA, table="users")]


@pytest.mark.requirement("P-03")
def test_the_command_follows_columns_without_a_snapshot(
    path: Path, database: apsw.Connection, tmp_path: Path
) -> None:
    with captured(path, tmp_path) as feed:
        alter(
            str(path),
            "ALTER TABLE users ADD COLUMN level TEXT DEFAULT 7; UPDATE users SET level = id "
            "WHERE id = 1; ALTER TABLE users RENAME COLUMN age TO years; "
            "ALTER TABLE users DROP COLUMN level; "
            "ALTER TABLE users ADD COLUMN level REAL DEFAULT 1;",
        )
        write(database)
        feed.assert_replays()
        assert feed.changes(Op.TRUNCATE) == []
        columns = _altered(feed)[-1]["columns"]
        assert isinstance(columns, list)
        numbers = {column["name"]: column.get("number") for column in columns}
        assert numbers == {"id": 1, "name": 2, "email": 3, "years": 4, "note": 5, "level": 7}
        assert columns[-1]["initial_default"] == 1.0
        alter(str(path), "ALTER TABLE users ADD COLUMN b INT GENERATED ALWAYS AS (years + 1)")
        feed.assert_replays()
        assert len(feed.changes(Op.TRUNCATE)) == 1


def test_a_table_stops_where_ddl_rewrites_rows_if_the_config_says_so(
    path: Path, database: apsw.Connection, tmp_path: Path
) -> None:
    with captured(path, tmp_path, on_rewrite="stop") as feed:
        database.execute("ALTER TABLE users ADD COLUMN level INT DEFAULT 7")
        feed.until(lambda: "main.users" in feed.status.errored, "the table stops")
        assert "headrace snapshot" in feed.status.errored["main.users"]
        write(database)
        assert feed.changes(Op.TRUNCATE) == []
        assert feed.changes(Op.MESSAGE, table="users")
        feed.capture.copy_again(["users"])
        feed.until(lambda: not feed.status.errored, "the table is read anew")
        feed.assert_replays()


def test_triggers_of_an_earlier_version_are_replaced_without_a_snapshot(
    path: Path, database: apsw.Connection, tmp_path: Path
) -> None:
    with captured(path, tmp_path) as feed:
        feed.capture.stop()
        run(database, "DROP TABLE headrace_seen; DROP TRIGGER headrace_annotate")
        layouts: dict[str, int] = dict(
            rows(database, "SELECT told ->> '$.name', layout FROM headrace_layouts")
        )
        for shape in shapes(database, ["*"]):
            for name, sql in former_triggers(shape, layouts[shape.name]).items():
                run(database, f"{drop(name)}; {sql}")
        write(database)
        feed.start()
        write(database)
        feed.assert_replays()
        assert feed.changes(Op.TRUNCATE) == []
        run(database, DDL["a dropped column"])
        found = rows(database, "SELECT sql FROM sqlite_schema WHERE name = 'headrace_annotate'")
        assert found == [(ANNOTATE,)]
