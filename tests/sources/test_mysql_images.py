"""Rows of which the binary log has a part: binlog_row_image MINIMAL and NOBLOB."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.sources.mysql.decode.absent import Manner, manner_of
from headrace.sources.mysql.decode.path import TablePath
from headrace.testing.mysql import MysqlDatabase
from tests.everywhere import differences_everywhere
from tests.mysqls import mysql_of
from tests.sources.mycapturing import captured, snapshot_rows

pytestmark = pytest.mark.requirement("P-39")

_T = """
    CREATE TABLE t (id int PRIMARY KEY DEFAULT 7, s varchar(20) DEFAULT 'it''s', n int,
        z decimal(6,2) NOT NULL DEFAULT 1.5, y int NOT NULL, d datetime(3) DEFAULT '2020-01-02',
        at timestamp DEFAULT current_timestamp() ON UPDATE current_timestamp(),
        u char(36) DEFAULT (uuid()), g int AS (n + 1) STORED, b text DEFAULT 'long',
        f tinyint(1) DEFAULT 5, e enum('x','y') DEFAULT 'y', UNIQUE (n))"""
_WRITES = """
    SET sql_mode = '';
    INSERT INTO t (id, s) VALUES (1, 'old'), (2, 'two'), (3, 'three');
    INSERT INTO t (n) VALUES (5);
    REPLACE INTO t (id, s) VALUES (1, 'new');
    REPLACE INTO t (id, n) VALUES (9, 5);
    REPLACE INTO t (n) VALUES (5);
    UPDATE t SET n = 6 WHERE id = 2;
    UPDATE t SET id = 30, b = NULL WHERE id = 3;
    INSERT INTO t (id, n) VALUES (2, 1) ON DUPLICATE KEY UPDATE s = 'again', id = 20;
    ALTER TABLE t ALTER COLUMN s SET DEFAULT 'other';
    INSERT INTO t (id) VALUES (40);
    REPLACE INTO t (id) VALUES (30);
    DELETE FROM t WHERE id = 40"""


@pytest.fixture
def minimal() -> Iterator[MysqlDatabase]:
    """A database on a MariaDB that logs parts of rows."""
    with (
        mysql_of("mariadb", {"binlog_row_image": "MINIMAL"}) as server,
        server.database() as database,
    ):
        yield database


def test_what_an_event_leaves_out_is_known_or_its_table_says_that_it_is_not(
    minimal: MysqlDatabase, tmp_path: Path
) -> None:
    minimal.execute(_T)
    minimal.execute("CREATE TABLE copies LIKE t; CREATE TABLE log (id int)")
    minimal.execute("CREATE TABLE computed (id int PRIMARY KEY, n int, v int AS (n + 1) VIRTUAL)")
    minimal.execute(
        "CREATE TABLE bare (id int NOT NULL UNIQUE, n int); INSERT INTO bare VALUES (1, 1)"
    )
    minimal.execute(
        "CREATE TRIGGER r BEFORE INSERT ON log FOR EACH ROW "
        "REPLACE INTO copies (id, y) VALUES (1, 1)"
    )
    with captured(minimal, tmp_path) as feed:
        minimal.execute(_WRITES)
        assert feed.rows("t") == snapshot_rows(minimal, tmp_path / "first")["t"]
        assert feed.status.errored == {}
        for blob in ("MINIMAL", "NOBLOB"):
            minimal.execute(f"SET binlog_row_image = {blob}; UPDATE t SET s = '{blob}'")
            minimal.execute(f"SET binlog_row_image = {blob}; REPLACE INTO t (id, y) VALUES (20, 1)")
        assert feed.rows("t") == snapshot_rows(minimal, tmp_path / "second")["t"]
        assert differences_everywhere(tmp_path / "log", tmp_path / "lakes", 0) == []
        minimal.execute("INSERT INTO computed (id, n) VALUES (1, 2); UPDATE bare SET n = 2")
        minimal.execute("INSERT INTO copies (id, y) VALUES (1, 1); INSERT INTO log VALUES (1)")
        minimal.execute("INSERT INTO log VALUES (2)")
        feed.until_caught_up()
        errored = {name.partition(".")[2]: why for name, why in feed.status.errored.items()}
        assert sorted(errored) == ["bare", "computed"]
        assert all("SET GLOBAL binlog_row_image = FULL" in why for why in errored.values())
        assert feed.rows("copies") == snapshot_rows(minimal, tmp_path / "third")["copies"]


@pytest.mark.parametrize(
    ("sql", "manner"),
    [
        ("UPDATE t SET a = 1", Manner.UPDATE),
        ("/* x */ update `d`.`t` set a = 1", Manner.UPDATE),
        ("INSERT INTO t VALUES (1) ON DUPLICATE KEY UPDATE a = 2", Manner.UPDATE),
        ("REPLACE LOW_PRIORITY INTO d.t VALUES (1)", Manner.REPLACE),
        ("REPLACE t SELECT 1", Manner.REPLACE),
        ("UPDATE t JOIN u SET t.a = 1", Manner.UNKNOWN),
        ("REPLACE INTO other VALUES (1)", Manner.UNKNOWN),
        ("UPDATE e.t SET a = 1", Manner.UNKNOWN),
        ("CALL p()", Manner.UNKNOWN),
        ("LOAD DATA INFILE 'x' REPLACE INTO TABLE t", Manner.UNKNOWN),
        ("UPDATE", Manner.UNKNOWN),
    ],
)
def test_a_statement_shows_what_it_means_to_leave_a_column_out(sql: str, manner: Manner) -> None:
    assert manner_of(sql, TablePath("d", "t")) is manner


def test_a_table_of_the_same_name_elsewhere_is_not_that_of_the_statement(
    minimal: MysqlDatabase, tmp_path: Path
) -> None:
    """A trigger of a.t writes to b.t, and the text has neither database."""
    other = f"{minimal.name}_other"
    minimal.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v int DEFAULT 5, w int);INSERT INTO t VALUES (1, 1, 1)"
    )
    minimal.execute(
        f"CREATE DATABASE {other}; CREATE TABLE {other}.t (id int PRIMARY KEY);"
        f"CREATE TRIGGER {other}.r AFTER INSERT ON {other}.t FOR EACH ROW"
        f" REPLACE INTO {minimal.name}.t (id, w) VALUES (NEW.id, 9)"
    )
    with captured(minimal, tmp_path) as feed:
        minimal.execute("UPDATE t SET v = 2")
        minimal.execute(f"USE {other}; INSERT INTO t VALUES (2)")
        feed.until_caught_up()
        assert feed.status.errored == {}
        minimal.execute(f"USE {other}; INSERT INTO t VALUES (1)")
        feed.until_caught_up()
        (reason,) = feed.status.errored.values()
        assert "may be a REPLACE" in reason
    minimal.execute(f"DROP DATABASE {other}")
