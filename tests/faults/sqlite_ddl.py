"""Random DDL of a SQLite application, with rows, restarts and kills of the capture between.

python -m tests.faults.sqlite_ddl --seeds 50 --first 1
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import apsw

from headrace.log import Log
from headrace.sources.sqlite import alter, install
from tests.everywhere import differences_everywhere
from tests.sources.litedb import Captured, compare

ROOT = Path(__file__).parents[2]
NAMES = "abcdefg"
TABLES = ("t0", "t1", "t2", "Odd \"name\"")  # fmt: skip
TYPES = ("INT", "TEXT", "REAL", "BLOB", "", "NUMERIC(9,2)")
DEFAULTS = ("", "DEFAULT 7", "DEFAULT 'd'", "DEFAULT x'ff'", "NOT NULL DEFAULT 0.5", "DEFAULT '8'")
_EXPECTED = (apsw.ConstraintError, apsw.SQLError, sqlite3.IntegrityError, sqlite3.OperationalError)


class Connection(Protocol):
    """What apsw and the standard library share."""

    def execute(self, statement: str, parameters: Any = ..., /) -> Any:
        """Run a statement."""

    def close(self) -> None:
        """Let go of the file."""


def quoted(name: str) -> str:
    """A name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


class Application:
    """Writes rows and DDL by chance; an error that names Headrace is a defect."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._renamed: set[str] = set()
        self.statements = self.refused = 0
        self.trace: list[str] = []
        self._connection: Connection

    def work(self, connection: Connection, steps: int) -> None:
        """So many transactions."""
        self._connection = connection
        for _ in range(steps):
            self._transaction()

    def _transaction(self) -> None:
        if self._dice.random() < 0.05:
            self._run(self._dice.choice(("VACUUM", "ANALYZE")))
            return
        self._run("BEGIN IMMEDIATE")
        for _ in range(self._dice.randint(1, 5)):
            step = self._dice.choice(self._STEPS)
            step(self)
        self._run("ROLLBACK" if self._dice.random() < 0.1 else "COMMIT")

    def _run(self, statement: str, *values: Any) -> None:
        self.statements += 1
        self.trace.append(statement)
        try:
            self._connection.execute(statement, values)
        except _EXPECTED as error:
            self.refused += 1
            self.trace.append(f"  -- {error}")
            text = str(error)
            documented = "after drop column" in text and any(n in text for n in self._renamed)
            assert "headrace" not in text or documented, f"{statement}: {text}"

    def _rows(self, query: str) -> list[Any]:
        return list(self._connection.execute(query).fetchall())

    def _tables(self) -> list[str]:
        query = "SELECT name FROM sqlite_schema WHERE type = 'table'"
        return [name for (name,) in self._rows(query) if name in TABLES]

    def _table(self) -> str:
        return self._dice.choice(self._tables() or [TABLES[0]])

    def _columns(self, table: str) -> list[Any]:
        return self._rows(f"PRAGMA table_xinfo({quoted(table)})")

    def _column(self, table: str) -> str:
        return str(self._dice.choice(self._columns(table) or [(0, "a")])[1])

    def _value(self, *, key: bool = False) -> Any:
        dice = self._dice
        if key:
            return dice.randint(1, 30)
        return dice.choice((None, dice.randint(-9, 9), dice.random(), "text", "7", b"\xff\0"))

    # -- rows -----------------------------------------------------------------------------------

    def _insert(self) -> None:
        table = self._table()
        columns = [row for row in self._columns(table) if row[6] == 0]
        if columns:
            names = ", ".join(quoted(row[1]) for row in columns)
            marks = ", ".join("?" * len(columns))
            verb = self._dice.choice(("INSERT", "REPLACE", "INSERT OR IGNORE"))
            values = [self._value(key=bool(row[5])) for row in columns]
            self._run(f"{verb} INTO {quoted(table)} ({names}) VALUES ({marks})", *values)

    def _update(self) -> None:
        table = self._table()
        columns = [row for row in self._columns(table) if row[6] == 0]
        if columns:
            row, where = self._dice.choice(columns), self._dice.choice(columns)
            verb = self._dice.choice(("UPDATE", "UPDATE OR REPLACE", "UPDATE OR IGNORE"))
            self._run(
                f"{verb} {quoted(table)} SET {quoted(row[1])} = ? WHERE {quoted(where[1])} > ?",
                self._value(key=bool(row[5])),
                self._dice.randint(-5, 25),
            )

    def _delete(self) -> None:
        table = self._table()
        self._run(f"DELETE FROM {quoted(table)} WHERE {quoted(self._column(table))} = ?", 7)

    # -- tables ---------------------------------------------------------------------------------

    def _definition(self) -> str:
        names = self._dice.sample(NAMES, self._dice.randint(2, 5))
        columns = [f"{name} {self._dice.choice(TYPES)}" for name in names[1:]]
        key = self._dice.choice(
            ("{} INTEGER PRIMARY KEY", "{} TEXT PRIMARY KEY NOT NULL", "{} INT", "{} INT UNIQUE")
        )
        if self._dice.random() < 0.2:
            two = f"PRIMARY KEY ({names[0]}, {names[1]})"
            return f"({names[0]} INT, {', '.join(columns)}, {two}) WITHOUT ROWID"
        return f"({key.format(names[0])}, {', '.join(columns)})"

    def _create(self) -> None:
        self._run(f"CREATE TABLE {quoted(self._dice.choice(TABLES))} {self._definition()}")

    def _drop(self) -> None:
        self._run(f"DROP TABLE {quoted(self._table())}")

    def _recreate(self) -> None:
        table = self._table()
        made = self._rows("SELECT sql, name FROM sqlite_schema WHERE type = 'table'")
        self._run(f"DROP TABLE {quoted(table)}")
        for sql in [sql for sql, name in made if name == table]:
            self._run(sql)

    def _rename(self) -> None:
        table = self._table()
        self._run(f"ALTER TABLE {quoted(table)} RENAME TO {quoted(self._dice.choice(TABLES))}")

    def _swap(self) -> None:
        one, other = self._table(), self._table()
        self._run(f"ALTER TABLE {quoted(one)} RENAME TO swapping")
        self._run(f"ALTER TABLE {quoted(other)} RENAME TO {quoted(one)}")
        self._run(f"ALTER TABLE swapping RENAME TO {quoted(other if other != one else one)}")

    def _rebuild(self) -> None:
        """As SQLite's docs say, with other values, and now and then with all triggers."""
        table = self._table()
        columns = [row for row in self._columns(table) if row[6] == 0]
        made = self._rows(
            f"SELECT type, sql FROM sqlite_schema WHERE sql > '' AND tbl_name = "
            f"'{table.replace(chr(39), chr(39) * 2)}'"
        )
        tables = [sql for kind, sql in made if kind == "table"]
        if not columns or not tables:
            return
        body = tables[0][tables[0].index("(", len("CREATE TABLE ") + len(quoted(table)) - 2) :]
        values = [
            quoted(row[1]) if row[5] or self._dice.random() < 0.7 else "'rebuilt'"
            for row in columns
        ]
        names = ", ".join(quoted(row[1]) for row in columns)
        self._run(f"CREATE TABLE rebuilt {body}")
        self._run(
            f"INSERT OR IGNORE INTO rebuilt ({names}) SELECT {', '.join(values)} FROM "
            f"{quoted(table)}"
        )
        self._run(f"DROP TABLE {quoted(table)}")
        self._run(f"ALTER TABLE rebuilt RENAME TO {quoted(table)}")
        restored = ("index", "trigger") if self._dice.random() < 0.5 else ("index",)
        for kind, sql in made:
            if kind in restored:
                self._run(sql)

    # -- columns --------------------------------------------------------------------------------

    def _add(self) -> None:
        name, kind = self._dice.choice(NAMES), self._dice.choice(TYPES)
        rest = self._dice.choice(DEFAULTS)
        table = self._table()
        if self._dice.random() < 0.15:
            # Nothing that prints a real: releases of SQLite give it another number of digits.
            rest = f"GENERATED ALWAYS AS (coalesce({quoted(self._column(table))}, 0)) VIRTUAL"
        self._run(f"ALTER TABLE {quoted(table)} ADD COLUMN {name} {kind} {rest}")

    def _drop_column(self) -> None:
        table = self._table()
        self._run(f"ALTER TABLE {quoted(table)} DROP COLUMN {quoted(self._column(table))}")

    def _again(self) -> None:
        """Drop a column and add it as it was."""
        table = self._table()
        columns = self._columns(table)
        if columns:
            column = self._dice.choice((columns[-1], self._dice.choice(columns)))
            default = "" if column[4] is None else f"DEFAULT {column[4]}"
            where, name = quoted(table), quoted(column[1])
            self._run(f"ALTER TABLE {where} DROP COLUMN {name}")
            self._run(f"ALTER TABLE {where} ADD COLUMN {name} {column[2]} {default}")

    def _rename_column(self) -> None:
        table, name = self._table(), self._dice.choice(NAMES)
        self._renamed.add(name)
        old = quoted(self._column(table))
        self._run(f"ALTER TABLE {quoted(table)} RENAME COLUMN {old} TO {name}")

    def _index(self) -> None:
        name, table = f"i{self._dice.randint(0, 3)}", self._table()
        if self._dice.random() < 0.5:
            self._run(f"DROP INDEX IF EXISTS {name}")
            return
        column = quoted(self._column(table))
        term = self._dice.choice(
            (column, f"coalesce({column}, 1)", f"{column} COLLATE NOCASE DESC")
        )
        unique = self._dice.choice(("", "UNIQUE "))
        where = self._dice.choice(("", f" WHERE {column} > 3"))
        self._run(f"CREATE {unique}INDEX {name} ON {quoted(table)} ({term}){where}")

    def _other(self) -> None:
        self._run(
            self._dice.choice(
                (
                    "CREATE VIEW IF NOT EXISTS v AS SELECT 1",
                    "DROP VIEW IF EXISTS v",
                    "CREATE TABLE scratch (x)",
                    "DROP TABLE IF EXISTS scratch",
                )
            )
        )

    _STEPS: tuple[Callable[[Application], None], ...] = (
        *[_insert] * 8, *[_update] * 4, *[_delete] * 2, _create, _create, _drop, _recreate, _rename,
        _swap, _rebuild, _add, _add, _drop_column, _drop_column, _again, _again, _rename_column,
        _index, _index, _other,
    )  # fmt: skip


def alter_by_command(path: Path, dice: random.Random) -> None:
    """What the docs offer for DDL without a snapshot."""
    name = dice.choice(NAMES)
    statements = (
        f"ALTER TABLE t0 ADD COLUMN {name} TEXT DEFAULT 5; UPDATE t0 SET {name} = 6 WHERE a > 3",
        f"ALTER TABLE t0 RENAME COLUMN {name} TO {dice.choice(NAMES)}",
        f"ALTER TABLE t0 DROP COLUMN {name}; ALTER TABLE t0 ADD COLUMN {name} TEXT",
    )
    try:
        alter(str(path), dice.choice(statements))
    except Exception as error:
        if "trigger headrace" in str(error):  # SQLite refuses many, each in its own words
            raise


def run_seed(seed: int, folder: Path, *, turns: int = 8) -> tuple[int, int]:
    """One life of a database; returns how many statements ran and how many SQLite refused."""
    dice = random.Random(seed)
    path = folder / "shop.db"
    application = Application(dice)
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("CREATE TABLE t0 (a INTEGER PRIMARY KEY, b TEXT, c)")
        connection.execute("INSERT INTO t0 VALUES (1, 'x', 2), (2, 'y', NULL)")
    install(str(path), ["*"], wal=seed % 3 != 0)
    try:
        for _ in range(turns):
            _turn(path, folder / "log", application, dice)
        with Log.open(folder / "log") as log:
            feed = Captured(path, log)
            feed.start()
            try:
                changes = feed.changes()
            finally:
                feed.capture.stop()
        compare(path, changes, surprises=True)
        found = differences_everywhere(folder / "log", folder / "lake", seed)
        assert not found, "\n".join(found)
    except BaseException:
        (folder / "trace.sql").write_text("\n".join(application.trace))
        raise
    return application.statements, application.refused


def _turn(path: Path, log: Path, application: Application, dice: random.Random) -> None:
    """Work while nobody captures, while one does that stops, or one that is killed."""
    how = dice.choice(("down", "running", "running", "killed"))
    application.trace.append(f"-- {how}")
    steps = dice.randint(1, 12)
    if how == "running":
        with Log.open(log) as opened, closing(apsw.Connection(str(path))) as connection:
            connection.set_busy_timeout(30_000)
            feed = Captured(path, opened)
            feed.start()
            try:
                if dice.random() < 0.5:
                    feed.catch_up()
                    alter_by_command(path, dice)
                application.work(connection, steps)
            finally:
                feed.capture.stop()
        return
    command = [sys.executable, "-m", "tests.sources.litecaptor", str(path), str(log)]
    captor = None
    if how == "killed":
        captor = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)
        time.sleep(dice.random() * 2)  # so that it dies at any moment of its start
    try:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as other:
            application.work(other, steps)
    finally:
        if captor is not None:
            captor.kill()
            captor.communicate()


def main() -> None:
    """Run seeds, each in a folder of its own; the first that fails stays."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=1)
    given = parser.parse_args()
    for seed in range(given.first, given.first + given.seeds):
        folder = Path(tempfile.mkdtemp(prefix=f"sqlite-ddl-{seed}-"))
        try:
            ran, refused = run_seed(seed, folder)
        except BaseException as error:
            sys.stdout.write(f"seed {seed}: {type(error).__name__} in {folder}\n")
            raise
        sys.stdout.write(f"seed {seed}: {ran} statements, {refused} refused, equal\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
