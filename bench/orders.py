"""A log of changes of one table, written without a database: first its rows, then updates of them.

The table has eight columns of the kinds that tables have. Rows come as a snapshot's reads, updates
strike random keys; a transaction has at most 1,000 changes, or all of them.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from headrace.change.block import ColumnText
from headrace.change.event import Batch, BeforeKind, Change, Column, Op, Table, Transaction
from headrace.change.printed import Printed
from headrace.change.record import Records, rows_in_block
from headrace.log import Log
from headrace.sources.postgres.position import PostgresPosition

SCHEMA, NAME = "public", "orders"
PER_TRANSACTION = 1000
_PER_APPEND = 10_000  # changes that share an fsync
_PER_BLOCK = 4096  # rows
_SNAPSHOT = PostgresPosition(8, 8)  # where all rows were read

COLUMNS = (
    Column("id", "bigint", key=True),
    Column("customer_id", "integer"),
    Column("status", "text"),
    Column("amount", "numeric(12,2)"),
    Column("note", "text"),
    Column("created_at", "timestamp with time zone"),
    Column("paid", "boolean"),
    Column("weight", "double precision"),
)

_STATUS = (b"new", b"paid", b"sent", b"done")
_PAID = (b"false", b"true")
_IMAGE = (
    b'{"id":%d,"customer_id":%d,"status":"%b","amount":"%d.%02d",'
    b'"note":"note number %d of this order",'
    b'"created_at":"2025-01-%02dT10:%02d:%02d+00:00","paid":%b,"weight":%.6f}'
)
# The same as PostgreSQL prints it, by column: how it becomes JSON, and which of the values drawn.
_PRINTED = (
    (Printed.PLAIN, b"%d", 0, 1),
    (Printed.PLAIN, b"%d", 1, 2),
    (Printed.TEXT, b"%b", 2, 3),
    (Printed.QUOTED, b"%d.%02d", 3, 5),
    (Printed.TEXT, b"note number %d of this order", 5, 6),
    (Printed.TIMESTAMPTZ, b"2025-01-%02d 10:%02d:%02d+00", 6, 9),
    (Printed.BOOLEAN, b"%.1b", 9, 10),
    (Printed.FLOAT, b"%.6f", 10, 11),
)


@dataclass(frozen=True, slots=True)
class Written:
    """A stretch of the log."""

    after: int
    upto: int
    rows: int  # different ones in each batch of those that count, added up


class Orders:
    """Writes the log of the table."""

    def __init__(self, path: str, *, seed: int = 1, name: str = NAME) -> None:
        self._path = path
        self._name = name
        self._rng = np.random.default_rng(seed)
        self._transactions = 0

    def insert(self, rows: int) -> Written:
        """Every row of the table, keys 1, 2, …, in blocks as a snapshot stores them."""
        with Log.open(self._path) as log:
            table, after = log.register(self._table), log.latest_sequence
            for first in range(1, rows + 1, _PER_BLOCK):
                block = self._block(table, np.arange(first, min(first + _PER_BLOCK, rows + 1)))
                log.append("bench", Batch(block, b"bench"))
            return Written(after, log.latest_sequence, rows)

    def _block(self, table: Table, keys: np.ndarray) -> Records:
        transaction, _ = self._begun()
        values = list(zip(*self._drawn(keys.tolist()), strict=True))
        columns = [
            ColumnText(
                printed, b"\t".join([form % each for each in zip(*values[begin:end], strict=True)])
            )
            for printed, form, begin, end in _PRINTED
        ]
        block = rows_in_block(table, transaction, (_SNAPSHOT, _SNAPSHOT), columns, len(keys))
        assert block is not None  # it is smaller than the largest
        return block

    @property
    def _table(self) -> Table:
        return Table("bench", "postgres", "bench", "bench", SCHEMA, self._name, COLUMNS)

    def _begun(self) -> tuple[Transaction, PostgresPosition]:
        """The next transaction, and where it is."""
        self._transactions += 1
        now = time.time_ns() // 1000
        position = PostgresPosition(self._transactions * 16, self._transactions * 16 - 8)
        return Transaction(str(self._transactions), now, now), position

    def update(self, rows: int, *, batch: int, batches: int, warm_up: int) -> Written:
        """Updates of random rows; those of the first `warm_up` batches do not count."""
        keys = self._rng.integers(1, rows + 1, batch * (warm_up + batches))
        each = keys.reshape(-1, batch)[warm_up:]
        counted = sum(len(np.unique(of_batch)) for of_batch in each)
        # A batch that could not hold a transaction would be larger than it was asked.
        return self._written(Op.UPDATE, keys, math.gcd(batch, PER_TRANSACTION), counted=counted)

    def insert_at_once(self, rows: int) -> Written:
        """Every row of the table in one transaction."""
        return self._written(Op.INSERT, np.arange(1, rows + 1), rows, counted=rows)

    def update_at_once(self, rows: int) -> Written:
        """Every row once in one transaction, in random order."""
        keys = self._rng.permutation(np.arange(1, rows + 1))
        return self._written(Op.UPDATE, keys, rows, counted=rows)

    def _written(self, op: Op, keys: np.ndarray, per_transaction: int, *, counted: int) -> Written:
        with Log.open(self._path) as log:
            table, after = log.register(self._table), log.latest_sequence
            changes = self._changes(op, table, keys, per_transaction)
            while some := list(islice(changes, _PER_APPEND)):
                # Until its last change, a transaction has no place to resume after.
                log.append("bench", Batch(some, b"bench" if some[-1].last else None))
            return Written(after, log.latest_sequence, counted)

    def _changes(
        self, op: Op, table: Table, keys: np.ndarray, per_transaction: int
    ) -> Iterator[Change]:
        images = self._images(keys)
        for start in range(0, len(keys), per_transaction):
            some = keys[start : start + per_transaction]
            transaction, position = self._begun()
            for ordinal, key in enumerate(some, 1):
                yield Change(
                    op=op,
                    table=table,
                    key=b'{"id":%d}' % key,
                    before=None,
                    before_kind=BeforeKind.NONE,
                    after=next(images),
                    changed=None,
                    unchanged=(),
                    transaction=transaction,
                    ordinal=ordinal,
                    position=position,
                    last=ordinal == len(some),
                )

    def _images(self, keys: np.ndarray) -> Iterator[bytes]:
        for start in range(0, len(keys), _PER_APPEND):
            yield from self._some_images(keys[start : start + _PER_APPEND].tolist())

    def _some_images(self, keys: list[int]) -> Iterator[bytes]:
        return (_IMAGE % each for each in self._drawn(keys))

    def _drawn(self, keys: list[int]) -> Iterator[tuple[Any, ...]]:
        """The values of rows, a text or number for each place in `_IMAGE`."""
        upper = (100_000, len(_STATUS), 10**6, 100, 10**9, 28, 60, 60, 2)
        customer, status, amount, cents, note, day, minute, second, paid = (
            self._rng.integers(0, bound, len(keys)).tolist() for bound in upper
        )
        weights = (self._rng.random(len(keys)) * 100).tolist()
        yield from zip(
            *(keys, customer, map(_STATUS.__getitem__, status), amount, cents, note),
            *((each + 1 for each in day), minute, second, map(_PAID.__getitem__, paid), weights),
            strict=True,
        )
