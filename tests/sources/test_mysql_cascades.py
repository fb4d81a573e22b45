"""What InnoDB does to rows by their foreign keys, which no binary log has."""

from pathlib import Path

import pytest

from headrace.change.event import Op
from headrace.testing.mysql import MysqlDatabase
from tests.everywhere import differences_everywhere
from tests.sources.mycapturing import captured, image, snapshot_rows

pytestmark = pytest.mark.requirement("P-39")

_TABLES = """
    CREATE TABLE firm (id int PRIMARY KEY, code int UNIQUE);
    CREATE TABLE person (id int PRIMARY KEY, firm int, boss int,
        FOREIGN KEY (firm) REFERENCES firm (id) ON DELETE CASCADE ON UPDATE CASCADE,
        FOREIGN KEY (boss) REFERENCES person (id) ON DELETE SET NULL);
    CREATE TABLE badge (id int PRIMARY KEY, code int, person int,
        FOREIGN KEY (code) REFERENCES firm (code) ON UPDATE SET NULL ON DELETE SET NULL,
        FOREIGN KEY (person) REFERENCES person (id) ON DELETE CASCADE);
    INSERT INTO firm SELECT seq, 100 + seq FROM seq_1_to_9;
    INSERT INTO person SELECT seq, seq MOD 9 + 1, NULLIF(seq DIV 2, 0) FROM seq_1_to_40;
    INSERT INTO badge SELECT seq, 101 + seq MOD 9, seq FROM seq_1_to_40;
"""


def test_rows_follow_those_that_their_foreign_keys_name(
    maria: MysqlDatabase, tmp_path: Path
) -> None:
    maria.execute(_TABLES)
    with captured(maria, tmp_path) as feed:
        maria.execute("DELETE FROM firm WHERE id = 1; UPDATE firm SET id = 77 WHERE id = 2")
        maria.execute("UPDATE firm SET code = code + 1000 WHERE id IN (3, 77)")
        maria.execute("REPLACE INTO firm VALUES (4, 4); DELETE FROM person WHERE id < 6")
        maria.execute("RENAME TABLE firm TO company")
        feed.until_caught_up()
        maria.execute("ALTER TABLE company RENAME COLUMN id TO number")
        maria.execute(
            "DELETE FROM company WHERE number = 5; UPDATE company SET number = 78 LIMIT 1"
        )
        maria.execute("SET foreign_key_checks = 0; DELETE FROM company WHERE number = 6")
        feed.until_caught_up()
        maria.execute("DELETE FROM company WHERE number = 7")
        feed.until_caught_up()
        expected = snapshot_rows(maria, tmp_path / "other")
        for table in ("company", "person", "badge"):
            assert feed.rows(table) == expected[table], table
        assert differences_everywhere(feed.log.path, tmp_path / "lake", seed=1) == []
        (shown, *_) = feed.changes(Op.SCHEMA, table="badge")
        assert [each["on_delete"] for each in image(shown.after)["foreign_keys"]] == [
            "set null",
            "cascade",
        ]


_FAMILY = """
    CREATE TABLE p (id int PRIMARY KEY); INSERT INTO p SELECT seq FROM seq_1_to_9;
    CREATE TABLE c (id int PRIMARY KEY, pid int, a int, INDEX (pid){});
    INSERT INTO c SELECT seq, seq, seq FROM seq_1_to_9"""
_CASCADE = "CONSTRAINT f FOREIGN KEY (pid) REFERENCES p (id) ON DELETE CASCADE"
_SET_NULL = "CONSTRAINT g FOREIGN KEY (pid) REFERENCES p (id) ON DELETE SET NULL"
_INDEX, _DELETE = "ALTER TABLE c ADD INDEX (a)", "DELETE FROM p WHERE id = 1"
_LATER = {
    "a foreign key goes": (_CASCADE, _INDEX, _DELETE, "ALTER TABLE c DROP FOREIGN KEY f"),
    "its column is renamed": (_CASCADE, _INDEX, _DELETE, "ALTER TABLE c RENAME COLUMN pid TO q"),
    "its parent is renamed": (
        *(_CASCADE, _INDEX, _DELETE, "RENAME TABLE p TO pp", "DELETE FROM pp WHERE id = 2"),
    ),
    "it comes and goes": (
        *("", f"ALTER TABLE c ADD {_CASCADE}", _DELETE, "ALTER TABLE c DROP FOREIGN KEY f"),
        "DELETE FROM p WHERE id = 2",
    ),
    "it does something else for a while": (
        *(_CASCADE, f"ALTER TABLE c DROP FOREIGN KEY f, ADD {_SET_NULL}", _DELETE),
        *(f"ALTER TABLE c DROP FOREIGN KEY g, ADD {_CASCADE}", "DELETE FROM p WHERE id = 2"),
    ),
}


@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
@pytest.mark.parametrize("case", _LATER)
def test_what_foreign_keys_do_is_of_their_own_time(
    maria: MysqlDatabase, tmp_path: Path, case: str, running: bool
) -> None:
    """The catalogue may show what later statements have made of them."""
    key, *statements = _LATER[case]
    maria.execute(_FAMILY.format(key and f", {key}"))
    with captured(maria, tmp_path) as feed:
        if not running:
            feed.capture.stop()
        for statement in statements:
            maria.execute(statement)
        if not running:
            feed.start()
        feed.until_caught_up()
        assert feed.rows("c") == snapshot_rows(maria, tmp_path / "other")["c"]
        assert differences_everywhere(feed.log.path, tmp_path / "lake", seed=2) == []


@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
def test_what_foreign_keys_of_a_new_table_do_is_of_its_time(
    maria: MysqlDatabase, tmp_path: Path, running: bool
) -> None:
    """Also of a table that gets them only later, or loses them."""
    with captured(maria, tmp_path) as feed:
        if not running:
            feed.capture.stop()
        maria.execute(_FAMILY.format(""))
        maria.execute(f"{_DELETE}; INSERT INTO p VALUES (1); ALTER TABLE c ADD {_CASCADE}")
        maria.execute("CREATE TABLE d LIKE c; DROP TABLE d")
        maria.execute(
            "CREATE TABLE d (id int PRIMARY KEY, pid int REFERENCES p (id) ON DELETE CASCADE);"
            "INSERT INTO d VALUES (3, 3); DELETE FROM p WHERE id = 3;"
            "ALTER TABLE d DROP CONSTRAINT d_ibfk_1; INSERT INTO d VALUES (4, 4)"
        )
        if not running:
            feed.start()
        feed.until_caught_up()
        expected = snapshot_rows(maria, tmp_path / "other")
        assert [feed.rows(each) for each in ("c", "d")] == [expected["c"], expected["d"]]
        assert differences_everywhere(feed.log.path, tmp_path / "lake", seed=3) == []


def test_generated_columns_follow_a_foreign_key(maria: MysqlDatabase, tmp_path: Path) -> None:
    maria.execute(
        "CREATE TABLE p (id int PRIMARY KEY, x int); INSERT INTO p VALUES (1, 1), (2, 2), (3, 3);"
        "CREATE TABLE m (id int PRIMARY KEY,"
        " FOREIGN KEY (id) REFERENCES p (id) ON UPDATE CASCADE ON DELETE CASCADE);"
        "INSERT INTO m VALUES (1), (2), (3);"
        "CREATE TABLE c (id int, pid int, v int AS (pid + 1) VIRTUAL,"
        " FOREIGN KEY (pid) REFERENCES m (id) ON UPDATE CASCADE ON DELETE SET NULL);"
        "INSERT INTO c (id, pid) VALUES (1, 1), (2, 2), (3, 3)"
    )
    with captured(maria, tmp_path) as feed:
        maria.execute("UPDATE p SET x = 7")
        feed.until_caught_up()
        assert feed.changes(Op.TRUNCATE) == []
        maria.execute("DELETE FROM p WHERE id = 1; UPDATE p SET id = 20 WHERE id = 2")
        maria.execute("UPDATE c SET id = id + 10")
        feed.until_caught_up()
        assert feed.rows("c") == snapshot_rows(maria, tmp_path / "other")["c"]


_KINDS = {
    "varchar(20)": ("'a'", "'it''s'", "'é'"),
    "decimal(12,3)": ("1.5", "-7.000", "99999999.125"),
    "datetime(6)": ("'2020-02-03 04:05:06.789'", "'2021-01-01'", "'1999-12-31 23:59:59'"),
    "timestamp(3) DEFAULT 0": ("'2020-02-03 04:05:06.7'", "'2021-01-01'", "'1999-12-31'"),
    "date": ("'2020-02-03'", "'2021-01-01'", "'1999-12-31'"),
    "time(2)": ("'01:02:03.4'", "'-01:00:00'", "'00:00:00'"),
    "binary(3)": ("x'01'", "x'ff00fe'", "x'020202'"),
    "bigint unsigned": ("18446744073709551615", "0", "7"),
    "year": ("2020", "1999", "2155"),
    "enum('a','b','c','d')": ("'a'", "'b'", "'c'"),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_keys_of_any_type_are_followed(maria: MysqlDatabase, tmp_path: Path, kind: str) -> None:
    (one, two, other), nullable = _KINDS[kind], kind.replace("DEFAULT", "NULL DEFAULT")
    maria.execute(
        f"SET time_zone = '+00:00'; CREATE TABLE p (id {kind} PRIMARY KEY);"
        f"CREATE TABLE c (pid {kind}, no int, note text, PRIMARY KEY (pid, no),"
        " FOREIGN KEY (pid) REFERENCES p (id) ON DELETE CASCADE ON UPDATE CASCADE);"
        f"CREATE TABLE g (id int AUTO_INCREMENT PRIMARY KEY, no int, pid {nullable},"
        " FOREIGN KEY (pid, no) REFERENCES c (pid, no) ON DELETE SET NULL ON UPDATE CASCADE);"
        f"INSERT INTO p VALUES ({one}), ({two});"
        "INSERT INTO c SELECT id, seq, 'n' FROM p, seq_1_to_3;"
        "INSERT INTO g (pid, no) SELECT pid, no FROM c"
    )
    with captured(maria, tmp_path) as feed:
        maria.execute(f"UPDATE p SET id = {other} WHERE id = {one}; UPDATE c SET note = 'm'")
        maria.execute(f"DELETE FROM p WHERE id = {two}; INSERT INTO p VALUES ({two})")
        maria.execute(f"INSERT INTO c VALUES ({two}, 1, 'again')")
        feed.until_caught_up()
        expected = snapshot_rows(maria, tmp_path / "other")
        assert [feed.rows(each) for each in "cg"] == [expected["c"], expected["g"]]
        assert differences_everywhere(feed.log.path, tmp_path / "lake", seed=4) == []


_TEXTS = {
    "varchar(9) COLLATE utf8mb4_general_ci": True,
    "char(9) COLLATE utf8mb4_general_ci": True,
    "varchar(9) COLLATE utf8mb4_bin": True,  # blanks at the end do not count
    "char(9) COLLATE utf8mb4_bin": False,
    "varchar(9) COLLATE utf8mb4_nopad_bin": False,
    "varbinary(9)": False,
    "enum('a','b')": False,
}


@pytest.mark.parametrize("kind", _TEXTS)
def test_texts_that_the_server_compares_otherwise_are_shown(
    maria: MysqlDatabase, tmp_path: Path, kind: str
) -> None:
    maria.execute(
        f"CREATE TABLE p (id {kind} PRIMARY KEY); INSERT INTO p VALUES ('a'), ('b');"
        f"CREATE TABLE c (id int PRIMARY KEY, pid {kind},"
        " CONSTRAINT f FOREIGN KEY (pid) REFERENCES p (id) ON DELETE CASCADE);"
        "INSERT IGNORE INTO c VALUES (1, 'a'), (2, 'A'), (3, 'b '), (4, 'b'), (5, NULL)"
    )
    with captured(maria, tmp_path) as feed:
        maria.execute("DELETE FROM p")
        feed.until_caught_up()
        exact = feed.rows("c") == snapshot_rows(maria, tmp_path / "other")["c"]
        shown = _TEXTS[kind]
        assert (exact, bool(feed.status.warnings)) == (not shown, shown)
        stopped = feed.source.describe(feed.log.resume(feed.source.name))
        assert stopped.warnings == feed.status.warnings
        assert all(f"{maria.name}.c" in each and "pid" in each for each in stopped.warnings)
        found = [each for each in feed.source.check() if each.name.startswith("collation")]
        assert [each.name for each in found] == [f"collation of {maria.name}.c"] * shown
        better = "varchar(9) COLLATE utf8mb4_nopad_bin"
        maria.execute(f"ALTER TABLE c DROP FOREIGN KEY f; ALTER TABLE p MODIFY id {better}")
        maria.execute(
            f"ALTER TABLE c MODIFY pid {better},"
            " ADD FOREIGN KEY (pid) REFERENCES p (id) ON DELETE CASCADE"
        )
        feed.until_caught_up()
        feed.until(lambda: not feed.status.warnings, "nothing is wrong any more")
