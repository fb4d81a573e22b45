"""What a span of the log has of which table, noted while it is written.

Whoever plans work for tables need not read a span to know which tables it concerns.
"""

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from .block import RowBlock
from .event import Op
from .record import ChangeRun

_MOST = 64  # tables, or changes that are none of a row: a span with more is read when it matters
_ROW_OPS = frozenset(op.value for op in (Op.INSERT, Op.READ, Op.UPDATE, Op.DELETE))


class TableSpan(msgspec.Struct, frozen=True, array_like=True):
    """The changes of one version of a table within a span."""

    version: int
    first: int  # sequences
    last: int
    last_of_row: int  # the last change of a row that is in no block; 0: there is none
    changes: int
    snapshots: tuple[bytes, ...] = ()  # the positions of those of which there are blocks


class LogSpan(msgspec.Struct, frozen=True, array_like=True):
    """What the changes after `after` are, up to and with `upto`."""

    after: int
    upto: int
    tables: tuple[TableSpan, ...]
    others: tuple[int, ...]  # changes that are none of a row: TRUNCATE, MESSAGE and such


class SpanNotes:
    """What has been written since the last span; only one thread writes."""

    def __init__(self, after: int) -> None:
        self._begin(after)

    def _begin(self, after: int) -> None:
        self._after = self._upto = after
        self._tables: dict[int, list[int]] = {}  # by version, the first fields of its TableSpan
        self._snapshots: dict[int, set[bytes]] = defaultdict(set)
        self._others: list[int] = []
        self._known = True

    def take(self, runs: Iterable[ChangeRun], upto: int) -> None:
        """Note changes that end with the sequence `upto`."""
        sequence, tables = self._upto, self._tables
        for version, op, _, count in runs:
            known = tables.get(version)
            if known is None:
                known = tables[version] = [version, sequence + 1, 0, 0, 0]
            sequence += count
            known[2] = sequence
            known[4] += count
            if op in _ROW_OPS:
                known[3] = sequence
            else:
                self._others += range(sequence - count + 1, sequence + 1)
        self._known = self._known and sequence == upto  # else somebody did not count
        self._upto = upto

    def take_block(self, block: RowBlock) -> None:
        """Note rows of a snapshot."""
        version, first = block.head.table, self._upto + 1
        self._upto += block.count
        known = self._tables.setdefault(version, [version, first, 0, 0, 0])
        known[2] = self._upto
        known[4] += block.count
        self._snapshots[version].add(bytes(block.head.position))

    def cut(self) -> LogSpan | None:
        """The span up to here, of which the next one is the continuation; None: not known."""
        span = None
        if self._known and max(len(self._tables), len(self._others)) <= _MOST:
            tables = tuple(
                TableSpan(version, first, last, of_row, changes, tuple(self._snapshots[version]))
                for version, first, last, of_row, changes in self._tables.values()
            )
            span = LogSpan(self._after, self._upto, tables, tuple(self._others))
        self._begin(self._upto)
        return span
