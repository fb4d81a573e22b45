"""Blocks of rows made up for the log's tests, and the changes that they stand for."""

from collections.abc import Sequence

from headrace.change import block, record
from headrace.change.event import Batch, BeforeKind, Change, Op, Table, Transaction
from headrace.change.printed import Printed
from headrace.log import Log
from headrace.sources.postgres.position import PostgresPosition
from tests.log.transactions import SOURCE, known_table


def rows(table: Table, number: int, size: int, *, captured_at: int = 0) -> list[Change]:
    """A batch of a snapshot, as changes."""
    shared = Transaction(f"snapshot-{number}", number, captured_at or number)
    return [
        Change(
            Op.READ,
            table,
            b'{"id":"%d-%d"}' % (number, ordinal),
            None,
            BeforeKind.NONE,
            b'{"id":"%d-%d","name":"%b"}' % (number, ordinal, b"x" * (ordinal % 7)),
            None,
            (),
            shared,
            ordinal,
            PostgresPosition(number * 100, number * 100, number * 100 * (ordinal == size)),
            ordinal == size,
        )
        for ordinal in range(1, size + 1)
    ]


def as_block(changes: Sequence[Change], table: Table, number: int) -> record.Records:
    """The same batch as a block."""
    size = len(changes)
    values = [b"%d-%d" % (number, ordinal) for ordinal in range(1, size + 1)]
    names = [b"x" * (ordinal % 7) for ordinal in range(1, size + 1)]
    columns = [block.column_text(each, Printed.TEXT) for each in (values, names)]
    value = block.pack(
        table,
        changes[0].transaction,
        (changes[0].position if size > 1 else changes[-1].position, changes[-1].position),
        [column for column in columns if column is not None],
        size,
    )
    runs = [(table.version, "READ", changes[0].transaction.commit_time, size)]
    return record.Records([value], {table.version: table}, runs)


def stored_block(log: Log, number: int, size: int, *, captured_at: int = 0) -> int:
    """Append a block."""
    table = known_table(log)
    changes = rows(table, number, size, captured_at=captured_at)
    return log.append(SOURCE, Batch(as_block(changes, table, number), b"%d" % number))
