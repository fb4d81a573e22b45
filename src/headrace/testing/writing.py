"""Tables that a contract's tests write to, in statements that all SQL databases share."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .processes import wait_until
from .reading import PATIENCE, Place, Session, session

_COLUMNS = "(id integer PRIMARY KEY, name varchar(200), amount bigint)"
_WRITERS = 3
_KEYS = 40  # so few that writers meet


def create(place: Place, table: str, *, rows: int = 0) -> None:
    """A table with the rows 1 … `rows`."""
    with session(place) as writer:
        writer.execute(f"CREATE TABLE {table} {_COLUMNS}")
    place.altered()
    with session(place) as writer:
        fill(writer, table, rows)


def fill(writer: Session, table: str, rows: int) -> None:
    """Insert the rows from 1 on."""
    for start in range(1, rows + 1, 500):
        numbers = range(start, min(start + 500, rows + 1))
        values = ", ".join(f"({number}, 'row {number}', {number})" for number in numbers)
        writer.execute(f"INSERT INTO {table} VALUES {values}")


def write(place: Place, statement: str) -> None:
    """Run one statement as a transaction of its own."""
    with session(place) as writer:
        writer.execute(statement)


def alter(place: Place, statement: str) -> None:
    """Change a table's columns."""
    write(place, statement)
    place.altered()


@contextmanager
def writers(place: Place, *tables: str) -> Iterator[Callable[[], None]]:
    """Sessions that write until the block ends; gives a function that waits for some more."""
    ending = threading.Event()
    done = [0] * _WRITERS
    refused: list[str] = []

    def write(number: int) -> None:
        dice = random.Random(number)
        writer = place.connect()
        try:
            while not ending.is_set():
                try:
                    for _ in range(dice.randint(1, 4)):
                        writer.execute(_statement(dice, dice.choice(tables), number, done[number]))
                        done[number] += 1
                    (writer.rollback if dice.random() < 0.1 else writer.commit)()
                except Exception as error:  # noqa: BLE001 - two that meet; each database's own words
                    refused.append(str(error))
                    writer.rollback()
                ending.wait(0.005)
        finally:
            writer.close()

    def progress() -> None:
        aim = [count + 10 for count in done]
        wait_until(
            lambda: all(count >= at for count, at in zip(done, aim, strict=True)),
            timeout=PATIENCE,
            message=f"the writers write, although they were told {refused[-1:]}",
        )

    threads = [threading.Thread(target=write, args=(number,)) for number in range(_WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield progress
    finally:
        ending.set()
        for thread in threads:
            thread.join()


def _statement(dice: random.Random, table: str, writer: int, done: int) -> str:
    key = dice.randint(1, _KEYS)
    fresh = 10_000 + done * _WRITERS + writer  # a key that nobody else has
    return dice.choice(
        (
            f"INSERT INTO {table} VALUES ({fresh}, 'new {fresh}', {key})",
            f"UPDATE {table} SET name = 'by {writer}', amount = {done} WHERE id = {key}",
            f"UPDATE {table} SET amount = amount + 1 WHERE id BETWEEN {key} AND {key + 5}",
            f"UPDATE {table} SET id = {fresh} WHERE id = {key}",
            f"DELETE FROM {table} WHERE id = {10_000 + dice.randint(0, done * _WRITERS)}",
        )
    )
