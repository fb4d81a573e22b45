"""Tables to copy, and sessions that write to them meanwhile."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
from psycopg.errors import DeadlockDetected, UniqueViolation

from headrace.testing import PostgresDatabase, wait_until

# Large enough, and hard enough to compress, that updates do not send it again.
BIG: LiteralString = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 300) n)"


def create(database: PostgresDatabase, *tables: str, rows: int = 0) -> None:
    """Plain tables with a key, each with the rows 1 … `rows`."""
    for table in tables:
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, name text, big text)")
        database.execute(
            f"INSERT INTO {table} SELECT n, 'row ' || n FROM generate_series(1, {rows}) n"
        )


@contextmanager
def writers(database: PostgresDatabase, *tables: str) -> Iterator[Callable[[], None]]:
    """Sessions that insert, update, delete and move rows until the block ends.

    Gives a function that waits until each has committed some more.
    """
    ending = threading.Event()
    counts = [0] * len(tables)
    failures: list[BaseException] = []

    def write(at: int, table: str) -> None:
        rng = random.Random(at)
        try:
            with database.connect(autocommit=False) as connection:
                while not ending.is_set():
                    try:
                        for _ in range(rng.randint(1, 4)):
                            connection.execute(*_statement(rng, table))
                        (connection.rollback if rng.random() < 0.1 else connection.commit)()
                    except (DeadlockDetected, UniqueViolation):
                        connection.rollback()  # two writers of one table met
                    counts[at] += 1
        except psycopg.Error as error:
            failures.append(error)

    def progress() -> None:
        aim = [count + 20 for count in counts]
        wait_until(
            lambda: failures or all(c >= a for c, a in zip(counts, aim, strict=True)),
            message="the writers write",
        )

    threads = [
        threading.Thread(target=write, args=(at, table), daemon=True)
        for at, table in enumerate(tables)
    ]
    for thread in threads:
        thread.start()
    try:
        progress()
        yield progress
    finally:
        ending.set()
        for thread in threads:
            thread.join()
    assert failures == []


def _statement(rng: random.Random, table: str) -> tuple[LiteralString, tuple[Any, ...]]:
    key = rng.randint(1, 3000)
    kinds: list[tuple[str, tuple[Any, ...]]] = [
        (f"INSERT INTO {table} VALUES (%s, 'new') ON CONFLICT DO NOTHING", (key,)),
        (f"UPDATE {table} SET name = name || '+' WHERE id = %s", (key,)),
        (f"UPDATE {table} SET big = {BIG} WHERE id = %s", (key,)),
        (f"DELETE FROM {table} WHERE id = %s", (key,)),
        (
            f"UPDATE {table} SET id = -id WHERE id = %s"
            f" AND NOT EXISTS (SELECT FROM {table} WHERE id = %s)",
            (key, -key),
        ),
    ]
    return rng.choice(kinds)
