"""What a statement makes of the rows that are there, and what the log has of it."""

from pathlib import Path

import pymysql
import pytest

from headrace.change.event import Op
from headrace.testing.mysql import MysqlDatabase
from tests.everywhere import differences_everywhere
from tests.mysqls import mysql_of
from tests.sources.mycapturing import Captured, captured, snapshot_rows

pytestmark = pytest.mark.requirement("P-03")

_FOLLOWED = (
    "ADD COLUMN c varchar(9) DEFAULT 'n'",  # a constant default
    "ADD c decimal(9,3) NOT NULL DEFAULT -1.5, ADD d tinyint(1) DEFAULT TRUE",  # a number
    "ADD (c int DEFAULT 3, d datetime(3) DEFAULT '2020-01-02 03:04:05.6')",  # several in brackets
    "ADD c int NOT NULL, ADD d varchar(3) NOT NULL, ADD e double NOT NULL",  # an implicit default
    "ADD c enum('x','y') NOT NULL, ADD d enum('x','y') DEFAULT 'y' FIRST",  # an enum
    "CHANGE b bb varchar(20)",  # CHANGE
    "RENAME COLUMN b TO `B b`",  # RENAME COLUMN
    "RENAME COLUMN a TO b, RENAME COLUMN b TO a",  # a swap
    "DROP COLUMN b, ADD COLUMN b varchar(20) DEFAULT 'q'",  # another of the name
    "CHANGE b bb varchar(20), ADD COLUMN b int DEFAULT 4",  # the name is taken again
    "MODIFY a bigint, MODIFY b varchar(40) COMMENT 'x'",  # a wider type
    "ADD INDEX (a), COMMENT = 'x', ENGINE = InnoDB, ALTER a SET DEFAULT 5",  # indexes and options
)
_REWRITTEN = (
    "ADD COLUMN c char(36) DEFAULT (uuid())",  # an expression
    "ADD COLUMN c timestamp DEFAULT CURRENT_TIMESTAMP",  # a moment
    "ADD COLUMN c int AS (a * 2) STORED",  # a stored column
    "MODIFY a varchar(20)",  # another type
    "MODIFY b varchar(5)",  # a narrower type
    "CONVERT TO CHARACTER SET latin1",  # a character set
    "ADD COLUMN c int AUTO_INCREMENT UNIQUE",  # numbers
    "ADD COLUMN c int DEFAULT '1.7'",  # text that the server converts
    "ADD COLUMN c varchar(9) CHARACTER SET binary DEFAULT 'x'",  # bytes, for all its type says
    "ADD COLUMN c varchar(9) DEFAULT 'x', CHARACTER SET binary",  # the same by the table's
)


@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
def test_old_rows_have_what_a_statement_gave_them(
    maria: MysqlDatabase, tmp_path: Path, running: bool
) -> None:
    """A snapshot is taken only of the tables where it is needed."""
    clauses = {f"t{number}": each for number, each in enumerate([*_FOLLOWED, *_REWRITTEN])}
    for table in clauses:
        maria.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, a int, b varchar(20))")
        maria.execute(f"INSERT INTO {table} VALUES (1, 2, 'x'), (2, NULL, NULL), (3, 4, 'y')")
    with captured(maria, tmp_path) as feed:
        if not running:
            feed.capture.stop()
        for table, clause in clauses.items():
            maria.execute(f"SET sql_mode = ''; ALTER TABLE {table} {clause}")
        if not running:
            feed.start()
        feed.until_caught_up()
        _expect_equal(feed, tmp_path / "first", clauses)
        for table in clauses:
            maria.execute(f"DELETE FROM {table} WHERE id = 3")
            maria.execute(f"SET sql_mode = ''; INSERT INTO {table} (id, a) VALUES (4, 1)")
            maria.execute(f"UPDATE {table} SET a = 9 WHERE id = 2")
        _expect_equal(feed, tmp_path / "second", clauses)
        anew = {each.table.name for each in feed.changes(Op.TRUNCATE)}
        of_text = {each for each in _FOLLOWED if "CHANGE b" in each or "MODIFY b" in each}
        # Whether a text was converted is not known of a statement that is read late.
        assert {clauses[table] for table in anew} - of_text == set(_REWRITTEN)
        assert feed.status.errored == {}
    assert differences_everywhere(tmp_path / "log", tmp_path / "lakes", 0) == []


@pytest.mark.parametrize("column", ["bb", "id"])
def test_a_rename_that_changes_the_case_alone_keeps_the_values(
    maria: MysqlDatabase, tmp_path: Path, column: str
) -> None:
    maria.execute(
        "CREATE TABLE t (id int PRIMARY KEY, bb int); INSERT INTO t VALUES (1, 1), (2, 2)"
    )
    with captured(maria, tmp_path) as feed:
        feed.capture.stop()
        maria.execute("ALTER TABLE t ADD z int DEFAULT 5; UPDATE t SET z = 6 WHERE id = 1")
        maria.execute(f"ALTER TABLE t RENAME COLUMN {column} TO {column.title()}")
        feed.start()
        _expect_equal(feed, tmp_path / "then", {"t": column})
        assert feed.status.errored == {}


def test_a_table_made_anew_and_converted_while_headrace_is_down_is_read_anew(
    maria: MysqlDatabase, tmp_path: Path
) -> None:
    """The catalogue shows its columns as they are behind the conversion."""
    create = "CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t VALUES (1, 1), (2, 2)"
    maria.execute(create)
    with captured(maria, tmp_path) as feed:
        feed.capture.stop()
        maria.execute(f"DROP TABLE t; {create}; UPDATE t SET id = 3 WHERE id = 2")
        maria.execute("ALTER TABLE t MODIFY n varchar(9)")
        feed.start()
        feed.until_caught_up()
        assert feed.rows("t") == [{"id": 1, "n": "1"}, {"id": 3, "n": "2"}]


def _expect_equal(feed: Captured, folder: Path, clauses: dict[str, str]) -> None:
    expected = snapshot_rows(feed.database, folder)
    feed.until_caught_up()
    for table, clause in clauses.items():
        assert feed.rows(table) == expected[table], clause


@pytest.mark.parametrize("metadata", ["FULL", "MINIMAL"])
def test_changes_are_read_with_the_key_of_their_own_time(tmp_path: Path, metadata: str) -> None:
    """Also where the catalogue has another one already, and with names in no table map."""
    with (
        mysql_of("mariadb", {"binlog_row_metadata": metadata}) as server,
        server.database() as maria,
        captured(maria, tmp_path) as feed,
    ):
        maria.execute(
            "CREATE TABLE n (id int, v int); INSERT INTO n VALUES (1, 1), (1, 1), (2, 2), (3, 3);"
            "DELETE FROM n WHERE id = 1 LIMIT 1; UPDATE n SET v = 31 WHERE id = 3;"
            "ALTER TABLE n ADD PRIMARY KEY (id)"
        )
        assert [list(row.values()) for row in feed.rows("n")] == [[1, 1], [2, 2], [3, 31]]
        (first, *_) = feed.changes(Op.SCHEMA, table="n")
        assert first.table.key == ()
        feed.capture.stop()
        maria.execute("ALTER TABLE n DROP PRIMARY KEY; INSERT INTO n VALUES (2, 9), (2, 9)")
        maria.execute("DELETE FROM n WHERE v = 9 LIMIT 1; UPDATE n SET id = 7 WHERE v = 9")
        maria.execute("ALTER TABLE n RENAME COLUMN v TO w, ADD PRIMARY KEY (id)")
        feed.start()
        assert [list(row.values()) for row in feed.rows("n")] == [[1, 1], [2, 2], [3, 31], [7, 9]]
        assert feed.status.errored == {}
        assert differences_everywhere(tmp_path / "log", tmp_path / "lakes", 0) == []


def test_a_rewritten_table_stops_where_somebody_wants_to_decide(
    maria: MysqlDatabase, tmp_path: Path
) -> None:
    maria.execute("CREATE TABLE t (id int PRIMARY KEY, a int); INSERT INTO t VALUES (1, 2)")
    maria.execute("CREATE TABLE other (id int PRIMARY KEY)")
    with captured(maria, tmp_path, on_rewrite="stop") as feed:
        maria.execute("ALTER TABLE t MODIFY a varchar(9)")
        maria.execute("UPDATE t SET a = 'x'; INSERT INTO other VALUES (1)")
        feed.until_caught_up()
        assert feed.rows("other") == [{"id": 1}]
        (reason,) = feed.status.errored.values()
        assert "the column a may have been converted" in reason
        assert "headrace snapshot" in reason
        feed.capture.copy_again([f"{maria.name}.t"])
        feed.until(lambda: not feed.resume.errored and not feed.resume.to_snapshot, "it is read")
        assert feed.rows("t") == [{"id": 1, "a": "x"}]


def test_a_statement_counts_where_it_ends(maria: MysqlDatabase, tmp_path: Path) -> None:
    """With binlog_alter_two_phase it is logged when it starts, and again when it ends or fails."""
    maria.execute("CREATE TABLE t (id int PRIMARY KEY, a int); INSERT INTO t VALUES (1, 1), (2, 2)")
    two_phase = "SET binlog_alter_two_phase = ON; ALTER TABLE t"
    with captured(maria, tmp_path) as feed:
        with pytest.raises(pymysql.IntegrityError):
            maria.execute(f"{two_phase} DROP a, ADD a int DEFAULT 5, ADD b int NOT NULL UNIQUE")
        maria.execute("INSERT INTO t VALUES (3, 3)")
        assert feed.rows("t") == [{"id": each, "a": each} for each in (1, 2, 3)]
        maria.execute(f"{two_phase} ADD b int DEFAULT 7; INSERT INTO t VALUES (4, 4, 4)")
        rows = [{"id": each, "a": each, "b": 4 if each == 4 else 7} for each in (1, 2, 3, 4)]
        assert feed.rows("t") == rows
        assert feed.changes(Op.TRUNCATE) == []
