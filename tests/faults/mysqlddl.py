"""Random DDL of every kind on MariaDB, with rows and kills; then log and database are compared.

python -m tests.faults.mysqlddl --seeds 20 [--first 0] [--statements 60]

All statements of a seed are the same in each run; what the server refuses is part of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pymysql

from headrace.change.replay import Replay, TableName
from headrace.log import LogReader
from headrace.testing.mariadb import MariadbServer
from headrace.testing.mysql import MysqlDatabase, MysqlServer
from tests.everywhere import differences_everywhere
from tests.faults.mysqlcapturing import Captor, catch_up
from tests.sources.mycapturing import ordered, snapshot_rows

TABLES = ("oak", "elm", "ash")
_TEXTS = ("'a'", "'it''s'", "'é'", "''", "NULL", "'17'", "'x '", "'2020-02-03'")
_NUMBERS = ("0", "1", "-7", "3", "NULL", "120", "'5'", "1.5")
_TYPES: dict[str, tuple[str, ...]] = {
    "int": (*_NUMBERS, "(1 + 2)"),
    "bigint unsigned": ("0", "18446744073709551615", "NULL"),
    "smallint": _NUMBERS,
    "tinyint(1)": ("0", "1", "TRUE", "-7", "5", "NULL"),
    "decimal(10,2)": (*_NUMBERS, "-0.05"),
    "double": ("0", "1.5", "-2e3", "NULL"),
    "float": ("0", "0.1", "NULL"),
    "varchar(20)": (*_TEXTS, "(concat('a', 'b'))", "(uuid())"),
    "varchar(20) CHARACTER SET latin1": _TEXTS,
    "char(8)": _TEXTS,
    "text": _TEXTS,
    "blob": ("x'00ff'", "''", "NULL"),
    "binary(3)": ("x'01'", "NULL"),
    "date": ("'2020-02-03'", "NULL"),
    "datetime(3)": ("'2020-02-03 04:05:06.7'", "NULL", "CURRENT_TIMESTAMP(3)"),
    "timestamp NULL": ("'2020-02-03 04:05:06'", "NULL", "CURRENT_TIMESTAMP"),
    "timestamp": ("'2020-02-03 04:05:06'", "CURRENT_TIMESTAMP"),
    "time(2)": ("'01:02:03.4'", "NULL"),
    "year": ("2020", "NULL"),
    "bit(5)": ("b'101'", "NULL"),
    "enum('a','b','it''s')": ("'a'", "'it''s'", "NULL"),
    "enum('b','a')": ("'a'", "NULL"),
    "set('a','b')": ("'a,b'", "''", "NULL"),
    "json": ("'{}'", "NULL"),
}
_ACTIONS = ("CASCADE", "SET NULL", "RESTRICT")
_FAMILY = """
    CREATE TABLE root (id int PRIMARY KEY, n int);
    CREATE TABLE stem (id int PRIMARY KEY, root int, n int, INDEX (root), CONSTRAINT f FOREIGN KEY
        (root) REFERENCES root (id) ON DELETE CASCADE ON UPDATE CASCADE);
    CREATE TABLE leaf (id int PRIMARY KEY, stem int, n int, CONSTRAINT g FOREIGN KEY (stem)
        REFERENCES stem (id) ON DELETE CASCADE ON UPDATE SET NULL);
    INSERT INTO root SELECT seq, seq FROM seq_1_to_30;
    INSERT INTO stem SELECT seq, seq MOD 30 + 1, seq FROM seq_1_to_60;
    INSERT INTO leaf SELECT seq, seq MOD 60 + 1, seq FROM seq_1_to_90"""
_NAMES = ("n", "s", "v", "w", "Größe", "order")
_MODES = ("''", "'STRICT_TRANS_TABLES'", "'ANSI_QUOTES'", "DEFAULT")


class Forest:
    """A session that alters and writes; every choice follows from the seed."""

    def __init__(self, database: MysqlDatabase, seed: int) -> None:
        self._database = database
        self._dice = Random(seed)
        self.statements: list[str] = []
        for table in TABLES:
            self._create(table)
        database.execute(_FAMILY)

    def act(self) -> None:
        """Some DDL and some rows, in a new session."""
        with closing(self._database.connect()) as connection, connection.cursor() as cursor:
            self._try(cursor, f"SET sql_mode = {self._dice.choice(_MODES)}")
            for _ in range(self._dice.randint(1, 3)):
                for statement in self._ddl(cursor):
                    self._try(cursor, statement)
                for _ in range(self._dice.choice((0, 0, 1, 4))):
                    self._try(cursor, self._row(cursor))
            connection.commit()

    def _try(self, cursor: Any, statement: str) -> None:
        try:
            cursor.execute(statement)
            self.statements.append(statement)
        except pymysql.MySQLError as error:
            if error.args[0] in (2006, 2013):
                raise

    def _create(self, table: str) -> None:
        partitions = (
            "PARTITION BY RANGE (id) (PARTITION p0 VALUES LESS THAN (20), PARTITION p1 VALUES LESS"
            " THAN (40), PARTITION p2 VALUES LESS THAN MAXVALUE)"
        )
        key = {"oak": "id int PRIMARY KEY", "elm": "id int"}.get(table, "id int PRIMARY KEY")
        tail = partitions if table == "ash" else ""
        self._database.execute(
            f"CREATE OR REPLACE TABLE {table} ({key}, n int, s varchar(20)) {tail}; "
            f"INSERT INTO {table} SELECT seq, seq, concat('s', seq) FROM seq_1_to_30"
        )
        self.statements.append(f"-- created {table}")

    def _columns(self, cursor: Any, table: str) -> dict[str, str]:
        cursor.execute(
            "SELECT COLUMN_NAME, COLUMN_TYPE FROM information_schema.COLUMNS "
            "WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = %s ORDER BY ORDINAL_POSITION",
            (table,),
        )
        return dict(cursor.fetchall())

    def _ddl(self, cursor: Any) -> list[str]:
        dice, table = self._dice, self._dice.choice(TABLES)
        columns = list(self._columns(cursor, table))
        if not columns:
            self._create(table)
            return []
        if dice.random() < 0.75:
            clauses = [self._clause(columns) for _ in range(dice.choice((1, 1, 1, 2, 3)))]
            ignore = "IGNORE " if dice.random() < 0.05 else ""
            return [f"ALTER {ignore}TABLE {table} {', '.join(clauses)}"]
        return dice.choice(
            (
                [f"TRUNCATE {table}"],
                [f"DROP TABLE {table}"],
                [f"CREATE OR REPLACE TABLE {table} (id int PRIMARY KEY, n int, s varchar(9))"],
                [f"CREATE TABLE new_{table} LIKE {table}", f"ALTER TABLE new_{table} ADD z int",
                 f"INSERT INTO new_{table} SELECT *, 1 FROM {table}",
                 f"RENAME TABLE {table} TO old_{table}, new_{table} TO {table}",
                 f"DROP TABLE old_{table}"],
                [f"RENAME TABLE {table} TO away", "INSERT INTO away (id) VALUES (-5)",
                 f"RENAME TABLE away TO {table}"],
                [f"CREATE TABLE spare LIKE {table}", "ALTER TABLE spare REMOVE PARTITIONING",
                 f"ALTER TABLE {table} EXCHANGE PARTITION p0 WITH TABLE spare",
                 "DROP TABLE spare"],
                [f"CREATE INDEX i{dice.randrange(3)} ON {table} (n)"],
                [f"DROP INDEX i{dice.randrange(3)} ON {table}"],
                [f"DROP INDEX `PRIMARY` ON {table}"],
                [f"CREATE OR REPLACE TABLE {table} AS SELECT id, n, s FROM {table}"],
            )
        )  # fmt: skip

    def _clause(self, columns: list[str]) -> str:
        dice = self._dice
        column, other = f"`{dice.choice(columns)}`", f"`{dice.choice(_NAMES)}`"
        definition = self._definition()
        place = dice.choice(("", "", " FIRST", f" AFTER {column}"))
        if dice.random() < 0.35:
            exists = dice.choice(("", "", " IF NOT EXISTS"))
            return f"ADD COLUMN{exists} {other} {definition}{place}"
        return dice.choice(
            (
                f"ADD ({other} {definition})",
                f"DROP COLUMN {column}",
                f"DROP COLUMN IF EXISTS {other}",
                f"DROP COLUMN {column}, ADD COLUMN {column} {definition}",
                f"RENAME COLUMN {column} TO {other}",
                f"CHANGE {column} {other} {definition}{place}",
                f"CHANGE COLUMN {column} {other} varchar(40)",
                f"MODIFY {column} {definition}{place}",
                f"MODIFY COLUMN n {dice.choice(('int', 'bigint', 'int NOT NULL', 'varchar(9)'))}",
                f"MODIFY s varchar({dice.randint(5, 40)}) {dice.choice(('', 'NOT NULL', 'NULL'))}",
                f"ALTER COLUMN {column} SET DEFAULT {dice.choice(_NUMBERS)}",
                f"ALTER {column} DROP DEFAULT",
                f"ADD COLUMN {other} int AS (id + 1) {dice.choice(('STORED', 'VIRTUAL'))}",
                f"ADD COLUMN {other} int AUTO_INCREMENT UNIQUE",
                f"MODIFY id {dice.choice(('int', 'bigint', 'int AUTO_INCREMENT', 'smallint'))}",
                "ADD PRIMARY KEY (id)",
                "DROP PRIMARY KEY",
                "DROP PRIMARY KEY, ADD PRIMARY KEY (id, n)",
                "ADD COLUMN k int AUTO_INCREMENT PRIMARY KEY",
                f"ADD UNIQUE ({column})",
                f"ADD INDEX ({column})",
                f"CONVERT TO CHARACTER SET {dice.choice(('latin1', 'utf8mb4'))}",
                f"DEFAULT CHARACTER SET {dice.choice(('latin1', 'utf8mb4'))}",
                f"ENGINE = {dice.choice(('InnoDB', 'Aria'))}",
                "ORDER BY n",
                "FORCE",
                "COMMENT = 'it''s, DROP COLUMN n'",
                "DROP PARTITION p1",
                "TRUNCATE PARTITION p0",
                "REMOVE PARTITIONING",
                "AUTO_INCREMENT = 500",
            )
        )

    def _definition(self) -> str:
        kind = self._dice.choice(list(_TYPES))
        parts = [kind]
        if self._dice.random() < 0.3:
            parts.append("NOT NULL")
        if self._dice.random() < 0.6:
            parts.append(f"DEFAULT {self._dice.choice(_TYPES[kind])}")
        if self._dice.random() < 0.2:
            parts.append("COMMENT 'x, y'")
        return " ".join(parts)

    def _relative(self) -> str:
        """A change of tables whose foreign keys act."""
        dice = self._dice
        key, other, table = (*dice.choices(range(1, 40), k=2), dice.choice(("root", "stem")))
        deleting, updating = dice.choices(_ACTIONS, k=2)
        acts = f"ON DELETE {deleting} ON UPDATE {updating}"
        return dice.choice(
            (
                f"DELETE FROM {table} WHERE id = {key}",
                f"DELETE FROM {table} WHERE id > {key} LIMIT 2",
                f"UPDATE IGNORE {table} SET id = {other} WHERE id = {key}",
                f"UPDATE IGNORE {table} SET id = id + 40, n = {key} WHERE id > {key} LIMIT 2",
                f"INSERT IGNORE INTO root VALUES ({key}, {other})",
                f"INSERT IGNORE INTO stem VALUES ({key}, {other}, {other})",
                f"REPLACE INTO {table} (id, n) VALUES ({key}, {other})",
                f"INSERT IGNORE INTO leaf VALUES ({key}, {other}, {key})",
                f"UPDATE IGNORE stem SET root = {other} WHERE id = {key}",
                f"UPDATE IGNORE leaf SET stem = {other} WHERE id = {key}",
                "ALTER TABLE stem DROP FOREIGN KEY f",
                "ALTER TABLE stem DROP FOREIGN KEY f, ADD CONSTRAINT f FOREIGN KEY (root)"
                f" REFERENCES root (id) {acts}",
            )
        )

    def _row(self, cursor: Any) -> str:
        if self._dice.random() < 0.3:
            return self._relative()
        dice, table = self._dice, self._dice.choice(TABLES)
        columns = [name for name in self._columns(cursor, table) if name != "id"]
        if not columns:
            return "DO 1"
        column = f"`{dice.choice(columns)}`"
        value = dice.choice((*_TEXTS, *_NUMBERS))
        key = dice.randint(1, 60)
        return dice.choice(
            (
                f"INSERT INTO {table} (id, {column}) VALUES ({key}, {value})",
                f"INSERT IGNORE INTO {table} (id, {column}) VALUES ({key}, {value})",
                f"REPLACE INTO {table} (id, {column}) VALUES ({key}, {value})",
                f"UPDATE IGNORE {table} SET {column} = {value} WHERE id > {key} LIMIT 5",
                f"UPDATE IGNORE {table} SET id = id + 7 WHERE id = {key}",
                f"DELETE FROM {table} WHERE id = {key}",
                f"DELETE FROM {table} WHERE id > {key} LIMIT 2",
            )
        )


def run(server: MysqlServer, seed: int, statements: int, folder: Path) -> list[str]:
    """One seed; the differences."""
    dice = Random(f"{seed}-kills")
    data_dir = folder / "log"
    with server.database() as database:
        forest = Forest(database, seed)
        captor = Captor(database, data_dir)
        while len(forest.statements) < statements:
            forest.act()
            if dice.random() < 0.08:
                captor.expect_running()
                captor.kill()
                for _ in range(dice.randrange(4)):
                    forest.act()
                captor = Captor(database, data_dir)
            if dice.random() < 0.1:
                catch_up(database, data_dir, captor)
        catch_up(database, data_dir, captor)
        captor.stop()
        with LogReader.open(data_dir) as log:
            replay = Replay.of(log.read(0, limit=1 << 30))
        expected = snapshot_rows(database, folder / "other")
        found = [f"surprise: {each}" for each in replay.surprises]
        for name in sorted({*expected, *(each.name for each in replay.tables)}):
            rows = ordered(replay.rows(TableName("faults", database.name, name)))
            if rows != expected.get(name, []):
                found.append(f"{name}: log {_few(rows)} database {_few(expected.get(name, []))}")
        found = found or differences_everywhere(data_dir, folder / "lake", seed)
        return found and [*found, *forest.statements]


def _few(rows: list[dict[str, Any]]) -> str:
    return f"{len(rows)} rows {rows[:3]}"


def main() -> int:
    """Run seeds; 1: one of them differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--statements", type=int, default=60)
    options = parser.parse_args()
    different = 0
    with MariadbServer() as server:
        for seed in range(options.first, options.first + options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                found = run(server, seed, options.statements, Path(folder))
            different += bool(found)
            sys.stdout.write(f"seed {seed}: {'DIFFERS' if found else 'equal'}\n")
            sys.stdout.writelines(f"    {line}\n" for line in found)
            sys.stdout.flush()
    sys.stdout.write(f"{options.seeds} seeds, {different} differ\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
