"""The envelope that Debezium 3 writes, with schemas disabled.

Consumers of Debezium's topics find the keys they know, in the order they know. The values of
rows are Headrace's own: decimals as text, times as ISO 8601. Each source says what its own members
of the `source` block are; one that says nothing has the keys that all Debezium's connectors share.
"""

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import msgspec

from ..change.connector import connector
from ..change.event import Change, Op, Table
from ._line import one_line
from ._tables import PerTable
from .facts import Facts, FormatOptions

OPERATIONS: Mapping[Op, str] = {
    Op.INSERT: "c",
    Op.UPDATE: "u",
    Op.DELETE: "d",
    Op.READ: "r",
    Op.TRUNCATE: "t",
    Op.MESSAGE: "m",
}
"""What each operation is called here; what is missing is not carried."""

UNAVAILABLE = "__debezium_unavailable_value"
"""Stands for the value of a column that the source did not send."""

UNDECODED = "headrace.undecoded"
"""The prefix of messages that hold a row which could not be read."""

_encode = msgspec.json.Encoder().encode
_names = {op.value: name.encode() for op, name in OPERATIONS.items()}


@dataclass(frozen=True)
class Debezium:
    """Rows, truncated tables and messages; changes of a table's columns are not carried."""

    facts: Facts = field(default_factory=Facts)
    _sources: PerTable["_Source"] = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "debezium"
    media_type: ClassVar[str] = "application/json"

    @classmethod
    def of(cls, options: FormatOptions) -> Self:
        return cls(options.facts)

    def __post_init__(self) -> None:
        """Make room for what all changes of a table share."""
        sources = PerTable(lambda table: _Source(table, self.facts))
        object.__setattr__(self, "_sources", sources)

    def __reduce__(self) -> tuple[type["Debezium"], tuple[Facts]]:
        return Debezium, (self.facts,)

    def encode(self, change: Change) -> bytes | None:
        """The change as one envelope; None for a change of a table's columns."""
        op = change.op
        if op is Op.SCHEMA:
            return None
        source = self._sources(change.table).block(change)
        captured = change.transaction.captured_at
        if op is Op.MESSAGE:
            return b'{"op":"m","ts_ms":%d,"source":%b,"transaction":null,"message":%b}' % (
                captured // 1000,
                source,
                _message(change),
            )
        before, after = (b"null", b"null") if op is Op.TRUNCATE else _images(change)
        return (
            b'{"before":%b,"after":%b,"source":%b,"transaction":null,"op":"%b",'
            b'"ts_ms":%d,"ts_us":%d,"ts_ns":%d}'
        ) % (
            before,
            after,
            source,
            _names[op._value_],
            captured // 1000,
            captured,
            captured * 1000,
        )


class _Source:
    """The `source` block, of which most is the same for all changes of a table."""

    def __init__(self, table: Table, facts: Facts) -> None:
        shown = connector(table.connector).debezium
        name = shown.connector or table.connector
        self._start = _members(version=facts.version, connector=name, name=table.source)
        self._database = _members(db=table.database)
        schema = {"schema": table.schema} if shown.schema else {}
        self._table = _members(**schema, table=table.name)
        self._sequence = shown.sequence
        self._own = shown.members

    def block(self, change: Change) -> bytes:
        """The block of one change."""
        committed = change.transaction.commit_time
        return _BLOCK % (
            self._start,
            committed // 1000,
            b"true" if _in_snapshot(change) else b"false",
            self._database,
            _sequence(change) if self._sequence else b"null",
            committed,
            committed * 1000,
            self._table,
            self._own_members(change),
        )

    def _own_members(self, change: Change) -> bytes:
        own = _encode(self._own(change))[1:-1] if self._own else b""
        return b"," + own if own else b""


_BLOCK = b'{%b,"ts_ms":%d,"snapshot":"%b",%b,"sequence":%b,"ts_us":%d,"ts_ns":%d,%b%b}'


def _sequence(change: Change) -> bytes:
    # Debezium writes the last commit before this transaction, which is known only to a reader
    # that has followed from there. This transaction's own commit orders the same way.
    return rb'"[\"%d\",\"%d\"]"' % (change.position.commit, change.position.own)


def _members(**values: str) -> bytes:
    return _encode(values)[1:-1]


def _in_snapshot(change: Change) -> bool:
    """Whether the change is part of a snapshot: its rows, or what empties the table before."""
    if change.op is Op.TRUNCATE:
        return bool(_content(change).get("snapshot"))
    return change.op is Op.READ


def _images(change: Change) -> tuple[bytes, bytes]:
    after = one_line(change.after or b"null")
    if change.unchanged:
        absent = _encode(dict.fromkeys(change.unchanged, UNAVAILABLE))
        after = absent if after == b"{}" else b"%b,%b" % (after[:-1], absent[1:])
    return one_line(change.before or b"null"), after


# --- messages ------------------------------------------------------------------------------------


def _content(change: Change) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.json.decode(change.after or b"{}")
    return content


def _message(change: Change) -> bytes:
    content = _content(change)
    if "prefix" not in content:
        # A row that could not be read: its content is what is known of it.
        content = {"prefix": UNDECODED, "content": str(change.after or b"", "utf-8")}
    data = content.get("content_base64") or b64encode(content["content"].encode()).decode()
    return _encode({"prefix": content["prefix"], "content": data})
