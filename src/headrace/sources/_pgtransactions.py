"""pgoutput messages -> changes, a transaction at a time. No I/O of its own."""

from __future__ import annotations

import base64
import time
from typing import Any, Protocol

import msgspec

from ..errors import DecodeError, ProtocolError
from ..event import BeforeKind, Change, Op, PostgresPosition, Table, Transaction
from . import Register
from ._pgoutput import (
    DELETE,
    INSERT,
    UPDATE,
    Begin,
    Commit,
    Message,
    Relation,
    RelationColumn,
    Truncate,
    parse,
)
from ._pgrows import Rows

ANNOTATION = "headrace"
HEARTBEAT = "headrace.heartbeat"
DDL = "headrace.ddl"

_OPERATIONS = {INSERT: Op.INSERT, UPDATE: Op.UPDATE, DELETE: Op.DELETE}
_set = msgspec.structs.force_setattr


class Describes(Protocol):
    """Who knows the types and keys behind a Relation message: the catalog."""

    def describe_relation(self, relation: Relation) -> Rows:
        """The decoder for rows that follow it."""
        ...

    def sourceless(self) -> Table:
        """The table of changes that belong to no table."""
        ...


class Assembler:
    """Collects what the stream says into changes.

    `done` holds complete transactions, up to `position`; `open` the one that has begun.
    """

    def __init__(self, catalog: Describes, register: Register, *, after: int, xid: int) -> None:
        self.done: list[Change] = []
        self.open: list[Change] = []
        self.position = after
        self.xid = xid
        self.errored: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        # Tables whose changes count: oid -> schema.table. Others are passed over.
        self.live: dict[int, str] = {}
        self._catalog = catalog
        self._register = register
        self._rows: dict[int, Rows] = {}
        self._transaction: Transaction | None = None
        self._begin: Begin | None = None
        self._ordinal = 0
        self._nowhere: Table | None = None

    @property
    def between_transactions(self) -> bool:
        """Whether nothing has begun that has not ended."""
        return self._begin is None

    def feed(self, lsn: int, data: bytes) -> None:
        """Take one message."""
        operation = _OPERATIONS.get(data[0]) if data else None
        if operation is not None:
            self._row(operation, lsn, data)
            return
        message = parse(data)
        match message:
            case Begin():
                self._started(message)
            case Commit():
                self._committed(message)
            case Relation():
                self._described(message, lsn)
            case Truncate():
                self._truncated(message, lsn)
            case Message():
                self._said(message, lsn)

    def take_open(self) -> list[Change]:
        """The changes of the open transaction so far, but one: the last must be known as such."""
        taken, self.open = self.open[:-1], self.open[-1:]
        return taken

    def _started(self, begin: Begin) -> None:
        if self._begin is not None:
            raise ProtocolError("a transaction began inside another")
        self._begin = begin
        self._ordinal = 0
        if begin.commit_lsn >= self.position:
            self.xid = _full_xid(begin.xid, self.xid)
            now = time.time_ns() // 1000
            self._transaction = Transaction(str(self.xid), begin.commit_time, now)

    def _committed(self, commit: Commit) -> None:
        if self._begin is None:
            raise ProtocolError("a transaction ended that had not begun")
        if self.open:
            _set(self.open[-1], "last", True)
            self.done += self.open
            self.open = []
        self.position = max(self.position, commit.end_lsn)
        self._begin = self._transaction = None

    def _row(self, op: Op, lsn: int, data: bytes) -> None:
        transaction = self._transaction
        if transaction is None:
            self._expect_begun()
            return
        relation = int.from_bytes(data[1:5], "big")
        rows = self._rows.get(relation)
        if rows is None:
            raise ProtocolError(f"a row of relation {relation}, which was not described")
        path = self.live.get(relation)
        if path is None:
            return
        try:
            if self.errored and path in self.errored:
                raise DecodeError(self.errored[path])
            if op is Op.INSERT:
                row = rows.insert(data)
            elif op is Op.UPDATE:
                row = rows.update(data)
            else:
                row = rows.delete(data)
        except DecodeError as error:
            self._undecoded(path, rows.table, lsn, data, error)
            return
        self._ordinal += 1
        position = PostgresPosition(self._begin.commit_lsn, lsn)  # type: ignore[union-attr]
        self.open.append(Change(op, rows.table, *row, transaction, self._ordinal, position))

    def _undecoded(
        self, path: str, table: Table, lsn: int, data: bytes, error: DecodeError
    ) -> None:
        """Keep the bytes, so that nothing is acknowledged that is not in the log."""
        self.errored.setdefault(path, str(error))
        kept = {
            "error": self.errored[path],
            "operation": _OPERATIONS[data[0]],
            "pgoutput": base64.b64encode(data).decode(),
        }
        self._add(Op.MESSAGE, table, lsn, kept)

    def _described(self, relation: Relation, lsn: int) -> None:
        rows = self._catalog.describe_relation(relation)
        path = self.live.get(relation.id)
        if path is None:
            self._rows[relation.id] = rows
            return
        self._versioned(rows, path, lsn, {})

    def _versioned(self, rows: Rows, path: str, lsn: int, ddl: dict[str, Any]) -> None:
        table = self._register(rows.table)
        self._rows[table.relation] = rows.of(table)
        if self.versions.get(path) != table.version or ddl:
            self.versions[path] = table.version
            if self._transaction is not None:
                self._add(Op.SCHEMA, table, lsn, schema(table) | ddl)

    def _truncated(self, truncate: Truncate, lsn: int) -> None:
        if self._transaction is None:
            self._expect_begun()
            return
        said = {"cascade": truncate.cascade, "restart_identity": truncate.restart_identity}
        for relation in truncate.relations:
            if relation in self.live and relation in self._rows:
                self._add(Op.TRUNCATE, self._rows[relation].table, lsn, said)

    def _said(self, message: Message, lsn: int) -> None:
        if message.prefix == HEARTBEAT:
            return
        if not message.transactional:
            self._said_outside(message)
        elif self._transaction is None:
            self._expect_begun()
        elif message.prefix == DDL:
            self._altered(message, lsn)
        elif message.prefix != ANNOTATION or not self._annotated(message.content):
            self._add(Op.MESSAGE, self._no_table(), lsn, _spoken(message))

    def _annotated(self, content: bytes) -> bool:
        try:
            said = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        transaction = self._transaction
        assert transaction is not None
        known: dict[str, msgspec.Raw] = {}
        if transaction.metadata is not None:
            known = msgspec.json.decode(transaction.metadata, type=dict[str, msgspec.Raw])
        # Nobody has seen the transaction yet, and its changes share this one value.
        _set(transaction, "metadata", msgspec.json.encode(known | said))
        return True

    def _said_outside(self, message: Message) -> None:
        """A message that belongs to no transaction is one by itself."""
        if message.lsn < self.position:
            return
        now = time.time_ns() // 1000
        transaction = Transaction(f"message-{message.lsn:X}", now, now)
        position = PostgresPosition(message.lsn, message.lsn)
        said = msgspec.json.encode(_spoken(message))
        change = _told(Op.MESSAGE, self._no_table(), said, transaction, 1, position)
        _set(change, "last", True)
        self.done.append(change)
        self.position = message.lsn + 1

    def _altered(self, message: Message, lsn: int) -> None:
        try:
            ddl = msgspec.json.decode(message.content, type=_Ddl)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._add(Op.MESSAGE, self._no_table(), lsn, _spoken(message))
            return
        told = {"ddl_type": ddl.tag.replace(" ", "_"), "ddl_command": ddl.sql}
        for table in ddl.tables:
            path = self.live.get(table.oid)
            if path is not None and table.columns:
                rows = self._catalog.describe_relation(table.relation())
                self._versioned(rows, path, lsn, told)
            elif path is not None and table.oid in self._rows:
                self._add(Op.SCHEMA, self._rows[table.oid].table, lsn, told | {"dropped": True})

    def _add(self, op: Op, table: Table, lsn: int, said: dict[str, Any]) -> None:
        assert self._begin is not None and self._transaction is not None
        self._ordinal += 1
        position = PostgresPosition(self._begin.commit_lsn, lsn)
        content = msgspec.json.encode(said)
        self.open.append(_told(op, table, content, self._transaction, self._ordinal, position))

    def _no_table(self) -> Table:
        if self._nowhere is None:
            self._nowhere = self._register(self._catalog.sourceless())
        return self._nowhere

    def _expect_begun(self) -> None:
        if self._begin is None:
            raise ProtocolError("a change outside a transaction")


class _DdlColumn(msgspec.Struct, frozen=True):
    name: str
    type_id: int
    modifier: int
    key: bool


class _DdlTable(msgspec.Struct, frozen=True):
    oid: int
    schema: str
    name: str
    identity: str
    columns: tuple[_DdlColumn, ...] = ()

    def relation(self) -> Relation:
        """What the Relation message will say when the next row comes."""
        columns = tuple(
            RelationColumn(column.name, column.key, column.type_id, column.modifier)
            for column in self.columns
        )
        return Relation(self.oid, self.schema, self.name, self.identity, columns)


class _Ddl(msgspec.Struct, frozen=True):
    """What the event trigger of `_pgddl` writes."""

    tag: str
    sql: str
    tables: tuple[_DdlTable, ...]


def schema(table: Table) -> dict[str, Any]:
    """What a SCHEMA change says."""
    columns = [
        {"name": column.name, "type": column.type, "key": column.key} for column in table.columns
    ]
    return {"columns": columns}


def _told(
    op: Op, table: Table, said: bytes, transaction: Transaction, ordinal: int, at: PostgresPosition
) -> Change:
    """A change that is not about a row."""
    return Change(op, table, None, None, BeforeKind.NONE, said, None, (), transaction, ordinal, at)


def _spoken(message: Message) -> dict[str, Any]:
    said: dict[str, Any] = {"prefix": message.prefix, "transactional": message.transactional}
    try:
        said["content"] = message.content.decode()
    except UnicodeDecodeError:
        said["content_base64"] = base64.b64encode(message.content).decode()
    return said


def _full_xid(xid: int, near: int) -> int:
    """The 64-bit transaction id nearest to `near` whose low 32 bits are `xid`."""
    full = (near & ~0xFFFFFFFF) | xid
    if full - near > 1 << 31 and full >= 1 << 32:
        return full - (1 << 32)
    if near - full > 1 << 31:
        return full + (1 << 32)
    return full


