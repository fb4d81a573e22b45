"""Writers of MySQL and MariaDB that meet, roll back, alter, rename and empty tables."""

from __future__ import annotations

import threading
from contextlib import closing, suppress
from random import Random
from types import TracebackType
from typing import Any, Self

import pymysql

from headrace.testing import wait_until
from headrace.testing.mysql import MysqlDatabase

TABLES = ("alpha", "beta", "gamma")
_WRITERS = 3
_KEYS = 60  # so few that writers meet

COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "n": ("int", ("0", "-2147483648", "7", "NULL")),
    "u": ("bigint unsigned", ("18446744073709551615", "1")),
    "d": ("decimal(20,5)", ("-12345.67890", "0", "NULL")),
    "s": ("varchar(50)", ("'é 水 🌊'", "''", r"'\"\\\\'")),
    "l": ("varchar(20) CHARACTER SET latin1", ("'é€'", "NULL")),
    "b": ("blob", ("x'00ff'", "''")),
    "p": ("binary(3)", ("x'01'", "NULL")),
    "at": ("datetime(3)", ("'2024-02-29 23:59:59.999'", "NULL")),
    "ts": ("timestamp(6) NULL", ("'2030-01-01 00:00:00.000001'", "NULL")),
    "day": ("date", ("'1000-01-01'", "NULL")),
    "t": ("time(2)", ("'-838:59:59'", "'00:00:00.01'")),
    "y": ("year", ("1901", "0")),
    "e": ("enum('small','große')", ("'große'", "'small'")),
    "st": ("set('a','b','c')", ("''", "'a,c'")),
    "j": ("json", ("""'{"b": [1.50, null], "a": "x"}'""", "NULL")),
    "bits": ("bit(10)", ("b'1000000001'", "b'0'")),
    "f": ("float", ("0.1", "-1e30")),
    "g": ("double", ("0.1", "-1e300")),
    "bo": ("tinyint(1)", ("1", "0", "NULL")),
}


def create(database: MysqlDatabase, table: str) -> None:
    """One of the tables."""
    columns = ", ".join(f"`{name}` {kind}" for name, (kind, _) in COLUMNS.items())
    database.execute(f"CREATE TABLE IF NOT EXISTS {table} (id int PRIMARY KEY, {columns})")


class Workload:
    """Sessions that write, and one that alters."""

    def __init__(self, database: MysqlDatabase, seed: int) -> None:
        self._database = database
        self._seed = seed
        self._ending = threading.Event()
        self.done = [0] * (_WRITERS + 1)
        self.last_error = ""
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(_WRITERS + 1)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def progress(self, count: int = 5) -> None:
        """Wait until each has done some more."""
        aim = [done + count for done in self.done]
        try:
            wait_until(
                lambda: all(done >= at for done, at in zip(self.done, aim, strict=True)),
                timeout=240,
                message=f"the writers write: {self.done} of {aim}",
            )
        except TimeoutError as error:
            raise TimeoutError(f"{error}; {self.last_error}; {self._sessions()}") from error

    def _sessions(self) -> str:
        """Who waits for what on the server, for whoever reads a failed test."""
        looks = ("SHOW FULL PROCESSLIST", "XA RECOVER", "SHOW ENGINE INNODB STATUS")
        return "\n".join(f"{look}: {self._database.execute(look)}" for look in looks)

    def _run(self, number: int) -> None:
        dice = Random(f"{self._seed}-{number}")
        while not self._ending.is_set():
            try:
                connection = self._database.connect()
            except pymysql.MySQLError:
                self._ending.wait(0.05)
                continue
            with suppress(pymysql.MySQLError):
                _decide(connection, f"w{number}")
                connection.autocommit(False)
                self._write(connection, dice, number)
            with suppress(pymysql.MySQLError):
                connection.close()

    def _write(self, connection: pymysql.Connection[Any], dice: Random, number: int) -> None:
        while not self._ending.is_set() and connection.open:
            try:
                if number == _WRITERS:
                    _define(connection, dice)
                    self._ending.wait(0.05)
                else:
                    self._transaction(connection, dice, number)
                self.done[number] += 1
            except pymysql.MySQLError as error:
                self.last_error = str(error)
                return  # with a new session nothing is left of the old one
            self._ending.wait(0.002)

    def _transaction(self, connection: pymysql.Connection[Any], dice: Random, number: int) -> None:
        xid = f"'w{number}','{self.done[number]}'" if dice.random() < 0.1 else ""
        with connection.cursor() as cursor:
            if xid:
                connection.rollback()
                cursor.execute(f"XA START {xid}")
            for _ in range(dice.randint(1, 5)):
                cursor.execute(_statement(dice))
            if xid:
                cursor.execute(f"XA END {xid}")
                cursor.execute(f"XA PREPARE {xid}")
                cursor.execute(f"XA {dice.choice(['COMMIT', 'COMMIT', 'ROLLBACK'])} {xid}")
                return
        (connection.rollback if dice.random() < 0.1 else connection.commit)()


def _decide(connection: pymysql.Connection[Any], mine: str) -> None:
    """Undo XA transactions that were prepared in a session that is gone.

    Without autocommit, MariaDB refuses it: everything counts as part of a transaction.
    """
    with connection.cursor() as cursor:
        cursor.execute("XA RECOVER")
        for format_id, size, rest, name in cursor.fetchall():
            text = name if isinstance(name, str) else name.decode()
            if text.startswith(mine):
                xid = f"'{text[:size]}','{text[size : size + rest]}',{format_id}"
                cursor.execute(f"XA ROLLBACK {xid}")


def settle(database: MysqlDatabase) -> None:
    """Decide XA transactions that no writer will, and write a last row to each table.

    Where the catalogue may be ahead of the binary log, the columns that an ALTER TABLE left come
    with the next row (docs/mysql.md): without one, a capture that lags would never learn them.
    """
    with closing(database.connect()) as connection:
        _decide(connection, "")
    for table in TABLES:
        create(database, table)  # a writer may have ended between DROP and CREATE
        database.execute(f"INSERT INTO {table} (id) VALUES (-1)")


def _statement(dice: Random) -> str:
    table, key = dice.choice(TABLES), dice.randint(1, _KEYS)
    name = dice.choice(list(COLUMNS))
    value = dice.choice(COLUMNS[name][1])
    roll = dice.random()
    if roll < 0.45:
        picked = {name: value} | {
            other: dice.choice(values)
            for other, (_, values) in COLUMNS.items()
            if dice.random() < 0.5
        }
        names = ", ".join(f"`{each}`" for each in picked)
        return f"REPLACE INTO {table} (id, {names}) VALUES ({key}, {', '.join(picked.values())})"
    if roll < 0.75:
        return f"UPDATE {table} SET `{name}` = {value} WHERE id BETWEEN {key} AND {key + 3}"
    if roll < 0.85:
        return f"UPDATE IGNORE {table} SET id = {_KEYS + key} WHERE id = {key}"
    return f"DELETE FROM {table} WHERE id = {key}"


def _define(connection: pymysql.Connection[Any], dice: Random) -> None:
    """What DDL may do without changing the rows that stay."""
    table, name = dice.choice(TABLES), dice.choice(list(COLUMNS))
    columns = ", ".join(f"`{each}` {kind}" for each, (kind, _) in COLUMNS.items())
    with connection.cursor() as cursor:
        cursor.execute("SET lock_wait_timeout = 2")
        cursor.execute(f"CREATE TABLE IF NOT EXISTS {table} (id int PRIMARY KEY, {columns})")
        cursor.execute("DROP TABLE IF EXISTS gone, shadow")
        drop = [f"ALTER TABLE {table} DROP COLUMN `{name}`"] if _has(cursor, table, name) else []
        position = dice.choice(["FIRST", "AFTER id", ""])
        add = f"ALTER TABLE {table} ADD COLUMN `{name}` {COLUMNS[name][0]} {position}"
        cursor.execute("SELECT VERSION()")
        mariadb = "MariaDB" in str(cursor.fetchall())
        create = "CREATE OR REPLACE" if mariadb else f"DROP TABLE {table}; CREATE"
        statements = dice.choice(
            (
                drop or [add],
                [*drop, add],
                [f"TRUNCATE {table}"],
                [f"{create} TABLE {table} (id int PRIMARY KEY, {columns})"],
                [f"DROP TABLE {table}", f"CREATE TABLE {table} (id int PRIMARY KEY, {columns})"],
                [f"CREATE TABLE shadow LIKE {table}", f"INSERT INTO shadow SELECT * FROM {table}",
                 f"RENAME TABLE {table} TO gone, shadow TO {table}", "DROP TABLE gone"],
            )
        )  # fmt: skip
        for statement in statements:
            cursor.execute(statement)
    connection.commit()


def _has(cursor: Any, table: str, name: str) -> bool:
    cursor.execute(f"SHOW COLUMNS FROM {table} LIKE %s", (name,))
    return bool(cursor.fetchall())
