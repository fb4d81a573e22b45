"""What DDL makes of captured tables."""

from pathlib import Path
from typing import Any

import pytest

from headrace.change.event import Change, Op
from headrace.testing.mysql import MysqlDatabase, MysqlServer
from tests.sources.mycapturing import captured, image, snapshot_rows


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position moves at once, also by what is not captured."""
    monkeypatch.setattr("headrace.sources.mysql.stream._IDLE_SECONDS", 0.02)
    monkeypatch.setattr("headrace.sources.mysql.stream._WAIT_SECONDS", 0.05)


def schema_of(change: Change) -> tuple[Any, ...]:
    """Table, DDL, columns and drop of a SCHEMA change."""
    content = image(change.after)
    columns = [each["name"] for each in content.get("columns", ())]
    return change.table.name, content.get("ddl_type"), columns, content.get("dropped", False)


def test_an_altered_table_is_told_at_once_with_its_sql(my: MysqlDatabase, tmp_path: Path) -> None:
    my.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    with captured(my, tmp_path) as feed:
        my.execute("ALTER TABLE users ADD COLUMN age int unsigned")
        (change,) = feed.streamed()
        assert schema_of(change) == ("users", "ALTER_TABLE", ["id", "name", "age"], False)
        assert image(change.after)["ddl_command"] == "ALTER TABLE users ADD COLUMN age int unsigned"
        assert change.table.columns[2].type in ("int(10) unsigned", "int unsigned")
        assert change.last
        my.execute(
            "ALTER TABLE users RENAME COLUMN name TO title, MODIFY age bigint unsigned FIRST"
        )
        my.execute("ALTER TABLE users MODIFY age bigint unsigned AFTER id, DROP COLUMN title")
        my.execute("ALTER TABLE users ADD title varchar(5) CHARACTER SET latin1 FIRST")
        my.execute("INSERT INTO users VALUES ('é', 1, 4000000000)")
        *_, schema, insert = feed.streamed()
        assert schema_of(schema) == ("users", "ALTER_TABLE", ["title", "id", "age"], False)
        assert image(insert.after) == {"title": "é", "id": 1, "age": 4_000_000_000}


def test_a_created_table_is_captured_from_its_first_row(my: MysqlDatabase, tmp_path: Path) -> None:
    my.execute("CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1), (2)")
    with captured(my, tmp_path) as feed:
        my.execute("CREATE TABLE copies (PRIMARY KEY (id)) SELECT id FROM users")
        my.execute("CREATE TABLE twins LIKE users; INSERT INTO twins VALUES (7)")
        my.execute("CREATE TABLE IF NOT EXISTS twins (x int)")
        assert [each.op for each in feed.streamed(table="copies")] == [Op.SCHEMA, *[Op.INSERT] * 2]
        assert feed.streamed(Op.READ) == []
        assert [row["id"] for row in feed.rows("twins")] == [7]
        if my.server.mariadb:
            my.execute("CREATE OR REPLACE TABLE twins (id int PRIMARY KEY, n int)")
        else:
            my.execute("DROP TABLE twins; CREATE TABLE twins (id int PRIMARY KEY, n int)")
        my.execute("INSERT INTO twins VALUES (8, 9)")
        assert feed.rows("twins") == [{"id": 8, "n": 9}]


def test_an_emptied_a_dropped_and_a_recreated_table(my: MysqlDatabase, tmp_path: Path) -> None:
    my.execute("CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1)")
    with captured(my, tmp_path) as feed:
        my.execute("TRUNCATE users; INSERT INTO users VALUES (2)")
        truncate, _ = feed.streamed()
        assert (truncate.op, image(truncate.after)["relations"]) == (Op.TRUNCATE, [])
        my.execute("DROP TABLE users")
        assert schema_of(feed.streamed()[-1]) == ("users", "DROP_TABLE", [], True)
        assert feed.rows("users") == []
        assert list(feed.resume.snapshots) == []
        my.execute("CREATE TABLE users (id int PRIMARY KEY, x text)")
        my.execute("INSERT INTO users VALUES (3, 'x')")
        assert feed.rows("users") == [{"id": 3, "x": "x"}]


def test_tables_that_swap_their_names_are_copied_anew(my: MysqlDatabase, tmp_path: Path) -> None:
    """As gh-ost and pt-online-schema-change do."""
    my.execute("CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1)")
    with captured(my, tmp_path, tables=("users",)) as feed:
        my.execute(
            "CREATE TABLE users_new (id bigint PRIMARY KEY, extra int);"
            "INSERT INTO users_new SELECT id, 5 FROM users;"
            "RENAME TABLE users TO users_old, users_new TO users;"
            "INSERT INTO users VALUES (2, 6); DROP TABLE users_old"
        )
        assert feed.rows("users") == [{"id": 1, "extra": 5}, {"id": 2, "extra": 6}]
        assert {change.table.name for change in feed.changes()} == {"users"}
        my.execute("ALTER TABLE users RENAME TO elsewhere")
        assert feed.rows("users") == []
        my.execute("ALTER TABLE elsewhere RENAME users; UPDATE users SET extra = 7")
        assert feed.rows("users") == [{"id": 1, "extra": 7}, {"id": 2, "extra": 7}]


def test_rows_that_go_with_their_partition_are_forgotten(my: MysqlDatabase, tmp_path: Path) -> None:
    my.execute(
        "CREATE TABLE days (id int PRIMARY KEY) PARTITION BY RANGE (id)"
        " (PARTITION a VALUES LESS THAN (10), PARTITION b VALUES LESS THAN (20));"
        "INSERT INTO days VALUES (1), (11)"
    )
    with captured(my, tmp_path) as feed:
        my.execute("ALTER TABLE days DROP PARTITION a; INSERT INTO days VALUES (12)")
        assert [row["id"] for row in feed.rows("days")] == [11, 12]


def test_foreign_keys_and_primary_keys_are_part_of_a_table(
    my: MysqlDatabase, tmp_path: Path
) -> None:
    my.execute(
        "CREATE TABLE users (id int, tenant int, PRIMARY KEY (tenant, id));"
        "CREATE TABLE orders (id int PRIMARY KEY, t int, u int,"
        " FOREIGN KEY (t, u) REFERENCES users (tenant, id))"
    )
    with captured(my, tmp_path) as feed:
        tables = {change.table.name: change.table for change in feed.changes(Op.SCHEMA)}
        assert tables["users"].key == ("id", "tenant")
        (reference,) = tables["orders"].references
        assert (reference.columns, reference.table) == (("t", "u"), "users")
        assert reference.parent_columns == ("tenant", "id")
        my.execute("ALTER TABLE orders DROP FOREIGN KEY orders_ibfk_1")
        assert feed.streamed()[-1].table.references == ()


@pytest.mark.parametrize("at_once", [True, False], ids=["one statement", "two statements"])
def test_a_column_that_goes_takes_its_values_along_though_another_has_its_name(
    my: MysqlDatabase, tmp_path: Path, at_once: bool
) -> None:
    my.execute("CREATE TABLE users (id int PRIMARY KEY, n int); INSERT INTO users VALUES (1, 7)")
    with captured(my, tmp_path) as feed:
        feed.capture.stop()  # so that the catalogue is ahead
        my.execute("INSERT INTO users VALUES (2, 8)")
        my.execute(
            "ALTER TABLE users DROP COLUMN N, ADD COLUMN n int"
            if at_once
            else "ALTER TABLE users DROP COLUMN n; ALTER TABLE users ADD COLUMN n int FIRST"
        )
        my.execute("INSERT INTO users (id, n) VALUES (3, 9)")
        feed.start()
        found = [(row["id"], row["n"]) for row in feed.rows("users")]
        assert sorted(found) == [(1, None), (2, None), (3, 9)]
        commands = [image(each.after).get("ddl_command") for each in feed.streamed(Op.SCHEMA)]
        assert len([each for each in commands if each]) == (1 if at_once else 2)


def test_names_may_be_anything(my: MysqlDatabase, tmp_path: Path) -> None:
    my.execute('CREATE TABLE `a.b"``%` (`%s "c"` int PRIMARY KEY, `水` text)')
    with captured(my, tmp_path) as feed:
        my.execute("""INSERT INTO `a.b"``%` VALUES (1, 'x')""")
        my.execute('SET sql_mode = ANSI_QUOTES; ALTER TABLE "a.b""`%" ADD COLUMN n int')
        assert [schema_of(change)[2] for change in feed.streamed(Op.SCHEMA)] == [
            ['%s "c"', "水", "n"]
        ]
        assert feed.rows('a.b"`%') == [{'%s "c"': 1, "水": "x", "n": None}]


def test_without_names_in_the_binary_log_the_catalogue_tells_them(
    own_my: MysqlServer, tmp_path: Path
) -> None:
    own_my.execute("SET GLOBAL binlog_row_metadata = MINIMAL")
    with own_my.database() as database:
        database.execute(
            "CREATE TABLE users (id int unsigned PRIMARY KEY, ok bool, size enum('s', 'm'))"
        )
        with captured(database, tmp_path) as feed:
            database.execute("INSERT INTO users VALUES (4000000000, 1, 'm')")
            feed.until_caught_up()
            database.execute("ALTER TABLE users ADD COLUMN flags set('a', 'b') FIRST")
            feed.until_caught_up()
            database.execute("INSERT INTO users VALUES ('b', 1, 0, 's')")
            assert [image(change.after) for change in feed.streamed(Op.INSERT)] == [
                {"id": 4_000_000_000, "ok": True, "size": "m"},
                {"flags": ["b"], "id": 1, "ok": False, "size": "s"},
            ]


def test_columns_that_cannot_be_told_stop_their_table_alone(
    own_my: MysqlServer, tmp_path: Path
) -> None:
    own_my.execute("SET GLOBAL binlog_row_metadata = MINIMAL")
    with own_my.database() as database:
        database.execute(
            "CREATE TABLE users (id int PRIMARY KEY); CREATE TABLE fine (id int PRIMARY KEY)"
        )
        with captured(database, tmp_path) as feed:
            feed.capture.stop()
            database.execute("INSERT INTO users VALUES (1)")
            database.execute("ALTER TABLE users ADD COLUMN n int")
            database.execute("INSERT INTO users VALUES (2, 2)")
            database.execute("ALTER TABLE users ADD COLUMN name text FIRST")
            database.execute("INSERT INTO users VALUES ('x', 3, 3); INSERT INTO fine VALUES (1)")
            feed.start()
            assert [row["id"] for row in feed.rows("fine")] == [1]
            path = f"{database.name}.users"
            assert list(feed.status.errored) == [path]
            kept = feed.streamed(Op.MESSAGE, table="users")
            assert kept
            assert all(image(change.after)["binlog"] for change in kept)
            feed.capture.copy_again([path])
            feed.until(
                lambda: not feed.status.errored and feed.resume.errored == {}, "it is healed"
            )
            database.execute("INSERT INTO users VALUES ('y', 4, 4)")
            assert (
                feed.rows("users", surprises=True)
                == snapshot_rows(database, tmp_path / "b")["users"]
            )


def test_a_dropped_database_takes_its_tables_along(own_my: MysqlServer, tmp_path: Path) -> None:
    own_my.execute("CREATE DATABASE one; CREATE DATABASE two")
    with own_my.database() as database:
        database.execute(
            "CREATE TABLE one.a (id int PRIMARY KEY); CREATE TABLE two.b (id int PRIMARY KEY)"
        )
        database.execute("INSERT INTO one.a VALUES (1); INSERT INTO two.b VALUES (2)")
        with captured(database, tmp_path, tables=("one.*", "two.*")) as feed:
            assert sorted(feed.resume.snapshots) == [("one", "a"), ("two", "b")]
            database.execute("DROP DATABASE one")
            assert [schema_of(change)[0] for change in feed.streamed()] == ["a"]
            assert list(feed.resume.snapshots) == [("two", "b")]


def test_comments_are_of_the_description_and_survive_a_restart(
    my: MysqlDatabase, tmp_path: Path
) -> None:
    my.execute(
        "CREATE TABLE users (id int PRIMARY KEY, name text COMMENT 'it''s\ntheir 水 name')"
        " COMMENT 'people \"we\" know'"
    )
    with captured(my, tmp_path) as feed:
        my.execute("INSERT INTO users VALUES (1, 'ann')")
        (first,) = feed.streamed()
        assert first.table.comment == 'people "we" know'
        assert [each.comment for each in first.table.columns] == ["", "it's\ntheir 水 name"]
        feed.restart()
        feed.until_streaming()
        my.execute("INSERT INTO users VALUES (2, 'bob')")
        assert feed.streamed()[-1].table == first.table
        my.execute("ALTER TABLE users COMMENT = '', MODIFY id int COMMENT 'number'")
        my.execute("INSERT INTO users VALUES (3, 'eve')")
        *_, schema, last = feed.streamed()
        assert schema_of(schema) == ("users", "ALTER_TABLE", ["id", "name"], False)
        assert (last.table.comment, last.table.columns[0].comment) == ("", "number")
        assert feed.streamed(Op.READ, Op.TRUNCATE) == []
        assert len(feed.rows("users")) == 3
