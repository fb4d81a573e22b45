"""Transactions made up for the log's tests."""

from collections.abc import Sequence

from headrace.change.event import Batch, Change, Op, Table, Transaction
from headrace.log import Log
from headrace.sources.postgres.position import PostgresPosition
from tests.changes import make_change, make_table

SOURCE = "shop"


def known_table(log: Log, name: str = "users") -> Table:
    """A table that the log knows."""
    return log.register(make_table(name))


def transaction(
    table: Table, number: int, size: int = 1, *, captured_at: int = 0, start: int = 1
) -> list[Change]:
    """A transaction of so many inserts; `start` is the ordinal of the first."""
    return [
        make_change(
            Op.INSERT,
            table=table,
            key={"id": f"{number}-{ordinal}"},
            after={"id": f"{number}-{ordinal}", "name": "x" * (ordinal % 7)},
            transaction=Transaction(str(number), number, captured_at or number),
            position=PostgresPosition(number * 100, number * 100 - 50 + ordinal),
            ordinal=ordinal,
            last=ordinal == start + size - 1,
            sequence=0,
        )
        for ordinal in range(start, start + size)
    ]


def stored(log: Log, number: int, size: int = 1, *, source: str = SOURCE) -> int:
    """Append a whole transaction; its resume is its number."""
    changes = transaction(known_table(log), number, size)
    return log.append(source, Batch(changes, b"%d" % number))


def piece(log: Log, number: int, size: int, *, source: str = SOURCE, start: int = 1) -> None:
    """Append a piece of a transaction that goes on."""
    changes = transaction(known_table(log), number, size, start=start)
    log.append(source, Batch(changes, None))


def ids(changes: Sequence[Change]) -> list[tuple[str, int]]:
    """Transaction and ordinal of each change."""
    return [(change.transaction.id, change.ordinal) for change in changes]


def sequences(log: Log) -> list[int]:
    """The sequences that the log holds."""
    return [change.sequence for change in log.read(0, limit=100_000)]
