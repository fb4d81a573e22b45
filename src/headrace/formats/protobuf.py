"""The Savegress event as a protobuf message (`headrace/v1/changefeed.proto`).

Messages written one after the other are one message: what all changes of a table share, what is a
change's own, and its rows are each written by themselves.
"""

import json
from dataclasses import dataclass, field
from typing import ClassVar

from ..change.event import Change, Table
from ..v1 import changefeed_pb2 as v1
from ._tables import PerTable
from .facts import Facts
from .protostruct import framed, written
from .savegress import OPERATIONS, Metadata, ddl, own_metadata, position, table_metadata

_CONNECTORS = frozenset(v1.Position.DESCRIPTOR.fields_by_name)
_BEFORE, _AFTER = v1.CDCEvent.BEFORE_FIELD_NUMBER, v1.CDCEvent.AFTER_FIELD_NUMBER


@dataclass(frozen=True)
class Protobuf:
    """Events as messages: bytes and not lines of text, so no stream of lines can carry them."""

    facts: Facts
    _shared: PerTable[bytes] = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "protobuf"
    media_type: ClassVar[str] = "application/x-protobuf"

    def __post_init__(self) -> None:
        """Make room for what all changes of a table share."""
        object.__setattr__(self, "_shared", PerTable(lambda table: _head(table, self.facts)))

    def __reduce__(self) -> tuple[type["Protobuf"], tuple[Facts]]:
        return Protobuf, (self.facts,)

    def encode(self, change: Change) -> bytes | None:
        """The change as one serialized CDCEvent; None for what Savegress does not carry."""
        operation = OPERATIONS.get(change.op)
        if operation is None:
            return None
        event, rows = _own(change, operation), b""
        if operation == "DDL":
            _put_ddl(event, change)
        else:
            rows = _put_images(event, change)
        return b"%b%b%b" % (self._shared(change.table), _serialized(event), rows)


def _head(table: Table, facts: Facts) -> bytes:
    return _serialized(
        v1.CDCEvent(
            source=table.connector,
            schema=table.schema,
            table=table.name,
            metadata=_texts(table_metadata(table, facts)),
        )
    )


def _own(change: Change, operation: str) -> v1.CDCEvent:
    seconds, rest = divmod(change.transaction.commit_time, 1_000_000)
    return v1.CDCEvent(
        id=change.id,
        operation=operation,
        timestamp={"seconds": seconds, "nanos": rest * 1000},
        transaction_id=change.transaction.id,
        position=_position(change),
        metadata=_texts(own_metadata(change)),
        sequence=change.sequence,
    )


def _position(change: Change) -> v1.Position | None:
    """Its messages have the fields of the JSON, under the connector's name."""
    name = change.table.connector
    return v1.Position(**{name: position(change)}) if name in _CONNECTORS else None


def _put_ddl(event: v1.CDCEvent, change: Change) -> None:
    statement = ddl(change)
    event.ddl_type = statement.ddl_type
    if statement.ddl_command is not None:
        event.ddl_command = statement.ddl_command


def _put_images(event: v1.CDCEvent, change: Change) -> bytes:
    """Put the rows into an event as JSON; returns them as its Structs."""
    rows = b""
    if change.before is not None:
        event.before_json = change.before
        rows = _row(_BEFORE, change.before)
    if change.after is not None:
        event.after_json = change.after
        rows += _row(_AFTER, change.after)
    return rows


def _row(number: int, image: bytes) -> bytes:
    row = written(image)
    return b"" if row is None else framed(number, row)


def _texts(metadata: Metadata) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in metadata.items()
    }


def _serialized(event: v1.CDCEvent) -> bytes:
    # A map has no order of its own.
    return event.SerializeToString(deterministic=True)
