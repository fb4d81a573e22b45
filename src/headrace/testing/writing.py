"""Rows that a contract's tests write: what a database must be able to do, and SQL that does it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from .processes import wait_until

PATIENCE = 60.0  # seconds; far more than anything here takes
_WRITERS = 3
_KEYS = 40  # so few that writers meet


@dataclass(frozen=True, slots=True)
class Value:
    """A column's type and a value of it, both as the database writes them, and its JSON."""

    type: str
    literal: Any  # SQL's text for it; where there is no SQL, what `RowWriter.insert` takes
    json: str


class Session(Protocol):
    """A connection to a place; a transaction begins with its first statement."""

    def execute(self, statement: str) -> Sequence[tuple[Any, ...]]:
        """Run one statement, and give its rows if it has any."""
        ...

    def commit(self) -> None:
        """End the transaction."""
        ...

    def rollback(self) -> None:
        """End the transaction as if it had never been."""
        ...

    def close(self) -> None:
        """Let go of the database; what was not committed is undone."""
        ...


class RowWriter(Protocol):
    """Tables and rows in one session's transaction; each table has an integer key `id`."""

    def create(self, table: str, types: Mapping[str, str] | None = None) -> None:
        """A table with columns of these types; None: `name`, a text, and `amount`, 64 bits."""
        ...

    def add_column(self, table: str, name: str) -> None:
        """Add a column of text."""
        ...

    def drop_column(self, table: str, name: str) -> None:
        """Remove a column."""
        ...

    def insert(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Insert rows, of numbers, texts, None and `Value`s."""
        ...

    def update(self, table: str, ids: Iterable[int], values: Mapping[str, Any]) -> None:
        """Change some columns of some rows."""
        ...

    def delete(self, table: str, ids: Iterable[int] | None = None) -> None:
        """Delete some rows, or all."""
        ...

    def truncate(self, table: str) -> None:
        """Empty a table the way that its database has for it."""
        ...

    def rows(self, table: str) -> list[dict[str, Any]]:
        """`id`, `name` and `amount` of all rows, by `id`."""
        ...

    def savepoint(self) -> None:
        """Begin a part of the transaction that `undo` undoes."""
        ...

    def undo(self) -> None:
        """Undo what was written since `savepoint`."""
        ...


class SqlWriter:
    """The same in statements that all SQL databases share."""

    def __init__(self, session: Session, *, truncate: str = "TRUNCATE TABLE {}") -> None:
        self._execute = session.execute
        self._truncate = truncate

    def create(self, table: str, types: Mapping[str, str] | None = None) -> None:
        """A table with columns of these types."""
        if types is None:
            types = {"name": "varchar(200)", "amount": "bigint"}
        columns = "".join(f", {name} {type_}" for name, type_ in types.items())
        self._execute(f"CREATE TABLE {table} (id integer PRIMARY KEY{columns})")

    def add_column(self, table: str, name: str) -> None:
        """Add a column of text."""
        self._execute(f"ALTER TABLE {table} ADD COLUMN {name} varchar(20)")

    def drop_column(self, table: str, name: str) -> None:
        """Remove a column."""
        self._execute(f"ALTER TABLE {table} DROP COLUMN {name}")

    def insert(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Insert rows with one statement; all have the columns of the first."""
        given = list(rows)
        values = ", ".join(f"({', '.join(map(_sql, row.values()))})" for row in given)
        self._execute(f"INSERT INTO {table} ({', '.join(given[0])}) VALUES {values}")

    def update(self, table: str, ids: Iterable[int], values: Mapping[str, Any]) -> None:
        """Change some columns of some rows with one statement."""
        changes = ", ".join(f"{name} = {_sql(value)}" for name, value in values.items())
        self._execute(f"UPDATE {table} SET {changes}{_where(ids)}")

    def delete(self, table: str, ids: Iterable[int] | None = None) -> None:
        """Delete some rows, or all, with one statement."""
        self._execute(f"DELETE FROM {table}{'' if ids is None else _where(ids)}")

    def truncate(self, table: str) -> None:
        """Empty a table."""
        self._execute(self._truncate.format(table))

    def rows(self, table: str) -> list[dict[str, Any]]:
        """`id`, `name` and `amount` of all rows, by `id`."""
        names = ("id", "name", "amount")
        found = self._execute(f"SELECT {', '.join(names)} FROM {table} ORDER BY id")
        return [dict(zip(names, row, strict=True)) for row in found]

    def savepoint(self) -> None:
        """Begin a part of the transaction."""
        self._execute("SAVEPOINT a")

    def undo(self) -> None:
        """Undo what was written since `savepoint`."""
        self._execute("ROLLBACK TO SAVEPOINT a")


def _where(ids: Iterable[int]) -> str:
    return f" WHERE id IN ({', '.join(map(str, ids))})"


def _sql(value: Any) -> str:
    """A value as SQL writes it."""
    if isinstance(value, Value):
        return str(value.literal)
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return "NULL" if value is None else str(value)


def fill(writer: RowWriter, table: str, rows: int) -> None:
    """Insert the rows from 1 on."""
    for start in range(1, rows + 1, 500):
        numbers = range(start, min(start + 500, rows + 1))
        writer.insert(table, [_row(number, f"row {number}", number) for number in numbers])


@contextmanager
def writers(
    connect: Callable[[], tuple[Session, RowWriter]], *tables: str, keys_change: bool = True
) -> Iterator[Callable[[], None]]:
    """Sessions that write until the block ends; gives a function that waits for some more."""
    ending = threading.Event()
    done = [0] * _WRITERS
    refused: list[str] = []

    def write(number: int) -> None:
        dice = random.Random(number)
        session, writer = connect()
        try:
            while not ending.is_set():
                try:
                    for _ in range(dice.randint(1, 4)):
                        table = dice.choice(tables)
                        dice.choice(_acts(dice, number, done[number], keys_change))(writer, table)
                        done[number] += 1
                    (session.rollback if dice.random() < 0.1 else session.commit)()
                except Exception as error:  # noqa: BLE001 - two that meet; each database's own words
                    refused.append(str(error))
                    session.rollback()
                ending.wait(0.005)
        finally:
            session.close()

    def progress() -> None:
        aim = [count + 10 for count in done]
        wait_until(
            lambda: all(count >= at for count, at in zip(done, aim, strict=True)),
            timeout=PATIENCE,
            message=f"the writers write, although they got {refused[-1:]}",
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


_Act = Callable[[RowWriter, str], None]


def _acts(dice: random.Random, writer: int, done: int, keys_change: bool) -> list[_Act]:
    key = dice.randint(1, _KEYS)
    fresh = 10_000 + done * _WRITERS + writer  # a key that nobody else has
    former = 10_000 + dice.randint(0, done * _WRITERS)
    acts: list[_Act] = [
        lambda rows, table: rows.insert(table, [_row(fresh, f"new {fresh}", key)]),
        lambda rows, table: rows.update(table, [key], {"name": f"by {writer}", "amount": done}),
        lambda rows, table: rows.update(table, range(key, key + 6), {"amount": done + 1}),
        lambda rows, table: rows.delete(table, [former]),
    ]
    if keys_change:
        acts.append(lambda rows, table: rows.update(table, [key], {"id": fresh}))
    return acts


def _row(number: int, name: str, amount: int) -> dict[str, Any]:
    return {"id": number, "name": name, "amount": amount}
