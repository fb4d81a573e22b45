"""DDL beside a workload of PostgreSQL: tables that are altered, renamed, dropped and made anew.

All of it follows from a seed. What the server refuses (no such table, a lock not had in time) is
part of it. Columns are added without a default: a default is in old rows without anybody telling.
"""

import threading
from collections.abc import Callable
from random import Random
from types import TracebackType
from typing import Any, Self

import psycopg

from headrace.testing import PostgresDatabase, wait_until

Connection = psycopg.Connection[tuple[Any, ...]]
Act = Callable[[Connection, Random], None]

NAMES = ("spring", "summer", "autumn")
TYPES = {
    "integer": "7",
    "numeric": "1.50",
    "text": "'é \"'",
    "timestamptz": "now()",
    "jsonb": """'{"a": [1.0, null]}'""",
}


class Alterations:
    """One session that alters tables, and two that write to them, from entering to leaving."""

    def __init__(self, database: PostgresDatabase, seed: int) -> None:
        self._database = database
        self._seed = seed
        self._ending = threading.Event()
        self.altered = 0
        self._number = 0
        acts = (self._alter, self._write, self._write)
        self._threads = [
            threading.Thread(target=self._run, args=(at, act)) for at, act in enumerate(acts)
        ]
        for name in NAMES:
            database.execute(_create(name, "integer"))

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

    def wait_for_more(self, count: int) -> None:
        """Wait until so many more alterations are committed."""
        enough = self.altered + count
        wait_until(lambda: self.altered >= enough, timeout=120, message="tables are altered")

    def settle(self) -> list[str]:
        """Write to every table that there is now, and name them: their columns are told then."""
        found = self._database.execute(
            "SELECT tablename::text FROM pg_tables WHERE tablename ~ %s ORDER BY 1",
            (f"^({'|'.join(NAMES)})",),
        )
        for (table,) in found:
            self._database.execute(f"INSERT INTO {table} (id) VALUES (-1)")
        return [table for (table,) in found]

    def _run(self, number: int, act: Act) -> None:
        dice = Random(f"{self._seed}-alterations-{number}")
        with psycopg.connect(self._database.url) as connection:
            connection.execute("SET lock_timeout = '300ms'")
            connection.commit()
            while not self._ending.wait(dice.uniform(0, 0.03)):
                try:
                    act(connection, dice)
                    if dice.random() < 0.15:
                        connection.rollback()
                    else:
                        connection.commit()
                        self.altered += number == 0
                except psycopg.Error:
                    connection.rollback()

    def _alter(self, connection: Connection, dice: Random) -> None:
        table, kind = dice.choice(NAMES), dice.choice(list(TYPES))
        self._number += 1
        column = f"c{dice.randrange(3)}"
        self._write(connection, dice)
        statements = dice.choice(
            (
                (f"ALTER TABLE {table} ADD COLUMN {column} {kind}",
                 f"UPDATE {table} SET {column} = {TYPES[kind]} WHERE id % 2 = 0"),
                (f"ALTER TABLE {table} DROP COLUMN {column}",),
                (f"ALTER TABLE {table} ALTER amount TYPE bigint",),
                (f"DROP TABLE {table}", _create(table, kind)),
                (f"DROP TABLE IF EXISTS {table}_gone",
                 f"ALTER TABLE {table} RENAME TO {table}_gone",
                 f"INSERT INTO {table}_gone (id) VALUES (-{self._number})", _create(table, kind)),
                (f"ALTER TABLE {table} RENAME TO {table}_away",
                 f"INSERT INTO {table}_away (id) VALUES (-{self._number})",
                 f"ALTER TABLE {table}_away RENAME TO {table}"),
                (f"TRUNCATE {table}",),
            )
        )  # fmt: skip
        for statement in statements:
            connection.execute(statement.encode())
        connection.execute(f"INSERT INTO {table} (id) VALUES ({-1000 - self._number})".encode())

    def _write(self, connection: Connection, dice: Random) -> None:
        for _ in range(dice.randrange(1, 4)):
            table, key = dice.choice(NAMES), dice.randrange(60)
            statement = dice.choice(
                (
                    f"INSERT INTO {table} (id, amount) VALUES ({key}, 1) ON CONFLICT DO NOTHING",
                    f"UPDATE {table} SET amount = {key} WHERE id BETWEEN {key} AND {key + 4}",
                    f"UPDATE {table} SET id = {key + 100} WHERE id = {key}",
                    f"DELETE FROM {table} WHERE id IN ({key}, {key + 100})",
                )
            )
            connection.execute(statement.encode())


def _create(table: str, kind: str) -> str:
    return f"CREATE TABLE {table} (id int PRIMARY KEY, amount int, kind {kind}, c0 text)"
