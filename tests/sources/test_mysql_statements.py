"""Statements without events for their rows, however they are written: log state = database."""

from pathlib import Path

import pytest

from headrace.change.event import Op
from headrace.change.replay import Replay, TableName
from headrace.testing.mysql import MysqlDatabase, MysqlServer
from tests.sources.mycapturing import Captured, captured, image, ordered, snapshot_rows


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position moves at once, also by what is not captured."""
    monkeypatch.setattr("headrace.sources.mysql.stream._IDLE_SECONDS", 0.02)
    monkeypatch.setattr("headrace.sources.mysql.stream._WAIT_SECONDS", 0.05)


def assert_alike(feed: Captured, folder: Path) -> None:
    """The log adds up to the rows that a copy made now shows."""
    replay = Replay.of(feed.changes())
    assert replay.surprises == []
    name, schema = feed.source.name, feed.database.name
    shown = snapshot_rows(feed.database, folder / "other")
    for table, rows in shown.items():
        assert ordered(replay.rows(TableName(name, schema, table))) == rows
    left = [each.name for each in replay.tables if replay.rows(each)]
    assert sorted(left) == sorted(table for table, rows in shown.items() if rows)
    assert feed.status.errored == {}


PARTED = (
    "CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id)"
    " (PARTITION a VALUES LESS THAN (10), PARTITION b VALUES LESS THAN (20));"
    "INSERT INTO p VALUES (1), (2), (11);"
)
OTHER = (
    "CREATE TABLE q (id int PRIMARY KEY); INSERT INTO q VALUES (5);"
    "CREATE TABLE kept (id int PRIMARY KEY);"
)


@pytest.mark.parametrize(
    ("before", "statement"),
    [
        (OTHER, "SET STATEMENT lock_wait_timeout = 5 FOR TRUNCATE TABLE q"),
        (OTHER, "SET STATEMENT lock_wait_timeout = 5 FOR CREATE TABLE n (id int PRIMARY KEY)"),
        (OTHER, "SET STATEMENT lock_wait_timeout = 5 FOR DROP TABLE q"),
        (OTHER, "ALTER TABLE q NOWAIT RENAME TO n"),
        (PARTED, "ALTER TABLE p WAIT 5 DROP PARTITION a"),
        (PARTED, "ALTER TABLE p CONVERT PARTITION a TO TABLE n"),
        (
            PARTED + OTHER + "DELETE FROM q; INSERT INTO q VALUES (25)",
            "ALTER TABLE p CONVERT TABLE q TO PARTITION c VALUES LESS THAN (30)",
        ),
        (
            "CREATE TABLE q (id int PRIMARY KEY, a int); INSERT INTO q VALUES (1, 1), (2, 1)",
            "ALTER IGNORE TABLE q ADD UNIQUE (a)",
        ),
    ],
)
def test_statements_of_mariadb(
    maria: MysqlDatabase, tmp_path: Path, before: str, statement: str
) -> None:
    maria.execute(before)
    with captured(maria, tmp_path) as feed:
        maria.execute(statement)
        feed.until_caught_up()
        if maria.execute("SHOW TABLES LIKE 'n'"):
            maria.execute("INSERT INTO n VALUES (7)")
        assert_alike(feed, tmp_path)


def test_partitions_that_change_places_with_a_table(my: MysqlDatabase, tmp_path: Path) -> None:
    my.execute(PARTED + OTHER)
    with captured(my, tmp_path) as feed:
        my.execute("ALTER TABLE p EXCHANGE PARTITION a WITH TABLE q")
        my.execute("INSERT INTO p VALUES (3); INSERT INTO q VALUES (8)")
        assert_alike(feed, tmp_path)


def test_a_function_that_writes_in_a_statement_halts(own_my: MysqlServer, tmp_path: Path) -> None:
    own_my.execute("SET GLOBAL log_bin_trust_function_creators = ON")
    with own_my.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        database.execute(
            "CREATE FUNCTION f(x int) RETURNS int MODIFIES SQL DATA"
            " BEGIN INSERT INTO users VALUES (x); RETURN 1; END"
        )
        with captured(database, tmp_path) as feed:
            database.execute("SET binlog_format = STATEMENT; SELECT f(7)")
            assert "SELECT was logged as a statement" in feed.until_halted().error


def test_the_name_of_a_savepoint_may_be_written_otherwise(
    maria: MysqlDatabase, tmp_path: Path
) -> None:
    maria.execute(
        "CREATE TABLE plain (id int) ENGINE=MyISAM; CREATE TABLE users (id int PRIMARY KEY)"
    )
    with captured(maria, tmp_path) as feed:
        maria.execute(
            "BEGIN; INSERT INTO users VALUES (1); INSERT INTO plain VALUES (1); SAVEPOINT `é``a`;"
            "INSERT INTO users VALUES (2); INSERT INTO plain VALUES (2);"
            "ROLLBACK WORK TO SAVEPOINT `É``A`; INSERT INTO users VALUES (3); COMMIT"
        )
        inserts = feed.streamed(Op.INSERT, table="users")
        assert [image(each.after)["id"] for each in inserts] == [1, 3]
