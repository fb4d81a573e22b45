"""Copying a table: its rows at one moment, as changes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import apsw
import msgspec

from ...change.columns import schema_payload
from ...change.event import BeforeKind, Change, Op, Transaction
from ...errors import DecodeError
from ..pace import RowPace
from .connections import Row, page
from .connector import SqlitePosition
from .database import Snapshot, read
from .transactions import DescribedLayout

_ROWS = 4096  # read and handed over at once

_set = msgspec.structs.force_setattr


class SqliteSnapshotReader:
    """Tells a table as it is at one moment; `looks` sets its names apart from earlier copies'."""

    def __init__(
        self, snapshot: Snapshot, layout: int, described: DescribedLayout, *, looks: int
    ) -> None:
        self._snapshot = snapshot
        self._described = described
        self._name = f"snapshot-{snapshot.last}-{looks}-{layout}"
        self._number = 0
        self._found = self._read()
        self._error: DecodeError | None = None  # that reading all rows has met

    @property
    def version(self) -> int:
        """The table's version in the log."""
        return self._described.table.version

    def hold(self) -> None:
        """Read all rows at once, so that the moment may be let go."""
        try:
            self._found = iter(list(self._found))
        except DecodeError as error:
            self._error = error

    def announce(self, *, columns: bool, forget: bool) -> list[Change]:
        """Say the table's columns, and forget its rows where they are copied anew."""
        table = self._described.table
        contents: list[tuple[Op, object]] = []
        if columns:
            contents.append((Op.SCHEMA, schema_payload(table)))
        if forget:
            contents.append((Op.TRUNCATE, {"snapshot": True, "relations": [table.relation]}))
        return self._changes([(op, None, msgspec.json.encode(what)) for op, what in contents])

    def rows(self, pace: RowPace) -> Iterator[list[Change]]:
        """The rows, some at a time."""
        images = self._described.images
        if self._error is not None:
            raise self._error
        while rows := page(self._found, pace.piece(_ROWS)):
            yield self._changes([(Op.READ, images.key(row), images.image(row)) for row in rows])

    def _read(self) -> Iterator[Row]:
        table = self._described.table
        try:
            yield from read(self._snapshot.connection, table.name, [c.name for c in table.columns])
        except UnicodeDecodeError as error:
            raise DecodeError("a row has text that is not UTF-8") from error
        except apsw.SQLError as error:  # a generated column by a function that only its writer has
            raise DecodeError(f"its rows cannot be read: {error}") from error

    def _changes(self, described: list[tuple[Op, bytes | None, bytes]]) -> list[Change]:
        self._number += 1
        now = time.time_ns() // 1000
        transaction = Transaction(f"{self._name}-{self._number}", now, now)
        at = SqlitePosition(self._snapshot.last, self._snapshot.last)
        none, table = BeforeKind.NONE, self._described.table
        changes = [
            Change(op, table, key, None, none, after, None, (), transaction, ordinal, at)
            for ordinal, (op, key, after) in enumerate(described, 1)
        ]
        if changes:
            _set(changes[-1], "last", True)
        return changes
