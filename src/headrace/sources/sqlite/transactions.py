"""Entries of the append table -> changes, a transaction at a time. No I/O of its own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from ...change.columns import schema_payload
from ...change.event import BeforeKind, Change, Op, Table, Transaction
from ...errors import DecodeError, ProtocolError
from .._annotations import annotated
from .connections import Row
from .connector import SqlitePosition
from .resume import SqliteResume, SqliteTableSnapshot
from .values import Images, undecoded

ANNOTATION = "N"
_SCHEMA = "S"
_MORE = "+"
_OPERATIONS = {"I": Op.INSERT, "U": Op.UPDATE, "D": Op.DELETE}
_HEAD = 5  # columns before the values

_set = msgspec.structs.force_setattr
_encode = msgspec.json.Encoder().encode


class SqliteEntry(msgspec.Struct, frozen=True, gc=False):
    """What a trigger has written, with its further values."""

    number: int  # of the last row it takes
    layout: int
    op: str
    at: int  # milliseconds since 1970
    token: Any  # the same for all entries of a transaction; None: not known
    values: Sequence[Any]


class DescribedLayout(msgspec.Struct, frozen=True):
    """A layout as changes need it."""

    table: Table
    images: Images
    follows: int | None  # the layout that this one went on from, in one transaction


class LayoutCatalog(Protocol):
    """Who knows what the values of a layout stand for: the database."""

    def describe(self, layout: int) -> DescribedLayout:
        """The layout of this number, its table registered with the log."""
        ...

    def sourceless(self) -> Table:
        """The table of changes that belong to no table."""
        ...


def entries(rows: Iterable[Row]) -> Iterator[SqliteEntry]:
    """The entries behind rows of the append table."""
    head: Row | None = None
    values: list[Any] = []
    number = 0
    for row in rows:
        if row[2] == _MORE:
            if head is None or head[1] != row[1]:
                raise ProtocolError(f"entry {row[0]} goes on from an entry that is not there")
            values += row[_HEAD:]
            number = row[0]
            continue
        if head is not None:
            yield SqliteEntry(number, head[1], head[2], head[3], head[4], values)
        head, values, number = row, list(row[_HEAD:]), row[0]
    if head is not None:
        yield SqliteEntry(number, head[1], head[2], head[3], head[4], values)


def further_ends(rows: Iterable[Row]) -> list[int]:
    """Where transactions must have ended, of entries that nobody has watched being committed.

    Programs that are attached mark theirs. An annotation comes first in its transaction.
    """
    ends: list[int] = []
    before: Row | None = None
    for row in rows:
        if before is not None and row[2] != _MORE:
            annotated_anew = row[2] == ANNOTATION and before[2] != ANNOTATION
            if row[4] != before[4] or (annotated_anew and row[4] is None):
                ends.append(row[0] - 1)
        before = row
    return ends


class SqliteAssembler:
    """Collects entries into changes; `resume` follows what they say of tables."""

    def __init__(self, tables: LayoutCatalog, resume: SqliteResume) -> None:
        self.resume = resume
        self._tables = tables
        self._live: dict[int, str] = {}
        self._open: list[Change] = []
        self._transaction = Transaction("", 0, 0)
        self._number = 0
        self._ordinal = 0
        self._shown: list[bool] = []  # of the annotations, whether the metadata has it whole

    def renew(self, resume: SqliteResume) -> None:
        """Take up tables that were copied meanwhile."""
        self.resume = resume
        # What happens before a table's copy is done is in the copy.
        self._live = {copy.layout: path for path, copy in resume.snapshots.items() if copy.done}

    def whole(self, first: int, found: Sequence[SqliteEntry]) -> list[Change]:
        """The changes of a transaction that is here from its first entry to its last."""
        notes = [entry.values[0] for entry in found if entry.op == ANNOTATION]
        self.begin(first, found[-1].at, notes)
        for entry in found:
            self.feed(entry)
        return self.end()

    def begin(self, first: int, at: int, notes: Sequence[Any]) -> None:
        """A transaction whose first entry is `first`, and which ended at the time `at`."""
        metadata = None
        self._shown = []
        for note in notes:
            metadata, whole = annotated(metadata, _spoken(note))
            self._shown.append(whole)
        # SQLite gives transactions no name, so the time is one; entries make it the only one.
        name = f"{at}{first % 1_000_000:06}"
        now = time.time_ns() // 1000
        self._transaction = Transaction(name, at * 1000, now, metadata)
        self._number, self._ordinal = first, 0

    def take_open(self) -> list[Change]:
        """The changes so far, but one: the last must be known as such."""
        taken, self._open = self._open[:-1], self._open[-1:]
        return taken

    def end(self) -> list[Change]:
        """The rest of the transaction."""
        ended, self._open = self._open, []
        if ended:
            _set(ended[-1], "last", True)
        return ended

    def feed(self, entry: SqliteEntry) -> None:
        """Take one entry."""
        if entry.op == ANNOTATION:
            if not self._shown.pop(0):
                payload = {"prefix": "headrace", "transactional": True}
                content = _spoken(entry.values[0]).decode(errors="replace")
                self._emit(
                    Op.MESSAGE, self._tables.sourceless(), entry, payload | {"content": content}
                )
        elif entry.op == _SCHEMA:
            self._altered(entry)
        else:
            path = self._live.get(entry.layout)
            if path is not None:
                self._row(path, entry)

    def _row(self, path: str, entry: SqliteEntry) -> None:
        described = self._tables.describe(entry.layout)
        if path not in self.resume.errored:
            try:
                self._changed(described, entry)
                return
            except DecodeError as error:
                self.resume = self.resume.with_error(path, str(error))
        # Kept, so that nothing is acknowledged that is not in the log.
        op = _OPERATIONS[entry.op]
        width = len(described.table.columns) * (2 if op is Op.UPDATE else 1)
        kept = {
            "error": self.resume.errored[path],
            "operation": op,
            "values": undecoded(entry.values[:width]),
        }
        self._emit(Op.MESSAGE, described.table, entry, kept)

    def _changed(self, described: DescribedLayout, entry: SqliteEntry) -> None:
        images, width = described.images, len(described.table.columns)
        op, first = _OPERATIONS[entry.op], entry.values[:width]
        image = images.image(first)
        if op is Op.INSERT:
            self._add(op, described.table, entry, (images.key(first), None, image, None))
        elif op is Op.DELETE:
            self._add(op, described.table, entry, (images.key(first), image, None, None))
        else:
            new = entry.values[width : 2 * width]
            changed = images.changed(first, new)
            self._add(
                op, described.table, entry, (images.key(new), image, images.image(new), changed)
            )

    def _altered(self, entry: SqliteEntry) -> None:
        described = self._tables.describe(entry.layout)
        path = self._live.pop(described.follows or 0, None)
        if path is None:
            return
        self._live[entry.layout] = path
        copy = self.resume.snapshots[path]
        moved = SqliteTableSnapshot(entry.layout, done=True, rows=copy.rows)
        resume = self.resume.with_snapshot(path, moved)
        self.resume = resume.with_version(path, described.table.version)
        ddl = str(entry.values[0])
        payload = schema_payload(described.table) | {
            "ddl_type": "_".join(ddl.split()[:2]).upper(),
            "ddl_command": ddl,
        }
        self._emit(Op.SCHEMA, described.table, entry, payload)

    def _emit(self, op: Op, table: Table, entry: SqliteEntry, payload: dict[str, Any]) -> None:
        self._add(op, table, entry, (None, None, _encode(payload), None))

    def _add(
        self,
        op: Op,
        table: Table,
        entry: SqliteEntry,
        described: tuple[bytes | None, bytes | None, bytes | None, tuple[str, ...] | None],
    ) -> None:
        key, before, after, changed = described
        self._ordinal += 1
        kind = BeforeKind.NONE if before is None else BeforeKind.FULL
        at = SqlitePosition(self._number, entry.number)
        self._open.append(
            Change(op, table, key, before, kind, after, changed, (),
                   self._transaction, self._ordinal, at)
        )  # fmt: skip


def _spoken(note: object) -> bytes:
    if isinstance(note, bytes):
        return note
    return str("null" if note is None else note).encode()
