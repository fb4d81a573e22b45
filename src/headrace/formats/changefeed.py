"""The changefeed event: PUT or DELETE of a key, its row as a JSON document in a string."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import msgspec

from ..change.event import Change, Op
from .facts import FormatOptions
from .key import previous_primary_key, primary_key

ON_REQUEST = frozenset({Op.TRUNCATE, Op.SCHEMA, Op.MESSAGE})

EventType = Literal["PUT", "DELETE", "TRUNCATE", "SCHEMA", "MESSAGE"]

TYPES: dict[Op, EventType] = {
    Op.INSERT: "PUT",
    Op.UPDATE: "PUT",
    Op.READ: "PUT",
    Op.DELETE: "DELETE",
    Op.TRUNCATE: "TRUNCATE",
    Op.SCHEMA: "SCHEMA",
    Op.MESSAGE: "MESSAGE",
}


class ChangefeedMetadata(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the event comes from; the last two appear only where they say something."""

    table: str
    pk: str
    operation: Op
    schema: str
    unchanged: tuple[str, ...] = ()  # columns the source did not send: not in `value`, not null
    previous_key: str | None = None  # the key this row had before, which no longer exists


class ChangefeedEvent(msgspec.Struct, frozen=True):
    """One event of the changefeed."""

    sequence: int
    type: EventType
    key: str
    value: str | None
    timestamp_ms: int
    metadata: ChangefeedMetadata


_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Changefeed:
    """Rows put and deleted; what is neither comes only when `include` names it."""

    include: frozenset[Op] = frozenset()

    name: ClassVar[str] = "changefeed"
    media_type: ClassVar[str] = "application/json"

    @classmethod
    def of(cls, options: FormatOptions) -> Self:
        return cls(options.include)

    def encode(self, change: Change) -> bytes | None:
        """The change as one event; None for an operation that was not requested."""
        op, table = change.op, change.table
        if op in ON_REQUEST and op not in self.include:
            return None
        pk = primary_key(change)
        previous = previous_primary_key(change)
        event = ChangefeedEvent(
            change.sequence,
            TYPES[op],
            f"{table.name}:{pk}",
            None if op is Op.DELETE or change.after is None else str(change.after, "utf-8"),
            change.transaction.commit_time // 1000,
            ChangefeedMetadata(
                table.name,
                pk,
                op,
                table.schema,
                change.unchanged,
                None if previous is None else f"{table.name}:{previous}",
            ),
        )
        return _encode(event)
