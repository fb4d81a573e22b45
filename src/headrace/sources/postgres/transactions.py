"""pgoutput messages -> changes, a transaction at a time. No I/O of its own."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Annotated, Any, Protocol

import msgspec

from ...change.event import BeforeKind, Change, Op, Table, Transaction
from ...errors import DecodeError, ProtocolError
from .. import Register
from .._annotations import annotated
from .pgoutput import (
    Message,
    Parsed,
    RelationColumn,
    WalBegin,
    WalCommit,
    WalRelation,
    WalTruncate,
    parse,
)
from .position import PostgresPosition
from .rows import Row, Rows

ANNOTATION = "headrace"
HEARTBEAT = "headrace.heartbeat"
DDL = "headrace.ddl"

_OPERATIONS = {b"I": Op.INSERT, b"U": Op.UPDATE, b"D": Op.DELETE}
_Reading = tuple[Op, Callable[[bytes], Row], Table]
_set = msgspec.structs.force_setattr


class RelationCatalog(Protocol):
    """Who knows the types and keys behind a Relation message: the catalog."""

    def describe_relation(self, relation: WalRelation, *, announced_by: int) -> Rows:
        """The decoder for rows that follow it; `announced_by` is the transaction, 0: an old one."""
        ...

    def sourceless(self) -> Table:
        """The table of changes that belong to no table."""
        ...


class PostgresAssembler:
    """Collects what the stream says into changes.

    `done` holds complete transactions, up to `position`; `open` the one that has begun.
    """

    def __init__(
        self, catalog: RelationCatalog, register: Register, *, after: int, xid: int
    ) -> None:
        self.done: list[Change] = []
        self.open: list[Change] = []
        self.position = after
        self.xid = xid
        # Replaced, never altered: `settled` is what both were at `position`, whatever the open
        # transaction has found out since.
        self.errored: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        self.settled = (self.errored, self.versions)
        # Tables whose changes count: oid -> schema.table. Others are passed over.
        self.live: dict[int, str] = {}
        self._catalog = catalog
        self._register = register
        self._known: dict[int, Rows] = {}  # every relation that was described
        self._reading: dict[bytes, _Reading] = {}  # those whose rows are read
        self._transaction: Transaction | None = None
        self._begin: WalBegin | None = None
        self._commit_lsn = 0
        self._ordinal = 0
        self._nowhere: Table | None = None

    @property
    def between_transactions(self) -> bool:
        """Whether nothing has begun that has not ended."""
        return self._begin is None

    def feed(self, lsn: int, data: bytes) -> None:
        """Take one message."""
        # The type byte and the relation say at once how to read a row.
        reading = self._reading.get(data[:5])
        transaction = self._transaction
        if reading is not None and transaction is not None:
            op, read, table = reading
            try:
                key, before, kind, after, changed, unchanged = read(data)
            except DecodeError as error:
                self._cannot_read(table, error)
                self._passed_over(lsn, data)
                return
            self._ordinal = at = self._ordinal + 1
            position = PostgresPosition(self._commit_lsn, lsn)
            # All by position: this is the one line that runs for every row.
            self.open.append(
                Change(op, table, key, before, kind, after, changed, unchanged,
                       transaction, at, position)
            )  # fmt: skip
        elif data[:1] in _OPERATIONS:
            self._passed_over(lsn, data)
        else:
            self._handle(parse(data), lsn)

    def _handle(self, message: Parsed, lsn: int) -> None:
        match message:
            case WalBegin():
                self._started(message)
            case WalCommit():
                self._committed(message)
            case WalRelation():
                self._described(message, lsn)
            case WalTruncate():
                self._truncated(message, lsn)
            case Message():
                self._logical_message(message, lsn)

    def take_open(self) -> list[Change]:
        """The changes of the open transaction so far, but one: the last must be known as such."""
        taken, self.open = self.open[:-1], self.open[-1:]
        return taken

    def _started(self, begin: WalBegin) -> None:
        if self._begin is not None:
            raise ProtocolError("a transaction began inside another")
        self._begin = begin
        self._commit_lsn = begin.commit_lsn
        self._ordinal = 0
        if begin.commit_lsn >= self.position:
            self.xid = _full_xid(begin.xid, self.xid)
            now = time.time_ns() // 1000
            self._transaction = Transaction(str(self.xid), begin.commit_time, now)

    def _committed(self, commit: WalCommit) -> None:
        if self._begin is None:
            raise ProtocolError("a transaction ended that had not begun")
        if self.open:
            end(self.open[-1], commit.end_lsn)
            self.done += self.open
            self.open = []
        self.position = max(self.position, commit.end_lsn)
        self.settled = (self.errored, self.versions)
        self._begin = self._transaction = None

    def _cannot_read(self, table: Table, error: DecodeError) -> None:
        self.errored = self.errored | {f"{table.schema}.{table.name}": str(error)}
        self._settle(table.relation)

    def _passed_over(self, lsn: int, data: bytes) -> None:
        """A row that does not become a change of its own."""
        self._expect_begun()
        relation = int.from_bytes(data[1:5], "big")
        rows = self._known.get(relation)
        if rows is None:
            raise ProtocolError(f"a row of relation {relation}, which was not described")
        path = self.live.get(relation)
        if path in self.errored and self._transaction is not None:
            self._undecoded(path, rows.table, lsn, data)

    def _settle(self, relation: int) -> None:
        """Rows of a relation are read only while it is live and not errored."""
        path = self.live.get(relation)
        rows = self._known.get(relation)
        number = relation.to_bytes(4, "big")
        if rows is None or path is None or path in self.errored:
            for kind in _OPERATIONS:
                self._reading.pop(kind + number, None)
        else:
            self._reading[b"I" + number] = (Op.INSERT, rows.insert, rows.table)
            self._reading[b"U" + number] = (Op.UPDATE, rows.update, rows.table)
            self._reading[b"D" + number] = (Op.DELETE, rows.delete, rows.table)

    def renew(
        self, live: dict[int, str], errored: dict[str, str], versions: dict[str, int]
    ) -> None:
        """Take up tables that were copied meanwhile."""
        self.live, self.errored = dict(live), dict(errored)
        self.versions = self.versions | versions
        self.settled = (self.errored, self.versions)
        for relation, rows in self._known.items():
            if relation in live and rows.table.version == 0:
                self._known[relation] = rows.of(self._register(rows.table))
            self._settle(relation)

    def _undecoded(self, path: str, table: Table, lsn: int, data: bytes) -> None:
        """Keep the bytes, so that nothing is acknowledged that is not in the log."""
        kept = {
            "error": self.errored[path],
            "operation": _OPERATIONS[data[:1]],
            "pgoutput": base64.b64encode(data).decode(),
        }
        self._add(Op.MESSAGE, table, lsn, kept)

    def _described(self, relation: WalRelation, lsn: int) -> None:
        rows = self._rows_of(relation)
        path = self.live.get(relation.id)
        if path is None:
            self._known[relation.id] = rows
            self._settle(relation.id)
            return
        self._versioned(rows, path, lsn, {})

    def _rows_of(self, relation: WalRelation) -> Rows:
        announced_by = 0 if self._transaction is None else self.xid
        return self._catalog.describe_relation(relation, announced_by=announced_by)

    def _versioned(self, rows: Rows, path: str, lsn: int, ddl: dict[str, Any]) -> None:
        table = self._register(rows.table)
        self._known[table.relation] = rows.of(table)
        self._settle(table.relation)
        if self.versions.get(path) != table.version or ddl:
            self.versions = self.versions | {path: table.version}
            if self._transaction is not None:
                self._add(Op.SCHEMA, table, lsn, schema(table) | ddl)

    def _truncated(self, truncate: WalTruncate, lsn: int) -> None:
        if self._transaction is None:
            self._expect_begun()
            return
        captured = [
            each for each in truncate.relations if each in self.live and each in self._known
        ]
        payload = {
            "cascade": truncate.cascade,
            "restart_identity": truncate.restart_identity,
            "relations": captured,
        }
        for relation in captured:
            self._add(Op.TRUNCATE, self._known[relation].table, lsn, payload)

    def _logical_message(self, message: Message, lsn: int) -> None:
        if message.prefix == HEARTBEAT:
            return
        if not message.transactional:
            self._outside_transaction(message)
        elif self._transaction is None:
            self._expect_begun()
        elif message.prefix == DDL:
            self._altered(message, lsn)
        elif message.prefix == ANNOTATION:
            self._annotated(message, lsn)
        else:
            self._add(Op.MESSAGE, self._no_table(), lsn, _message_payload(message))

    def _annotated(self, message: Message, lsn: int) -> None:
        transaction = self._transaction
        assert transaction is not None
        metadata, whole = annotated(transaction.metadata, message.content)
        # Nobody has seen the transaction yet, and its changes share this one value.
        _set(transaction, "metadata", metadata)
        if not whole:
            self._add(Op.MESSAGE, self._no_table(), lsn, _message_payload(message))

    def _outside_transaction(self, message: Message) -> None:
        """A message that belongs to no transaction is one by itself."""
        # Its LSN is where its record ends, which is where the next one begins: perhaps a commit.
        if message.lsn <= self.position:
            return
        now = time.time_ns() // 1000
        transaction = Transaction(f"message-{message.lsn:X}", now, now)
        position = PostgresPosition(message.lsn, message.lsn)
        payload = msgspec.json.encode(_message_payload(message))
        change = _rowless(Op.MESSAGE, self._no_table(), payload, transaction, 1, position)
        end(change, message.lsn)
        self.done.append(change)
        self.position = message.lsn

    def _altered(self, message: Message, lsn: int) -> None:
        try:
            ddl = msgspec.json.decode(message.content, type=_Ddl)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._add(Op.MESSAGE, self._no_table(), lsn, _message_payload(message))
            return
        statement = {"ddl_type": ddl.tag.replace(" ", "_"), "ddl_command": ddl.sql}
        for table in ddl.tables:
            path = self.live.get(table.oid)
            if path is not None and table.columns:
                self._versioned(self._rows_of(table.relation()), path, lsn, statement)
            elif path is not None:
                self._add(Op.SCHEMA, self._last_known(table), lsn, statement | {"dropped": True})

    def _last_known(self, table: _DdlTable) -> Table:
        """A table that is gone; its columns are forgotten unless it had a row just now."""
        known = self._known.get(table.oid)
        if known is None or known.table.version == 0:
            return self._register(self._rows_of(table.relation()).table)
        return known.table

    def _add(self, op: Op, table: Table, lsn: int, payload: dict[str, Any]) -> None:
        assert self._transaction is not None
        self._ordinal += 1
        position = PostgresPosition(self._commit_lsn, lsn)
        content = msgspec.json.encode(payload)
        self.open.append(_rowless(op, table, content, self._transaction, self._ordinal, position))

    def _no_table(self) -> Table:
        if self._nowhere is None:
            self._nowhere = self._register(self._catalog.sourceless())
        return self._nowhere

    def _expect_begun(self) -> None:
        if self._begin is None:
            raise ProtocolError("a change outside a transaction")


# Anybody may write a message that looks like the trigger's: numbers are checked before use.
_Oid = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _DdlColumn(msgspec.Struct, frozen=True):
    name: str
    type_id: _Oid
    modifier: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
    key: bool


class _DdlTable(msgspec.Struct, frozen=True):
    oid: _Oid
    schema: str
    name: str
    identity: str
    columns: tuple[_DdlColumn, ...] = ()

    def relation(self) -> WalRelation:
        """What the Relation message will say when the next row comes."""
        columns = tuple(
            RelationColumn(column.name, column.key, column.type_id, column.modifier)
            for column in self.columns
        )
        return WalRelation(self.oid, self.schema, self.name, self.identity, columns)


class _Ddl(msgspec.Struct, frozen=True):
    """What the event trigger of `ddl` writes."""

    tag: str
    sql: str
    tables: tuple[_DdlTable, ...]


def end(change: Change, end_lsn: int) -> None:
    """Make a change that nobody has seen yet the last of its transaction, which ends there."""
    at = change.position
    _set(change, "position", PostgresPosition(at.commit, at.own, end_lsn))
    _set(change, "last", True)


def schema(table: Table) -> dict[str, Any]:
    """What a SCHEMA change says."""
    columns = [
        {"name": column.name, "type": column.type, "key": column.key} for column in table.columns
    ]
    return {"columns": columns}


def _rowless(
    op: Op,
    table: Table,
    payload: bytes,
    transaction: Transaction,
    ordinal: int,
    at: PostgresPosition,
) -> Change:
    """A change that is not about a row."""
    return Change(
        op, table, None, None, BeforeKind.NONE, payload, None, (), transaction, ordinal, at
    )


def _message_payload(message: Message) -> dict[str, Any]:
    payload: dict[str, Any] = {"prefix": message.prefix, "transactional": message.transactional}
    try:
        payload["content"] = message.content.decode()
    except UnicodeDecodeError:
        payload["content_base64"] = base64.b64encode(message.content).decode()
    return payload


def _full_xid(xid: int, near: int) -> int:
    """The 64-bit transaction id nearest to `near` whose low 32 bits are `xid`."""
    full = (near & ~0xFFFFFFFF) | xid
    if full - near > 1 << 31 and full >= 1 << 32:
        return full - (1 << 32)
    if near - full > 1 << 31:
        return full + (1 << 32)
    return full
