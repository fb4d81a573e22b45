"""The Savegress event: a change with its old row beside the new one, always under the same keys.

What all changes of a table share is written once; the images go in as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple

import msgspec

from ..change.connector import connector
from ..change.event import BeforeKind, Change, Op, Table, Transaction
from ._line import one_line
from ._tables import PerTable
from .facts import Facts, FormatOptions
from .timestamps import iso, second

OPERATIONS = {
    Op.INSERT: "INSERT",
    Op.UPDATE: "UPDATE",
    Op.DELETE: "DELETE",
    Op.READ: "INSERT",
    Op.TRUNCATE: "DDL",
    Op.SCHEMA: "DDL",
}
"""What each operation is called here; what is missing is not carried."""

_DDL = frozenset(op.value for op, name in OPERATIONS.items() if name == "DDL")

_encode = msgspec.json.Encoder().encode


# --- events --------------------------------------------------------------------------------------

# Times come as seconds and microseconds.
_EVENT = (
    b'{"id":"%b",%b,"timestamp":"%b.%06dZ","transaction_id":%b,"position":%b,%b'
    b',"metadata":%b,"captured_at":"%b.%06dZ"%b}}'
)


class _Head(NamedTuple):
    """What all changes of one version of a table share."""

    # By operation and kind of old row: from the source to the operation, and the metadata's end.
    ends: dict[tuple[str, str], tuple[bytes, bytes]]
    metadata: bytes  # up to the time of capture
    position: Callable[[Change], Mapping[str, Any]]


@dataclass(frozen=True)
class Savegress:
    """Rows inserted, updated and deleted, and changes of tables; messages are not carried."""

    facts: Facts
    _heads: PerTable[_Head] = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "savegress"
    media_type: ClassVar[str] = "application/json"

    @classmethod
    def of(cls, options: FormatOptions) -> "Savegress | SavegressTransactions":
        return SavegressTransactions(options.facts) if options.markers else cls(options.facts)

    def __post_init__(self) -> None:
        """Make room for what all changes of a table share."""
        object.__setattr__(self, "_heads", PerTable(lambda table: _head(table, self.facts)))

    def __reduce__(self) -> tuple[type["Savegress"], tuple[Facts]]:
        return Savegress, (self.facts,)

    def encode(self, change: Change) -> bytes | None:
        """The change as one event; None for a message."""
        ends, metadata, position = self._heads(change.table)
        found = ends.get((change.op._value_, change.before_kind._value_))
        if found is None:
            return None
        opening, own = found
        if change.unchanged:
            own = b'%b,"unchanged":%b' % (own, _encode(change.unchanged))
        transaction = change.transaction
        committed, committed_rest = divmod(transaction.commit_time, 1_000_000)
        captured, captured_rest = divmod(transaction.captured_at, 1_000_000)
        return _EVENT % (
            change.id.encode(),
            opening,
            second(committed),
            committed_rest,
            _encode(transaction.id),
            _encode(position(change)),
            _content(change),
            metadata,
            second(captured),
            captured_rest,
            own,
        )


def _head(table: Table, facts: Facts) -> _Head:
    where = {"source": table.connector, "schema": table.schema, "table": table.name}
    ends = {
        (op.value, kind.value): (_encode({**where, "operation": name})[1:-1], _own(op, kind))
        for op, name in OPERATIONS.items()
        for kind in BeforeKind
    }
    return _Head(ends, _encode(table_metadata(table, facts))[:-1], _position_of(table))


def _content(change: Change) -> bytes:
    if change.op._value_ in _DDL:
        return b'%b,"before":null,"after":null' % _encode(ddl(change))[1:-1]
    images = b'"before":%b,"after":%b' % (change.before or b"null", change.after or b"null")
    return one_line(images)


class TableDdl(msgspec.Struct, frozen=True):
    """The statement that changed a table, as far as the source sent it."""

    ddl_type: str = "SCHEMA"
    ddl_command: str | None = None


_ddl = msgspec.json.Decoder(TableDdl)


def ddl(change: Change) -> TableDdl:
    """What changed the table."""
    if change.op is Op.TRUNCATE:
        return TableDdl("TRUNCATE")
    return _ddl.decode(change.after) if change.after else TableDdl()


# --- positions -----------------------------------------------------------------------------------


def position(change: Change) -> Mapping[str, Any]:
    """Where a change stands, as consumers see it; most sources' positions describe themselves."""
    return _position_of(change.table)(change)


def _position_of(table: Table) -> Callable[[Change], Mapping[str, Any]]:
    return connector(table.connector).savegress_position or _own_position


def _own_position(change: Change) -> Mapping[str, Any]:
    return change.position.to_json()


# --- metadata ------------------------------------------------------------------------------------

Metadata = dict[str, str | int | tuple[str, ...]]


def own_metadata(change: Change) -> Metadata:
    """The metadata of one change, without what all changes of its table share."""
    metadata: Metadata = {"captured_at": iso(change.transaction.captured_at)}
    metadata |= _particulars(change.op, change.before_kind)
    return metadata | {"unchanged": change.unchanged} if change.unchanged else metadata


def table_metadata(table: Table, facts: Facts) -> Metadata:
    """The metadata that all changes of a table share."""
    server = facts.server(table.source)
    metadata: Metadata = {
        "connector_version": facts.version,
        "database": table.database,
        "server": server.host or server.instance or server.source,
    }
    if (number := server_id(table)) is not None:
        metadata["server_id"] = number
    if facts.pipeline:
        metadata["pipeline_id"] = f"pipe-{facts.pipeline}"
    return metadata


def server_id(table: Table) -> int | None:
    """The number that a server gives itself; None: it has none.

    PostgreSQL's is its system identifier, the middle of `postgres:7412345678901234567:shop`.
    """
    connector, _, rest = table.origin.partition(":")
    number = rest.partition(":")[0]
    return int(number) if connector == "postgres" and number.isdecimal() else None


def _particulars(op: Op, before_kind: BeforeKind) -> Mapping[str, str]:
    if op is Op.READ:
        return {"snapshot": "true"}
    if op in (Op.UPDATE, Op.DELETE) and before_kind is not BeforeKind.FULL:
        return {"before_kind": before_kind.value}
    return {}


def _own(op: Op, before_kind: BeforeKind) -> bytes:
    own = _particulars(op, before_kind)
    return b",%b" % _encode(own)[1:-1] if own else b""


# --- transactions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavegressTransactions:
    """The same events, with a marker where each transaction begins and where it ends."""

    facts: Facts
    # One for all streams: it keeps what the changes of a table share.
    _events: Savegress = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "savegress"
    media_type: ClassVar[str] = "application/json"

    def __post_init__(self) -> None:
        object.__setattr__(self, "_events", Savegress(self.facts))

    def __reduce__(self) -> tuple[type["SavegressTransactions"], tuple[Facts]]:
        return SavegressTransactions, (self.facts,)

    def open(self) -> "MarkedEvents":
        """Begin a stream."""
        return MarkedEvents(self._events)

    def begin(self, change: Change) -> int:
        """Whichever change comes first, it needs no other."""
        return change.sequence


@dataclass(frozen=True)
class MarkedEvents:
    """A stream of events and markers; it remembers nothing, so it can begin anywhere."""

    format: Savegress

    def see(self, change: Change, *, wanted: bool) -> Sequence[bytes]:
        """Nothing: no change needs an earlier one."""
        return ()

    def encode(self, change: Change, *, wanted: bool) -> Sequence[bytes]:
        """What the next change adds: its event, if it is wanted, and the markers around it."""
        events: list[bytes] = []
        if change.ordinal == 1:
            events.append(_marker(b"BEGIN", change.transaction))
        if wanted and (event := self.format.encode(change)) is not None:
            events.append(event)
        if change.last:
            events.append(_marker(b"COMMIT", change.transaction))
        return events


def _marker(operation: bytes, transaction: Transaction) -> bytes:
    return b'{"operation":"%b","transaction_id":%b,"timestamp":"%b"}' % (
        operation,
        _encode(transaction.id),
        iso(transaction.commit_time).encode(),
    )


# --- batches -------------------------------------------------------------------------------------


class _EventIdentity(msgspec.Struct, frozen=True):
    """The fields that identify an event; a marker has no id."""

    operation: str
    transaction_id: str
    timestamp: str
    id: str = ""


_decode_identity = msgspec.json.Decoder(_EventIdentity).decode


def batch(events: Sequence[bytes], timestamp: int | None = None) -> bytes:
    """Events together as one object; `timestamp` is in microseconds, else it is the last event's.

    The id depends on nothing but which events these are, so a batch sent again has the same.
    """
    if not events:
        raise ValueError("a batch holds at least one event")
    decoded = [_decode_identity(_beginning(event)) for event in events]
    names = [each.id or f"{each.operation} {each.transaction_id}" for each in decoded]
    return b'{"batch_id":"batch-%b","batch_size":%d,"batch_timestamp":"%b","events":[%b]}' % (
        blake2b(_encode(names), digest_size=16).hexdigest().encode(),
        len(events),
        (decoded[-1].timestamp if timestamp is None else iso(timestamp)).encode(),
        b",".join(events),
    )


def _beginning(event: bytes) -> bytes:
    """The event without its images: in a string the quotes of this key would be escaped."""
    start, found, _ = event.partition(b',"position":')
    return start + b"}" if found else event
