"""The notification: a `cdc_event` for clients that show what changed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import msgspec

from ..change.event import BeforeKind, Change, Op, Table
from ._line import one_line
from ._pick import picked
from ._tables import PerTable
from .facts import FormatOptions
from .timestamps import iso

ON_REQUEST = frozenset({Op.TRUNCATE, Op.SCHEMA, Op.MESSAGE})

OPERATIONS: Mapping[Op, str] = {
    Op.INSERT: "INSERT",
    Op.READ: "INSERT",
    Op.UPDATE: "UPDATE",
    Op.DELETE: "DELETE",
    Op.TRUNCATE: "TRUNCATE",
    Op.SCHEMA: "SCHEMA",
    Op.MESSAGE: "MESSAGE",
}

# A table outside is named with its schema. MySQL has no default: each table is of a database.
DEFAULT_SCHEMAS = {"postgres": "public", "sqlite": "main"}

_ON_REQUEST = frozenset(op.value for op in ON_REQUEST)
# Members of an enum, looked up once: on Python 3.11 that takes as long as a call.
_UPDATE, _DELETE, _FULL, _NONE = Op.UPDATE, Op.DELETE, BeforeKind.FULL, BeforeKind.NONE

Row = Mapping[str, msgspec.Raw]

_encode = msgspec.json.Encoder().encode
_columns = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True)
class Notification:
    """Rows inserted, updated and deleted; what is no row comes only when `include` names it."""

    include: frozenset[Op] = frozenset()

    name: ClassVar[str] = "notification"
    media_type: ClassVar[str] = "application/json"

    @classmethod
    def of(cls, options: FormatOptions) -> Self:
        return cls(options.include)

    def encode(self, change: Change) -> bytes | None:
        """The change as one message; None for an operation that was not requested."""
        op = change.op
        # By its text, whose hash is known: an enum's is worked out anew each time.
        opening = _openings(change.table)[op._value_]
        if op._value_ in _ON_REQUEST and op not in self.include:
            return None
        content = change.after or b"null"
        if op is _UPDATE or op is _DELETE:
            content += _before(change)
        if change.unchanged:
            content += b',"unchanged":' + _encode(change.unchanged)
        return b'{"type":"cdc_event","eventId":"%b",%b%b,"timestamp":"%b","version":1}' % (
            change.id.encode(),
            opening,
            one_line(content),
            iso(change.transaction.commit_time).encode(),
        )


def _openings_of(table: Table) -> dict[str, bytes]:
    """By operation: from after the id to before the row."""
    return {
        op.value: b'"tableName":%b,"operation":%b,"data":' % (_encode(_name(table)), _encode(name))
        for op, name in OPERATIONS.items()
    }


_openings = PerTable(_openings_of)


def _name(table: Table) -> str:
    return table.name if in_default_schema(table) else table.path


def in_default_schema(table: Table) -> bool:
    """Whether its bare name is enough."""
    return table.schema in ("", DEFAULT_SCHEMAS.get(table.connector))


def _before(change: Change) -> bytes:
    """What is known of the old row: all of a deleted one, of an updated one what changed."""
    before, kind = change.before, change.before_kind
    if before is None or kind is _NONE:
        return b',"beforeKind":"none"'
    if change.op is _DELETE:
        text = b',"beforeData":' + before
        return text if kind is _FULL else text + b',"beforeKind":"key"'
    if kind is _FULL:
        changed = change.changed
        return b',"beforeData":' + picked(before, _changed(change) if changed is None else changed)
    old_key = _old_key(change, before)
    data = b',"beforeData":' + _encode(old_key) if old_key else b""
    return data + b',"beforeKind":"key"'


def _changed(change: Change) -> tuple[str, ...]:
    """The columns that changed, when the source does not say."""
    return tuple(_differing(_columns(change.before or b"{}"), _columns(change.after or b"{}")))


def _old_key(change: Change, before: bytes) -> Row:
    """The old values of key columns that changed; of other columns nothing is known."""
    return _differing(_columns(before), _columns(change.key or b"{}"))


def _differing(old: Row, new: Row) -> Row:
    return {name: value for name, value in old.items() if name in new and new[name] != value}
