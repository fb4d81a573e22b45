"""Rows of MySQL and MariaDB -> JSON images. No I/O.

The decoder is generated for each version of a table and each set of columns that an event has: it
walks the rows once, then turns them into JSON a column at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..event import BeforeKind, Table
from ._binlog import RowsEvent
from ._mycolumns import ColumnType

# What a row says: key, before, before_kind, after, changed, unchanged, in the order of Change's
# fields; the same as `_pgrows.Row`.
Row = tuple[
    bytes | None,
    bytes | None,
    BeforeKind,
    bytes | None,
    tuple[str, ...] | None,
    tuple[str, ...],
]


class Rows:
    """Turns the rows of one version of a table into JSON."""

    def __init__(self, table: Table, columns: Sequence[ColumnType]) -> None:
        """`columns` in the order of the binlog, of which `table.columns` may leave some out."""
        self.table = table

    def read(self, event: RowsEvent) -> list[Row]:
        """The rows of an event, in their order; an UPDATE's pair is one.

        A value that cannot be read raises DecodeError, bytes that are no rows ProtocolError.
        """
        raise NotImplementedError
