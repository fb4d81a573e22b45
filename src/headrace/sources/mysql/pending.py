"""Rows of a binary log that are not decoded yet. No I/O.

Many events decoded together cost much less than one by one, so rows wait until enough are there.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from ...change.event import BeforeKind, Change, Op, Table, Transaction
from ...errors import DecodeError
from .decode.absent import Manner
from .decode.events import RowsEvent, RowsKind
from .decode.rows import Row
from .position import MysqlPosition
from .tables import MappedTable

_OPERATIONS = {
    RowsKind.INSERT: Op.INSERT,
    RowsKind.UPDATE: Op.UPDATE,
    RowsKind.DELETE: Op.DELETE,
}

Read = list[Row] | DecodeError
"""The rows of an event, or why they cannot be read."""


class OpenTransaction(msgspec.Struct):
    """A transaction that has begun and not ended."""

    file: str
    position: int  # where it begins
    gtid: str
    skipped: bool  # it is in the log already
    transaction: Transaction
    is_xa: bool = False  # an XA branch: nothing of it may go before its end is known
    committing: bool = False  # it goes on until a COMMIT
    ordinal: int = 0
    savepoints: dict[str, int] = {}
    emitted: int = 0  # changes that were emitted already


class PendingRows(msgspec.Struct, frozen=True, gc=False):
    """Rows that are not decoded yet."""

    begun: OpenTransaction
    reading: MappedTable
    table: Table
    event: RowsEvent
    position: MysqlPosition
    data: bytes  # the event as it came
    manner: Manner = Manner.UNKNOWN  # of what it leaves out

    def changes(self, rows: list[Row]) -> list[Change]:
        """The changes that its rows are; RowNotRead: the snapshot of the table begins anew."""
        operation, table, position = _OPERATIONS[self.event.kind], self.table, self.position
        begun = self.begun
        transaction, ordinal = begun.transaction, begun.ordinal
        if (unread := self.reading.unread) is not None:
            found = [unread.counted(operation, row) for row in rows]
            counted = [each for each in found if each is not None]
            begun.ordinal += len(counted)
            return [
                Change(op, table, *row, transaction, at, position)
                for at, (op, row) in enumerate(counted, ordinal + 1)
            ]
        begun.ordinal += len(rows)
        # All by position: this is the one statement that runs for every row.
        return [
            Change(operation, table, key, before, kind, after, changed, unchanged,
                   transaction, at, position)
            for at, (key, before, kind, after, changed, unchanged) in enumerate(rows, ordinal + 1)
        ]  # fmt: skip

    def undecoded(self, error: str) -> Change:
        """A MESSAGE with its bytes, so that nothing is passed over that is not in the log."""
        event, begun = self.event, self.begun
        content = {
            "error": error,
            "operation": _OPERATIONS[event.kind],
            "binlog": base64.b64encode(self.data or event.data[event.at : event.end]).decode(),
        }
        begun.ordinal += 1
        where = (begun.transaction, begun.ordinal, self.position)
        return change_without_row(Op.MESSAGE, self.table, content, where)


def decoded(waiting: list[PendingRows | None]) -> dict[int, Read]:
    """The rows of each event that is read at all, by its index; alike ones are read at once."""
    alike: dict[tuple[object, ...], list[tuple[int, PendingRows]]] = {}
    for at, each in enumerate(waiting):
        if each is not None and each.reading.rows is not None:
            event = each.event
            key = (
                id(each.reading),
                event.header.kind,
                event.present,
                event.present_after,
                each.manner,
            )
            alike.setdefault(key, []).append((at, each))
    found: dict[int, Read] = {}
    for some in alike.values():
        found |= _read(some)
    return found


def _read(alike: list[tuple[int, PendingRows]]) -> dict[int, Read]:
    """The rows of events of one kind; where one cannot be read, the others can."""
    rows = alike[0][1].reading.rows
    assert rows is not None
    try:
        found = rows.read_all([each.event for _, each in alike], alike[0][1].manner)
        return {at: these for (at, _), these in zip(alike, found, strict=True)}
    except DecodeError as error:
        if len(alike) == 1:
            return {alike[0][0]: error}
    one_by_one: dict[int, Read] = {}
    for each in alike:
        one_by_one |= _read([each])
    return one_by_one


def change_without_row(
    op: Op, table: Table, content: dict[str, Any], at: tuple[Transaction, int, MysqlPosition]
) -> Change:
    """A change that is not about a row; `at`: transaction, ordinal, position."""
    image = msgspec.json.encode(content)
    return Change(op, table, None, None, BeforeKind.NONE, image, None, (), *at)


def annotation(image: bytes) -> bytes:
    """The annotation in a row of the table of annotations: its column `metadata`."""
    row = msgspec.json.decode(image, type=dict[str, msgspec.Raw])
    metadata = bytes(row.get("metadata", b"null"))
    if metadata.startswith(b'"'):
        return msgspec.json.decode(metadata, type=str).encode()
    return metadata
