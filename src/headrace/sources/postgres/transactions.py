"""pgoutput messages -> changes, a transaction at a time. No I/O of its own."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ...change.columns import schema_payload
from ...change.event import BeforeKind, Change, Op, Table, Transaction
from ...change.path import table_path
from ...errors import DecodeError, ProtocolError
from .. import Register
from .._annotations import annotated
from .history import HistoryProof
from .leaves import WrittenLeaves
from .looks import (
    DdlMessage,
    LookMessage,
    LookState,
    Numbering,
    TableLook,
    as_relation,
    compare,
    placed,
)
from .pgoutput import (
    Message,
    Parsed,
    WalBegin,
    WalCommit,
    WalRelation,
    WalTruncate,
    parse,
)
from .position import PostgresPosition
from .relations import RelationCatalog
from .rows import Row, Rows

ANNOTATION = "headrace"
HEARTBEAT = "headrace.heartbeat"
DDL = "headrace.ddl"
LOOK = "headrace.look"

_OPERATIONS = {b"I": Op.INSERT, b"U": Op.UPDATE, b"D": Op.DELETE}
_TEXTS = {25, 1043}  # text and varchar
_Reading = tuple[Op, Callable[[bytes], Row], Table]
_set = msgspec.structs.force_setattr


class PostgresAssembler:
    """Collects what the stream says into changes.

    `done` holds complete transactions, up to `position`; `open` the one that has begun.
    """

    def __init__(
        self,
        catalog: RelationCatalog,
        register: Register,
        *,
        after: int,
        xid: int,
        proof: HistoryProof | None = None,
        stop: Callable[[str, str], str] | None = None,
    ) -> None:
        """`stop` makes the error of a table that must not be read anew without being asked."""
        self.done: list[Change] = []
        self.open: list[Change] = []
        self.position = after
        self.xid = xid
        self.proof = proof or HistoryProof(after)
        self.last_begin: WalBegin | None = None  # of the last complete transaction of this stream
        # Replaced, never altered: `settled` is what they were at `position`, whatever the open
        # transaction has found out since.
        self.errored: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        self.looks: dict[str, LookState] = {}  # what the last look at each table has left
        self.again: dict[str, str] = {}  # tables that must be read anew, and why
        self.gone: frozenset[str] = frozenset()  # tables that were dropped, or have another name
        self._settle_state()
        # Tables whose changes count: oid -> schema.table. Others are passed over.
        self.live: dict[int, str] = {}
        self._catalog = catalog
        self._register = register
        self._stop = stop
        self._known: dict[int, Rows] = {}  # every relation that was described
        self._relations: dict[int, WalRelation] = {}  # as they were described last
        # Described in transactions that the log has, which may be older than what is known of them.
        self._pending: set[int] = set()
        self._uncertain: set[int] = set()  # whose columns, or their types, are not certain
        self._reading: dict[bytes, _Reading] = {}  # those whose rows are read
        self._transaction: Transaction | None = None
        self._begin: WalBegin | None = None
        self._commit_lsn = 0
        self._ordinal = 0
        self._nowhere: Table | None = None
        self._leaves = WrittenLeaves()

    @property
    def unlooked_leaves(self) -> Mapping[int, int]:
        """Partitions that were written to since the last look at their tables; leaf -> table."""
        return self._leaves.unlooked

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
        if not self.proof.proven:
            self.proof.began(begin)
        self._begin = begin
        self._commit_lsn = begin.commit_lsn
        self._ordinal = 0
        self._leaves.began()
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
        if self._leaves.new:
            self._expect_leaves(self._leaves.unlooked)
        if self._transaction is not None:
            self.last_begin = self._begin
        self.position = max(self.position, commit.end_lsn)
        self._settle_state()
        self._begin = self._transaction = None

    def _cannot_read(self, table: Table, error: DecodeError) -> None:
        self.errored = self.errored | {table.path: str(error)}
        state = self.looks.get(table.path)
        if state is not None and state.unseen(each.number for each in table.columns):
            self._read_anew(table.path, "a type of a new column was altered")
            self._uncertain.add(table.relation)
        self._settle(table.relation)

    def _passed_over(self, lsn: int, data: bytes) -> None:
        """A row that does not become a change of its own."""
        self._expect_begun()
        relation = int.from_bytes(data[1:5], "big")
        if self._taken_up(relation, lsn):
            self.feed(lsn, data)
            return
        rows = self._known.get(relation)
        if rows is None and relation not in self._pending:
            raise ProtocolError(f"a row of relation {relation}, which was not described")
        path = self.live.get(relation)
        if path in self.errored and rows is not None and self._transaction is not None:
            self._undecoded(path, rows.table, lsn, data)

    def _taken_up(self, relation: int, lsn: int) -> bool:
        """Describe a relation now that one of its rows counts."""
        if relation not in self._pending or self._transaction is None:
            return False
        self._described(self._relations[relation], lsn)
        return True

    def _settle_state(self) -> None:
        self.settled = (self.errored, self.versions, self.looks, self.again, self.gone)

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
        self,
        live: dict[int, str],
        errored: dict[str, str],
        versions: dict[str, int],
        looks: Mapping[str, LookState] | None = None,
    ) -> None:
        """Take up tables that were copied meanwhile."""
        self.live, self.errored = dict(live), dict(errored)
        self.versions = self.versions | versions
        self.looks, self.again, self.gone = dict(looks or {}), {}, frozenset()
        self._settle_state()
        uncertain = self._uncertain
        self._uncertain = {relation for relation in uncertain if relation not in live}
        if uncertain:
            self._catalog.forget_types()
        for relation, rows in list(self._known.items()):
            path = live.get(relation)
            current = rows.table.version > 0 and rows.path == path
            if path is not None and (not current or relation in uncertain):
                now, _ = self._rows_of(self._relations[relation], path)
                self._known[relation] = now.of(self._register(now.table))
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
        # Of a transaction before, in which its version was reported if that was new.
        older = relation.id in self._pending and self._relations[relation.id] == relation
        self._relations[relation.id] = relation
        path = self.live.get(relation.id)
        if self._transaction is None:
            self._known.pop(relation.id, None)
            self._pending.add(relation.id)
            self._settle(relation.id)
            return
        self._pending.discard(relation.id)
        rows, numbering = self._rows_of(relation, path)
        self._uncertain.discard(relation.id)
        if path is None:
            self._known[relation.id] = rows
            self._settle(relation.id)
            self._leaves.described_other(relation.id, self._ordinal)
            return
        state = self.looks.get(path)
        if not numbering.certain:
            self._uncertain.add(relation.id)
            self._read_anew(path, "it is not certain which columns DDL has dropped and added")
        elif state is not None:
            self._look_is(path, state.described(numbering))
            if self._printed_otherwise(rows.table):
                self._read_anew(path, "DDL has given a column another type")
        self._versioned(rows, path, lsn, {}, report=not older)
        if state is not None and state.parts is not None:
            self._leaves.described_whole(relation.id, self._ordinal)

    def _expect_leaves(self, leaves: Mapping[int, int]) -> None:
        """Read tables anew of which partitions with rows in the log are gone."""
        gone = self._catalog.gone_leaves(leaves)
        for leaf in gone:
            path = self.live.get(leaves[leaf])
            if path is not None:
                self._read_anew(path, "a partition with rows was detached or dropped")
        self._leaves.forget(gone)

    def _printed_otherwise(self, table: Table) -> bool:
        """Whether rows that were captured would be read in another way now."""
        known = self._known.get(table.relation)
        before = {c.number: c.type_id for c in known.table.columns} if known else {}
        types = ((before.get(c.number, c.type_id), c.type_id) for c in table.columns)
        return any(was != now and not {was, now} <= _TEXTS for was, now in types)

    def _rows_of(self, relation: WalRelation, path: str | None) -> tuple[Rows, Numbering]:
        announced_by = 0 if self._transaction is None else self.xid
        if path is None:
            return self._catalog.describe_relation(relation, announced_by=announced_by)
        return self._catalog.describe_relation(
            placed(relation, path), announced_by=announced_by, known=self.looks.get(path)
        )

    def _look_is(self, path: str, state: LookState) -> None:
        if self.looks.get(path) != state:
            self.looks = self.looks | {path: state}

    def _read_anew(self, path: str, why: str) -> None:
        """Rows in the log are not those of the table: a snapshot later, or an error now."""
        if self._stop is None:
            self.again = {path: why} | self.again
        elif path not in self.errored:
            self.errored = self.errored | {path: self._stop(path, why)}

    def _versioned(
        self, rows: Rows, path: str, lsn: int, ddl: dict[str, Any], *, report: bool = True
    ) -> None:
        table = self._register(rows.table)
        self._known[table.relation] = rows.of(table)
        self._settle(table.relation)
        if self.versions.get(path) != table.version or ddl:
            self.versions = self.versions | {path: table.version}
            if report:
                self._add(Op.SCHEMA, table, lsn, schema_payload(table) | ddl)

    def _truncated(self, truncate: WalTruncate, lsn: int) -> None:
        if self._transaction is None:
            self._expect_begun()
            return
        self._leaves.truncated(truncate.relations)
        for relation in truncate.relations:
            self._taken_up(relation, lsn)
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
        elif message.prefix == LOOK:
            self._looked(message, lsn)
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
            ddl = msgspec.json.decode(message.content, type=DdlMessage)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._add(Op.MESSAGE, self._no_table(), lsn, _message_payload(message))
            return
        statement = {"ddl_type": ddl.tag.replace(" ", "_"), "ddl_command": ddl.sql}
        for table in ddl.tables:
            path = self.live.get(table.oid)
            if path is None:
                continue
            if table.rewritten:
                self._read_anew(path, "DDL has rewritten its rows")
            elif table.numbered:
                self._looked_at(self._catalog.narrowed(table), path, lsn, statement)
            elif table.columns:
                self._versioned(self._rows_of(as_relation(table), path)[0], path, lsn, statement)
            else:
                self._dropped(table, path, lsn, statement)

    def _looked(self, message: Message, lsn: int) -> None:
        """A look of ours, which is exact here."""
        try:
            looks = msgspec.json.decode(message.content, type=LookMessage)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        for table in looks.tables:
            if table.oid in self.live and table.numbered:
                self._looked_at(table, self.live[table.oid], lsn, {})
                leaves = self._leaves.of(table.oid)
                if leaves:
                    self._expect_leaves(leaves)
                    self._leaves.forget(leaves)
        for table in looks.gone:
            path = table_path(table.schema, table.name)
            # Another table may have the name by now, and its snapshot.
            named = {oid for oid, each in self.live.items() if each == path}
            if named <= {table.oid} and path not in self.gone:
                self._dropped(table, path, lsn, {})

    def _looked_at(self, look: TableLook, path: str, lsn: int, statement: dict[str, Any]) -> None:
        found = compare(self.looks.get(path), look)
        if found.types:
            self._catalog.forget_types()
        if found.reason:
            self._read_anew(path, found.reason)
        self._look_is(path, found.state)
        rows = self._catalog.describe_look(placed(look, path), announced_by=self.xid)
        self._relations[look.oid] = as_relation(look)
        self._pending.discard(look.oid)
        self._versioned(rows, path, lsn, statement)

    def _dropped(self, table: TableLook, path: str, lsn: int, statement: dict[str, Any]) -> None:
        """Nothing of a table is left under its name."""
        named = placed(table, path)
        known = self._known.get(table.oid)
        if known is None or known.table.version == 0:
            rows, _ = self._catalog.describe_relation(as_relation(named), announced_by=0)
            last = self._register(rows.table)
        else:
            last = known.table
        self._add(Op.SCHEMA, last, lsn, statement | {"dropped": True})
        self.live = {oid: each for oid, each in self.live.items() if oid != table.oid}
        self.gone = self.gone | {path}
        self._settle(table.oid)

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


def end(change: Change, end_lsn: int) -> None:
    """Make a change that nobody has seen yet the last of its transaction, which ends there."""
    at = change.position
    _set(change, "position", PostgresPosition(at.commit, at.own, end_lsn))
    _set(change, "last", True)


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
