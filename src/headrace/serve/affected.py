"""The rows that an event is about: while it is not acked, nothing later of them is handed out."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ..change.event import Change, Op, ends_piece, piece_begin
from ..formats.entities import root_of
from ..formats.entity import reports_other_rows
from ..formats.key import previous_primary_key, primary_key
from .feed import LogFeed

MOST_ROWS = 1000  # of one event; of more, their whole tables


class AffectedRows(NamedTuple):
    """Rows, each with its table, and tables as a whole."""

    rows: frozenset[tuple[Hashable, str]]
    tables: frozenset[Hashable] = frozenset()

    @classmethod
    def of(cls, change: Change) -> "AffectedRows":
        """An update that replaces a key is about two rows."""
        table = _table(change)
        if not change.key:
            return cls(frozenset(), frozenset({table}))
        keys = (primary_key(change), previous_primary_key(change))
        return cls(frozenset((table, key) for key in keys if key is not None))


class BlockedRows:
    """Rows and tables of which an earlier change is not acked."""

    def __init__(self) -> None:
        self._rows: set[tuple[Hashable, str]] = set()
        self._touched: set[Hashable] = set()
        self._whole: set[Hashable] = set()

    def add(self, affected: AffectedRows) -> None:
        """What comes later for these rows has to wait."""
        self._rows |= affected.rows
        self._whole |= affected.tables
        self._touched |= affected.tables
        self._touched.update(table for table, _ in affected.rows)

    def blocks(self, affected: AffectedRows) -> bool:
        """Whether a change has to wait."""
        if not self._touched.isdisjoint(affected.tables) or not self._rows.isdisjoint(
            affected.rows
        ):
            return True
        return bool(self._whole) and any(table in self._whole for table, _ in affected.rows)


class AffectedRowsFinder:
    """Finds what events are about."""

    def __init__(self, feed: LogFeed, *, together: bool) -> None:
        """`together`: an event may report other changes of its transaction too."""
        self._feed = feed
        self._together = together
        self._last: _Piece | None = None  # neighbouring events are mostly of the same one

    async def at(self, sequence: int, payloads: Sequence[bytes]) -> AffectedRows | None:
        """What the events at a sequence are about; None: its change was trimmed meanwhile."""
        entries = await self._feed.read(sequence - 1, sequence)
        if not entries:
            return None
        change = entries[0].change
        own = AffectedRows.of(change)
        if not self._together or (change.ordinal == 1 and change.last):
            return own
        piece = await self._piece(change)
        if piece.rooted:
            return piece.changed
        return _both(own, piece.deleted) if any(map(reports_other_rows, payloads)) else own

    async def _piece(self, change: Change) -> "_Piece":
        begin = piece_begin(change.sequence, change.ordinal)
        if self._last is None or self._last.begin != begin:
            self._last = await self._gathered(begin)
        return self._last

    async def _gathered(self, begin: int) -> "_Piece":
        """What is left of a transaction, or of a piece of a large one."""
        changed, deleted, rooted = _Sum(), _Sum(), False
        after, end = begin - 1, self._feed.log.latest_sequence
        while entries := await self._feed.read(after, end):
            for entry in entries:
                changed.add(entry.change)
                if entry.change.op is Op.DELETE:
                    deleted.add(entry.change)
                if ends_piece(entry.change):
                    rooted = root_of(entry.change) is not None
                    return _Piece(begin, changed.affected(), deleted.affected(), rooted)
            after = entries[-1].sequence
        return _Piece(begin, changed.affected(), deleted.affected(), rooted)


class _Piece(NamedTuple):
    """The changes of a transaction that events report together."""

    begin: int
    changed: AffectedRows  # every row
    deleted: AffectedRows  # the rows that an event of another deleted row may report
    rooted: bool  # an annotation makes one event of it


class _Sum:
    """Rows of many changes; of too many, their tables."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._rows: set[tuple[Hashable, str]] = set()
        self._tables: set[Hashable] = set()

    def add(self, change: Change) -> None:
        self._seen.add(_table(change))
        if len(self._rows) <= MOST_ROWS:
            affected = AffectedRows.of(change)
            self._rows |= affected.rows
            self._tables |= affected.tables

    def affected(self) -> AffectedRows:
        if len(self._rows) > MOST_ROWS:
            return AffectedRows(frozenset(), frozenset(self._seen))
        return AffectedRows(frozenset(self._rows), frozenset(self._tables))


def _both(one: AffectedRows, other: AffectedRows) -> AffectedRows:
    return AffectedRows(one.rows | other.rows, one.tables | other.tables)


def _table(change: Change) -> Hashable:
    return change.table.source, change.table.schema, change.table.name
