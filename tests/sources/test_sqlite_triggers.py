"""Triggers tell of every row that changes, however it came about."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import apsw
import pytest

from headrace.change.event import Op
from headrace.sources.sqlite import install
from headrace.sources.sqlite.schema import shapes
from headrace.sources.sqlite.triggers import drop, triggers
from headrace.sources.sqlite.writebacks import trigger_writes, written_back
from tests.sources.litedb import captured

# What to create, and what to do then: nothing of it may be missed, or told twice.
# !: a constraint refuses it. ?: SQLite does, with recursive_triggers and any trigger for DELETE.
CASES: dict[str, tuple[str, Sequence[str]]] = {
    "REPLACE by the rowid": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a)",
        ["INSERT INTO t VALUES (1, 'x'), (2, 'y')", "REPLACE INTO t VALUES (1, 'z')"],
    ),
    "REPLACE of several rows at once": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a UNIQUE, b, c, UNIQUE (b, c))",
        [
            "INSERT INTO t VALUES (1, 'x', 1, 1), (2, 'y', 2, 2), (3, 'z', 3, NULL)",
            "REPLACE INTO t VALUES (1, 'y', 2, 2)",
            "REPLACE INTO t VALUES (9, 'new', 3, NULL)",
            "INSERT OR REPLACE INTO t (a, b, c) VALUES ('y', 3, NULL), ('y', 5, 5), ('w', 5, 5)",
        ],
    ),
    "REPLACE by a key that is no rowid": (
        "CREATE TABLE t (a TEXT, b INT, v, PRIMARY KEY (b, a)) WITHOUT ROWID",
        [
            "INSERT INTO t VALUES ('x', 1, 1), ('y', 1, 2)",
            "REPLACE INTO t VALUES ('x', 1, 3)",
            "UPDATE OR REPLACE t SET a = 'x' WHERE a = 'y'",
        ],
    ),
    "REPLACE by a key of another case": (
        "CREATE TABLE t (a TEXT COLLATE NOCASE PRIMARY KEY NOT NULL, v) WITHOUT ROWID;"
        "CREATE TABLE u (id INTEGER PRIMARY KEY, a TEXT UNIQUE COLLATE NOCASE)",
        [
            "INSERT INTO t VALUES ('ann', 1)",
            "REPLACE INTO t VALUES ('ANN', 2)",
            "INSERT INTO u VALUES (1, 'ann')",
            "REPLACE INTO u VALUES (2, 'Ann')",
        ],
    ),
    "REPLACE by an index over an expression": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT, b TEXT);"
        "CREATE UNIQUE INDEX i ON t (lower(a) DESC, substr(b, 1, instr(b, ','))  /* , */, id % 2)",
        [
            "INSERT INTO t VALUES (1, 'Ann', 'x,1'), (2, 'Bob', 'y,1'), (3, 'bob', 'y,2')",
            "REPLACE INTO t VALUES (5, 'ANN', 'x,2')",
            "UPDATE OR REPLACE t SET a = 'Ann', b = 'x,', id = 7 WHERE id = 3",
        ],
    ),
    "REPLACE beside a partial index": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a, live);"
        "CREATE UNIQUE INDEX i ON t (a) WHERE live",
        [
            "INSERT INTO t VALUES (1, 'x', 0), (2, 'x', 1)",
            "REPLACE INTO t VALUES (3, 'x', 0)",
            "REPLACE INTO t VALUES (4, 'x', 1)",
        ],
    ),
    "REPLACE that the table asks for": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a UNIQUE ON CONFLICT REPLACE)",
        [
            "INSERT INTO t VALUES (1, 'x'), (2, 'y')",
            "INSERT INTO t VALUES (3, 'x')",
            "UPDATE t SET a = 'y' WHERE id = 3",
        ],
    ),
    "UPDATE OR REPLACE": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a UNIQUE)",
        [
            "INSERT INTO t VALUES (1, 'x'), (2, 'y'), (3, 'z')",
            "UPDATE OR REPLACE t SET a = 'y' WHERE id = 1",
            "UPDATE OR REPLACE t SET id = 3 WHERE id = 1",
            "UPDATE OR REPLACE t SET id = 3, a = 'new'",
        ],
    ),
    "conflicts that change nothing": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a UNIQUE)",
        [
            "INSERT INTO t VALUES (1, 'x'), (2, 'y')",
            "INSERT OR IGNORE INTO t VALUES (1, 'z'), (3, 'x'), (4, 'w')",
            "!INSERT INTO t VALUES (5, 'v'), (1, 'z')",
            "!INSERT OR FAIL INTO t VALUES (6, 'u'), (1, 'z'), (7, 't')",
            "INSERT INTO t VALUES (8, 's')",
            "UPDATE OR IGNORE t SET a = 'x'",
        ],
    ),
    "upserts": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a UNIQUE, n DEFAULT 0)",
        [
            "INSERT INTO t (id, a) VALUES (1, 'x')",
            "INSERT INTO t (id, a) VALUES (1, 'y') ON CONFLICT (id) DO UPDATE SET n = n + 1",
            "INSERT INTO t (id, a) VALUES (1, 'y') ON CONFLICT DO NOTHING",
            "INSERT INTO t (id, a) VALUES (1, 'y'), (2, 'z') ON CONFLICT DO UPDATE SET a = 'w'",
            "INSERT INTO t (a) VALUES ('z') ON CONFLICT (a) DO UPDATE SET id = 9 RETURNING id",
        ],
    ),
    "keys that change": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a); CREATE TABLE u (k TEXT PRIMARY KEY NOT NULL)",
        [
            "INSERT INTO t VALUES (1, 'x'), (2, 'y')",
            "UPDATE t SET id = id + 10",
            "UPDATE t SET rowid = 5 WHERE id = 12",
            "INSERT INTO u VALUES ('a'), ('b')",
            "UPDATE u SET k = k || '!'",
        ],
    ),
    "generated columns": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a, b AS (a * 2), c TEXT AS (a || 'c') STORED)",
        ["INSERT INTO t (a) VALUES (1), (2)", "UPDATE t SET a = 7", "DELETE FROM t WHERE id = 1"],
    ),
    "strict tables": (
        "CREATE TABLE t (id INT PRIMARY KEY, a TEXT, b BLOB, c REAL, d ANY) STRICT",
        [
            "INSERT INTO t VALUES (1, 'x', x'00', 1, '1'), (2, NULL, NULL, NULL, 1)",
            "REPLACE INTO t VALUES (1, 'y', x'01', 2.5, x'02')",
        ],
    ),
    "names in quotes": (
        """CREATE TABLE "a ""b"" 'c' [d]" ("select" INTEGER PRIMARY KEY, "x""y" UNIQUE, 'it''s');"""
        """CREATE TABLE "NEW" ("OLD" TEXT PRIMARY KEY NOT NULL, rowid, "ümlaut %s")""",
        [
            """INSERT INTO "a ""b"" 'c' [d]" VALUES (1, 2, 3), (2, 3, 4)""",
            """REPLACE INTO "a ""b"" 'c' [d]" VALUES (2, 2, 5)""",
            """INSERT INTO "NEW" VALUES ('a', 1, 2)""",
            """REPLACE INTO "NEW" VALUES ('a', 3, 4)""",
            """DELETE FROM "NEW" """,
        ],
    ),
    "no key at all": (
        "CREATE TABLE t (a, b)",
        [
            "INSERT INTO t VALUES (1, 2), (1, 2), (NULL, 'x')",
            "UPDATE t SET b = 3 WHERE rowid = 1",
            "REPLACE INTO t (rowid, a, b) VALUES (2, 'r', 's')",
            "DELETE FROM t WHERE a = 1",
        ],
    ),
    "many columns": (
        f"CREATE TABLE t (id INTEGER PRIMARY KEY, {', '.join(f'c{n}' for n in range(70))})",
        [
            f"INSERT INTO t VALUES (1, {', '.join(map(str, range(70)))})",
            "INSERT INTO t (id, c69) VALUES (2, 'last')",
            "UPDATE t SET c31 = 'x', c68 = NULL",
            "REPLACE INTO t (id, c5) VALUES (1, 'y')",
            "DELETE FROM t WHERE id = 2",
        ],
    ),
    "foreign keys that cascade": (
        "CREATE TABLE p (id INTEGER PRIMARY KEY, a UNIQUE);"
        "CREATE TABLE c (id INTEGER PRIMARY KEY, p REFERENCES p ON DELETE CASCADE"
        " ON UPDATE CASCADE, q REFERENCES p (a) ON DELETE SET NULL ON UPDATE CASCADE)",
        [
            "INSERT INTO p VALUES (1, 'x'), (2, 'y'), (3, 'z')",
            "INSERT INTO c VALUES (1, 1, 'x'), (2, 1, 'y'), (3, 2, 'y'), (4, 3, 'x')",
            "UPDATE p SET id = 11, a = 'xx' WHERE id = 1",
            "DELETE FROM p WHERE id = 11",
            "REPLACE INTO p VALUES (2, 'new')",
        ],
    ),
    "triggers of the application": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a, n DEFAULT 0, at);"
        "CREATE TABLE audit (id INTEGER PRIMARY KEY, what);"
        "CREATE TRIGGER x AFTER INSERT ON t BEGIN UPDATE t SET n = n + 1 WHERE id = NEW.id; END;"
        "CREATE TRIGGER y AFTER UPDATE OF a ON t BEGIN UPDATE t SET at = 'now' WHERE id = NEW.id;"
        " INSERT INTO audit (what) VALUES (OLD.a || NEW.a); END;"
        "CREATE TRIGGER z BEFORE DELETE ON t BEGIN INSERT INTO audit (what) VALUES (OLD.a); END",
        [
            "INSERT INTO t (id, a) VALUES (1, 'x'), (2, 'y')",
            "UPDATE t SET a = a || '!'",
            "REPLACE INTO t (id, a) VALUES (1, 'z')",
            "DELETE FROM t",
        ],
    ),
    "UPDATE OR REPLACE of what decides whether a partial index has the row": (
        'CREATE TABLE t (id INTEGER PRIMARY KEY, n TEXT, m TEXT, "it\'s");'
        "CREATE UNIQUE INDEX i ON t (n) WHERE m IS NOT NULL;"
        'CREATE TABLE u (id INTEGER PRIMARY KEY, n TEXT COLLATE NOCASE, m INT, "a ""b");'
        "CREATE UNIQUE INDEX j ON u (lower(n), m % 2) WHERE /* ) */ m>0;"
        'CREATE UNIQUE INDEX k ON u (n DESC)where"a ""b"',
        [
            "INSERT INTO t (id, n, m) VALUES (2, 'b', NULL), (3, 'b', NULL), (6, 'b', 'q')",
            "UPDATE OR REPLACE t SET m = 'k' WHERE id = 2",
            "UPDATE OR REPLACE t SET m = 'k' WHERE id = 3",
            "REPLACE INTO t (id, n, m) VALUES (7, 'b', 'q'), (8, 'b', NULL)",
            "INSERT INTO u VALUES (1, 'A', 1, 0), (2, 'b', 2, 1), (3, 'B', -1, 0)",
            "UPDATE OR REPLACE u SET m = -m, n = 'a' WHERE id = 3",
            'UPDATE OR REPLACE u SET "a ""b" = 1 WHERE id = 3',
            """UPDATE OR REPLACE u SET n = 'b', "a ""b" = 2""",
        ],
    ),
    "REPLACE of a row that others of its table name": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, up INT REFERENCES t ON DELETE SET NULL,"
        " a UNIQUE, b UNIQUE);"
        "CREATE TABLE w (up REFERENCES w (k) ON DELETE SET NULL,"
        " k TEXT COLLATE NOCASE PRIMARY KEY,"
        f" {', '.join(f'c{n}' for n in range(40))}) WITHOUT ROWID",
        [
            "INSERT INTO t VALUES (1, NULL, 'a', 'A'), (2, 1, 'b', 'B'), (3, 2, 'c', 'C')",
            "INSERT INTO t VALUES (4, 1, 'd', 'D'), (5, 4, 'e', 'E'), (6, 6, 'f', 'F')",
            "REPLACE INTO t VALUES (5, NULL, 'a', 'B')",
            "INSERT OR IGNORE INTO t VALUES (7, NULL, 'c', 'D')",
            "UPDATE t SET up = 5 WHERE id = 3",
            "REPLACE INTO t VALUES (8, 5, 'c', 'D'), (9, 5, 'g', 'G'), (12, 8, 'l', 'L')",
            "?UPDATE OR REPLACE t SET a = 'c' WHERE id = 9",
            "INSERT INTO t VALUES (11, 12, 'i', 'I'), (13, 11, 'm', 'M')",
            "INSERT INTO t VALUES (9, 9, 'x', 'X') ON CONFLICT (id) DO UPDATE SET up = 12",
            "UPDATE OR REPLACE t SET id = 11 WHERE id = 9",
            "REPLACE INTO t VALUES (6, NULL, 'again', 'F')",
            "DELETE FROM t WHERE id = 11",
            "INSERT INTO w (k, up, c39) VALUES ('a', NULL, 1), ('b', 'a', 2), ('c', 'A', 3)",
            "REPLACE INTO w (k, c1) VALUES ('A', 5)",
            "INSERT OR IGNORE INTO w (k) VALUES ('B'), ('d')",
            "UPDATE OR REPLACE w SET k = 'C' WHERE k = 'd'",
        ],
    ),
    "triggers that update their own table before REPLACE": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a UNIQUE, n DEFAULT 0);"
        "CREATE TRIGGER x BEFORE INSERT ON t BEGIN UPDATE t SET n = n + 1 WHERE a = NEW.a; END;"
        "CREATE TRIGGER y BEFORE UPDATE OF a ON t BEGIN UPDATE OR IGNORE 't' SET n = 7; END;"
        "CREATE TABLE u (id INTEGER PRIMARY KEY, a UNIQUE, n DEFAULT 0); CREATE TABLE other (k);"
        'CREATE TRIGGER z INSERT ON u BEGIN INSERT INTO "other" VALUES (1); END;'
        "CREATE TRIGGER v AFTER INSERT ON other BEGIN UPDATE u SET n = n + 1; END",
        [
            "INSERT INTO t VALUES (1, 'x', 0), (2, 'y', 0), (3, 'z', 0)",
            "REPLACE INTO t VALUES (4, 'y', 0), (4, 'z', 0)",
            "UPDATE OR REPLACE t SET a = 'x' WHERE id = 4",
            "REPLACE INTO t VALUES (4, 'w', 0)",
            "INSERT INTO u VALUES (1, 'x', 0), (2, 'y', 0), (3, 'z', 0)",
            "REPLACE INTO u VALUES (9, 'x', 0), (2, 'z', 0)",
        ],
    ),
    "updates that a foreign key carries on to the row itself": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, up INT REFERENCES t ON UPDATE CASCADE"
        " ON DELETE CASCADE, also INT REFERENCES t ON UPDATE CASCADE, a UNIQUE);"
        "CREATE TABLE n (k TEXT PRIMARY KEY, up TEXT REFERENCES n ON UPDATE SET NULL, v);"
        "CREATE TABLE a (id INTEGER PRIMARY KEY, b INT REFERENCES b ON UPDATE CASCADE);"
        "CREATE TABLE b (id INTEGER PRIMARY KEY REFERENCES a ON UPDATE CASCADE);"
        "CREATE TABLE m (id INTEGER PRIMARY KEY REFERENCES m (u) ON UPDATE CASCADE, u UNIQUE);"
        "CREATE TABLE w (up REFERENCES w (u) ON UPDATE CASCADE, u UNIQUE,"
        f" {', '.join(f'c{n}' for n in range(40))})",
        [
            "INSERT INTO t VALUES (3, 3, 3, 'x'), (4, 3, 4, 'y'), (5, NULL, NULL, 'z')",
            "UPDATE t SET id = 30 WHERE id = 3",
            "UPDATE t SET a = 'xx' WHERE id = 30",
            "UPDATE OR REPLACE t SET id = id + 10, a = 'y' WHERE id = 30",
            "UPDATE OR REPLACE t SET id = 5 WHERE id = 40",
            "UPDATE OR IGNORE t SET id = 5",
            "UPDATE t SET id = -id",
            "INSERT INTO n VALUES ('a', 'a', 1), ('b', 'a', 2), ('c', 'c', 3)",
            "UPDATE n SET k = 'z' WHERE k = 'a'",
            "UPDATE n SET k = k || '!'",
            "INSERT INTO a VALUES (1, NULL)",
            "INSERT INTO b VALUES (1)",
            "UPDATE a SET b = 1",
            "UPDATE a SET id = 7",
            "INSERT INTO m VALUES (1, 1), (2, 2)",
            "UPDATE m SET u = 9 WHERE id = 1",
            "INSERT INTO w (up, u, c39) VALUES (1, 1, 'last'), (1, 2, 'other')",
            "UPDATE w SET u = 5, c0 = 'first', c38 = 'more' WHERE u = 1",
        ],
    ),
    "columns that have names of Headrace's": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, k0 INT, v0 UNIQUE, layout, part)",
        [
            "INSERT INTO t VALUES (1, 1, 'x', 0, 0), (2, 2, 'y', 0, 0), (3, 1, 'z', 0, 0)",
            "REPLACE INTO t VALUES (4, 4, 'z', 0, 0)",
            "UPDATE OR REPLACE t SET v0 = 'y' WHERE id = 4",
        ],
    ),
    "everything deleted": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY)",
        ["INSERT INTO t VALUES (1), (2), (3)", "DELETE FROM t"],
    ),
}


@pytest.mark.parametrize("recursive", [False, True], ids=["plain", "recursive_triggers"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_told_adds_up_to_the_database(case: str, recursive: bool, tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    create, statements = CASES[case]
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(20_000)
    connection.execute(f"PRAGMA recursive_triggers = {int(recursive)}; PRAGMA foreign_keys = ON")
    connection.execute(create)
    install(str(path), ["*"])
    with captured(path, tmp_path) as feed:
        for statement in statements:
            refused = statement.startswith(("!", "?") if recursive else "!")
            try:
                connection.execute(statement.lstrip("!?"))
                assert not refused
            except apsw.ConstraintError:
                assert refused
        feed.assert_replays()
        assert feed.status.errored == {}
    connection.close()


TREE = """
    CREATE TABLE t (id INTEGER PRIMARY KEY, up INT REFERENCES t ON DELETE SET NULL
      ON UPDATE CASCADE, a UNIQUE, b, c);
    CREATE UNIQUE INDEX i ON t (c) WHERE b;
    INSERT INTO t VALUES (1, NULL, 'x', 0, 0), (2, 1, 'y', 0, 0), (3, 3, 'z', 0, 0);"""


def test_columns_can_be_dropped_from_tables_that_name_themselves(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(20_000)
    connection.execute(f"PRAGMA foreign_keys = ON; {TREE}")
    install(str(path), ["*"])
    with captured(path, tmp_path) as feed:
        connection.execute("DROP INDEX i; ALTER TABLE t DROP COLUMN b; ALTER TABLE t DROP COLUMN c")
        connection.execute("INSERT OR IGNORE INTO t VALUES (2, 1, 'x'), (4, 2, 'w')")
        connection.execute("REPLACE INTO t VALUES (5, 2, 'x')")
        connection.execute("UPDATE t SET id = id + 10; DELETE FROM t WHERE id = 12")
        feed.assert_replays(surprises=True)
        connection.execute("REPLACE INTO t VALUES (6, 6, 'z'); UPDATE t SET id = 7 WHERE id = 6")
        feed.assert_replays(surprises=True)
    connection.close()


def test_tables_whose_triggers_missed_rows_get_a_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(20_000)
    connection.execute(f"PRAGMA foreign_keys = ON; {TREE} CREATE TABLE u (id INTEGER PRIMARY KEY)")
    install(str(path), ["*"])
    with captured(path, tmp_path) as feed:
        feed.capture.stop()
        for shape in shapes(connection, ["t"]):
            for name, sql in triggers(replace(shape, nested=False), 1).items():
                connection.execute(f"{drop(name)}; {sql}")
        connection.execute("REPLACE INTO t VALUES (5, NULL, 'x', 0, 0)")
        feed.start()
        feed.assert_replays(surprises=True)
        assert [change.table.name for change in feed.changes(Op.TRUNCATE)] == ["t"]
    connection.close()


def test_what_is_set_aside_stays_little(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with apsw.Connection(str(path)) as connection:
        connection.execute(f"PRAGMA foreign_keys = ON; {TREE}")
    install(str(path), ["*"])
    for number in range(200):
        connection.execute("INSERT INTO t (id, a) VALUES (?1, ?1)", (number + 100,))
        connection.execute("INSERT OR IGNORE INTO t (id, a) VALUES (?1, ?1)", (number + 100,))
        connection.execute("UPDATE OR IGNORE t SET id = 1 WHERE id = ?", (number + 100,))
    (count,) = next(connection.execute("SELECT count(*) FROM headrace_replaced"))
    assert count < 50
    connection.close()


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        ("CREATE TRIGGER x BEFORE INSERT ON t BEGIN UPDATE t SET a = 1; END", (True, {"t"})),
        ("CREATE TRIGGER x INSERT ON t BEGIN INSERT OR FAIL INTO [a b] VALUES (1); END",
         (True, {"a b"})),
        ("CREATE TRIGGER x AFTER UPDATE OF a ON t BEGIN DELETE FROM `U``v`; END",
         (False, {"u`v"})),
        ("CREATE TRIGGER 'after' UPDATE ON t /* BEGIN */ BEGIN -- INTO t\n UPDATE OR IGNORE"
         ' "X""y" SET a = 1; SELECT 1 FROM z; REPLACE INTO q SELECT * FROM t; END',
         (True, {'x"y', "q"})),
        ("CREATE TRIGGER x BEFORE DELETE ON t BEGIN UPDATE t SET a = 1; END", (False, {"t"})),
    ],
)  # fmt: skip
def test_what_a_trigger_writes_to_is_read_from_its_text(
    sql: str, found: tuple[bool, set[str]]
) -> None:
    assert trigger_writes(sql) == found


def test_only_tables_that_are_written_back_to_have_other_triggers() -> None:
    with apsw.Connection("") as connection:
        connection.execute("""
            CREATE TABLE stamped (id INTEGER PRIMARY KEY, at);
            CREATE TRIGGER s AFTER UPDATE ON stamped BEGIN UPDATE stamped SET at = 1; END;
            CREATE TABLE parent (id INTEGER PRIMARY KEY);
            CREATE TABLE child (p REFERENCES parent ON DELETE CASCADE ON UPDATE CASCADE);
            CREATE TABLE tree (id INTEGER PRIMARY KEY, up REFERENCES tree);
            CREATE TABLE Forest (id INTEGER PRIMARY KEY, up REFERENCES forest ON DELETE SET NULL);
            CREATE TABLE counted (id INTEGER PRIMARY KEY, n);
            CREATE TABLE part (c REFERENCES counted ON UPDATE CASCADE);
            CREATE TRIGGER c AFTER UPDATE ON part BEGIN UPDATE counted SET n = n + 1; END""")
        back = written_back(connection)
    assert back.nested == {"forest", "counted"}
    assert back.rewritten == {"counted"}
    connection.close()


@pytest.mark.requirement("S1-33")
def test_rows_are_told_with_what_they_were_and_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with apsw.Connection(str(path)) as connection:
        connection.set_busy_timeout(20_000)
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a, b)")
    install(str(path), ["*"])
    with captured(path, tmp_path) as feed:
        connection.execute("INSERT INTO t VALUES (1, 1, 'x')")
        connection.execute("UPDATE t SET a = 1.0 WHERE id = 1")
        connection.execute("ATTACH ? AS other", (str(path),))
        connection.execute("DELETE FROM other.t")
        insert, update, delete = feed.changes(Op.INSERT, Op.UPDATE, Op.DELETE)
    assert (insert.before, insert.after) == (None, b'{"id":1,"a":1,"b":"x"}')
    assert (update.before, update.after) == (insert.after, b'{"id":1,"a":1.0,"b":"x"}')
    assert update.changed == ("a",)
    assert (delete.before, delete.after, delete.key) == (update.after, None, b'{"id":1}')
    assert [change.before_kind for change in (insert, update, delete)] == ["none", "full", "full"]
    table = insert.table
    assert (table.connector, table.database, table.schema) == ("sqlite", "shop", "main")
    assert table.origin.startswith("sqlite:")
    connection.close()
