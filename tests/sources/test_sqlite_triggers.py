"""Triggers tell of every row that changes, however it came about."""

from collections.abc import Sequence
from pathlib import Path

import apsw
import pytest

from headrace.change.event import Op
from headrace.sources.sqlite import install
from tests.sources.litedb import captured

# What to create, and what to do then: nothing of it may be missed, or told twice.
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
            try:
                connection.execute(statement.removeprefix("!"))
                assert not statement.startswith("!")
            except apsw.ConstraintError:
                assert statement.startswith("!")
        feed.assert_replays()
        assert feed.status.errored == {}
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
