"""Entries of an event table -> changes, a transaction at a time. No I/O of its own."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from ...change.columns import schema_payload
from ...change.event import BeforeKind, Change, Op, Table, Transaction
from ...errors import DecodeError
from .. import Register
from .._annotations import annotated
from ..postgres.resume import PostgresTablesResume
from ..postgres.transactions import ANNOTATION
from .outbox import Outbox, OutboxRouter
from .position import EventTablePosition
from .rows import EventRows

_OPERATIONS = {b"I": Op.INSERT, b"U": Op.UPDATE, b"D": Op.DELETE, b"T": Op.TRUNCATE}
_set = msgspec.structs.force_setattr


class EventEntry(NamedTuple):
    """A row of the event table."""

    xid: int
    id: int
    turn: int  # the first entry of the same statement
    op: bytes
    relation: int  # which table, or partition, it comes from
    columns: str  # which description its rows follow
    old: bytes | None
    new: bytes | None
    annotations: bytes | None
    at: int  # µs since 1970


class Leaf(NamedTuple):
    """A partition that holds rows."""

    table: str  # schema.table of the whole table
    relation: int


class DescriptionCatalog(Protocol):
    """Describes tables as the event table has them."""

    def event_rows(self, columns: str) -> EventRows:
        """The decoder for rows of a description."""
        ...

    def sourceless(self) -> Table:
        """The table of changes that belong to no table."""
        ...


class EventAssembler:
    """Collects entries into changes; the last of a transaction must be known as such."""

    def __init__(
        self,
        catalog: DescriptionCatalog,
        register: Register,
        resume: PostgresTablesResume,
        outbox: Outbox | None = None,
    ) -> None:
        self.errored = resume.errored
        self.astray: frozenset[str] = frozenset()  # tables that were written to by another name
        self.leaves: set[Leaf] = set()  # partitions that were written to
        self._router = OutboxRouter(outbox, register, resume.versions)
        self._catalog = catalog
        self._register = register
        self._live = resume.live
        self._known: dict[str, EventRows] = {}
        self._open: list[Change] = []
        self._transaction: Transaction | None = None
        self._ordinal = 0
        self._commit = 0  # the number of the transaction's commit
        self._reached = 0  # its highest entry so far

    def renew(self, resume: PostgresTablesResume) -> None:
        """Take up tables that were copied meanwhile."""
        self.errored, self._live = resume.errored, resume.live
        self.astray = frozenset()
        self._router.versions = resume.versions

    @property
    def versions(self) -> dict[str, int]:
        """The version of each table that was emitted last."""
        return self._router.versions

    def copied(self, changes: Sequence[Change]) -> list[Change]:
        """A transaction of a snapshot, while its rows are emitted."""
        return self._router.transaction(changes)

    def begin(self, last: EventEntry, annotations: Iterable[bytes], *, commit: int) -> None:
        """A transaction begins, of which the last entry is known, and all annotations.

        `commit` is a number that grows from transaction to transaction.
        """
        metadata, unfit = None, []
        for annotation in annotations:
            metadata, whole = annotated(metadata, annotation)
            unfit += [] if whole else [annotation]
        now = time.time_ns() // 1000
        # The server keeps no time of a commit; the last entry was written just before.
        self._transaction = Transaction(str(last.xid), last.at, now, metadata)
        self._ordinal = self._reached = 0
        self._commit = commit
        for annotation in unfit:
            self._emit_message(last._replace(id=0), _spoken(annotation))

    def take(self, entries: Sequence[EventEntry]) -> list[Change]:
        """The changes of some entries, but one: it may be the transaction's last."""
        for entry in entries:
            self._tell(entry)
        taken, self._open = self._open[:-1], self._open[-1:]
        return taken

    def end(self) -> list[Change]:
        """The transaction has ended."""
        taken, self._open = self._open, []
        if taken:
            _set(taken[-1], "last", True)
        return taken

    def _tell(self, entry: EventEntry) -> None:
        rows = self._known.get(entry.columns)
        if rows is None:
            try:
                rows = self._known[entry.columns] = self._catalog.event_rows(entry.columns)
            except DecodeError as error:
                self._keep(entry, error)
                return
        if rows.of_relation != entry.relation:
            self._keep(entry, DecodeError("an event has the columns of another table"))
            return
        if entry.relation != rows.table.relation and entry.relation in self._live:
            # It was a partition for a while, and may be a table again before anybody looks.
            self.astray |= {self._live.pop(entry.relation)}
        path = self._live.get(rows.table.relation)
        if path is None:
            return
        if path != rows.table.path:
            # It may get its name back before anybody looks; a copy says then what is in it.
            self.astray |= {path}
            del self._live[rows.table.relation]
            return
        if entry.relation != rows.table.relation:
            self.leaves.add(Leaf(path, entry.relation))
        if self.versions.get(path) != rows.table.version:
            # Columns that a table has again get another version: versions never go back.
            table = self._register(msgspec.structs.replace(rows.table, version=0))
            rows = self._known[entry.columns] = rows.of(table)
        if self.versions.get(path) != rows.table.version:
            self._router.versions = self.versions | {path: rows.table.version}
            self._add(Op.SCHEMA, rows.table, entry, schema_payload(rows.table))
        self._row(entry, rows, path)

    def _row(self, entry: EventEntry, rows: EventRows, path: str) -> None:
        op = _OPERATIONS.get(entry.op)
        if op is Op.TRUNCATE:
            self._add(op, rows.table, entry, {"relations": [rows.table.relation]})
            return
        if path not in self.errored and op is not None:
            try:
                row = rows.read(op, entry.old, entry.new)
                self._append(Change(op, rows.table, *row, *self._place(entry)))
            except DecodeError as error:
                self.errored = self.errored | {path: str(error)}
            else:
                return
        self._add(Op.MESSAGE, rows.table, entry, _undecoded(entry, op, self.errored.get(path, "")))

    def _keep(self, entry: EventEntry, error: DecodeError) -> None:
        """An event whose columns are not known: its table stops, and the others go on."""
        path = self._live.get(entry.relation)
        if path is None:
            raise error
        self.errored = {path: str(error)} | self.errored
        self._emit_message(entry, _undecoded(entry, _OPERATIONS.get(entry.op), self.errored[path]))

    def _emit_message(self, entry: EventEntry, payload: dict[str, Any]) -> None:
        self._add(Op.MESSAGE, self._register(self._catalog.sourceless()), entry, payload)

    def _add(self, op: Op, table: Table, entry: EventEntry, payload: dict[str, Any]) -> None:
        content = msgspec.json.encode(payload)
        place = self._place(entry)
        self._append(Change(op, table, None, None, BeforeKind.NONE, content, None, (), *place))

    def _place(self, entry: EventEntry) -> tuple[Transaction, int, EventTablePosition]:
        assert self._transaction is not None
        # A statement that a trigger has run comes before the rest of the one that fired it.
        self._reached = max(self._reached, entry.id)
        position = EventTablePosition(entry.xid, self._reached, self._commit)
        return self._transaction, self._ordinal + 1, position

    def _append(self, change: Change) -> None:
        for each in self._router.routed(change):
            self._ordinal += 1
            _set(each, "ordinal", self._ordinal)  # nobody has seen it yet
            self._open.append(each)


def _spoken(annotation: bytes) -> dict[str, Any]:
    content = annotation.decode(errors="replace")
    return {"prefix": ANNOTATION, "transactional": True, "content": content}


def _undecoded(entry: EventEntry, op: Op | None, why: str) -> dict[str, Any]:
    """Keep the bytes, so that nothing is forgotten that is not in the log."""
    rows = {"old": entry.old, "new": entry.new}
    kept = {name: base64.b64encode(row).decode() for name, row in rows.items() if row is not None}
    return {"error": why, "operation": op or entry.op.decode(errors="replace")} | kept
