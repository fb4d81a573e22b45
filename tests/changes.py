"""Changes built by hand, and a log to put them in."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headrace.change.event import Batch, BeforeKind, Change, Column, Op, Table, Transaction
from headrace.log import Log
from headrace.sources.postgres.position import PostgresPosition

Row = Mapping[str, Any]

COMMIT_TIME = 1_730_250_000_000_123  # µs


def make_table(
    name: str = "users",
    *,
    key: Sequence[str] = ("id",),
    schema: str = "public",
    version: int = 0,
) -> Table:
    """A table with these key columns and a column `name`."""
    columns = (*(Column(column, "text", key=True) for column in key), Column("name", "text"))
    return Table("shop", "postgres", "origin-1", "shop", schema, name, columns, version=version)


def make_change(
    op: Op = Op.INSERT,
    *,
    table: Table | None = None,
    key: Row | None = None,
    before: Row | None = None,
    after: Row | None = None,
    **fields: Any,
) -> Change:
    """A change of one row, alone in its transaction unless `fields` say otherwise."""
    given = {
        "before_kind": BeforeKind.FULL if before else BeforeKind.NONE,
        "changed": None,
        "unchanged": (),
        "transaction": Transaction("7", COMMIT_TIME, COMMIT_TIME + 500),
        "ordinal": 1,
        "position": PostgresPosition(0x16B3800, 0x16B3748),
        "last": True,
        "sequence": 1,
    }
    return Change(
        op=op,
        table=table or make_table(version=1),
        key=_json(key),
        before=_json(before),
        after=_json(after),
        **(given | fields),
    )


class Writer:
    """Puts rows into a log, a transaction each, as a capture would."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._tables: dict[str, Table] = {}
        self._numbers = itertools.count(1)

    def put(self, table: str, pk: str, /, op: Op = Op.INSERT, **values: Any) -> int:
        """A row as it is now; returns its sequence."""
        row = {"id": pk, **values}
        return self.append(
            [make_change(op, table=self.table(table), key={"id": pk}, after=row, **self._moment())]
        )

    def put_from(self, source: str, table: str, pk: str) -> int:
        """A row of another source; returns its sequence."""
        described = self.log.register(msgspec.structs.replace(make_table(table), source=source))
        row = {"id": pk}
        change = make_change(table=described, key=row, after=row, **self._moment())
        return self.log.append(source, Batch([change], b"resume"))

    def delete(self, table: str, pk: str) -> int:
        """A row that is gone; returns the change's sequence."""
        key = {"id": pk}
        change = make_change(
            Op.DELETE, table=self.table(table), key=key, before=key, **self._moment()
        )
        return self.append([change])

    def put_many(self, table: str, count: int) -> int:
        """So many rows in one transaction; returns the last one's sequence."""
        described, moment = self.table(table), self._moment()
        changes = [
            make_change(
                table=described,
                key={"id": str(n)},
                after={"id": str(n)},
                **(moment | {"ordinal": n, "last": n == count}),
            )
            for n in range(1, count + 1)
        ]
        return self.append(changes)

    def append(self, changes: Sequence[Change]) -> int:
        """Changes as they are; returns the last committed sequence."""
        return self.log.append("shop", Batch(changes, b"resume"))

    def table(self, name: str, **described: Any) -> Table:
        """A table of the log."""
        if name not in self._tables:
            self._tables[name] = self.log.register(make_table(name, **described))
        return self._tables[name]

    def _moment(self) -> dict[str, Any]:
        now, number = time.time_ns() // 1000, next(self._numbers)
        return {
            "transaction": Transaction(str(number), now, now),
            "position": PostgresPosition(number * 16, number * 16 - 8),
        }


@contextmanager
def opened_writer(folder: Path) -> Iterator[Writer]:
    """A writer of a new log."""
    with Log.open(folder) as log:
        yield Writer(log)


def _json(row: Row | None) -> bytes | None:
    return None if row is None else msgspec.json.encode(row)


def wal_position(change: Change) -> PostgresPosition:
    """Where a change captured from PostgreSQL's write-ahead log stands in it."""
    assert isinstance(change.position, PostgresPosition)
    return change.position
