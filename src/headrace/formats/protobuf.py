"""The Savegress event as a protobuf message (`headrace/v1/changefeed.proto`)."""

import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from google.protobuf.struct_pb2 import Struct

from ..event import Change
from ..v1 import changefeed_pb2 as v1
from .facts import Facts
from .savegress import OPERATIONS, ddl, metadata, position

# Parsers give up at messages a hundred deep; an object within an object takes three.
DEEPEST = 30


@dataclass(frozen=True)
class Protobuf:
    """Events as messages: bytes and not lines of text, so no stream of lines can carry them."""

    facts: Facts

    name: ClassVar[str] = "protobuf"
    media_type: ClassVar[str] = "application/x-protobuf"

    def encode(self, change: Change) -> bytes | None:
        """The change as one serialized message; None for what is not carried."""
        event = cdc_event(change, self.facts)
        # Deterministic: a map has no order of its own.
        return None if event is None else event.SerializeToString(deterministic=True)


def cdc_event(change: Change, facts: Facts) -> v1.CDCEvent | None:
    """The change as a message; None for what Savegress does not carry."""
    operation = OPERATIONS.get(change.op)
    if operation is None:
        return None
    table, transaction = change.table, change.transaction
    event = v1.CDCEvent(
        id=change.id,
        source=table.connector,
        schema=table.schema,
        table=table.name,
        operation=operation,
        transaction_id=transaction.id,
        # Its messages have the fields of the JSON, under the connector's name.
        position=v1.Position(**{table.connector: position(change)}),
        metadata={name: _text(value) for name, value in metadata(change, facts).items()},
        sequence=change.sequence,
    )
    event.timestamp.FromMicroseconds(transaction.commit_time)
    if operation == "DDL":
        _tell_ddl(event, change)
    else:
        _tell_images(event, change)
    return event


def _tell_ddl(event: v1.CDCEvent, change: Change) -> None:
    told = ddl(change)
    event.ddl_type = told.ddl_type
    if told.ddl_command is not None:
        event.ddl_command = told.ddl_command


def _tell_images(event: v1.CDCEvent, change: Change) -> None:
    if change.before is not None:
        event.before_json = change.before
        _fill(event.before, change.before)
    if change.after is not None:
        event.after_json = change.after
        _fill(event.after, change.after)


def _fill(struct: Struct, image: bytes) -> None:
    """Put a row into a Struct; one too deep for any parser stays in the JSON beside it alone."""
    try:
        row = json.loads(image, parse_int=_number, parse_float=_number)
        columns = _fitting(row, depth=1)
    except RecursionError:
        return
    struct.SetInParent()  # a row without columns is not the same as none
    struct.update(columns)


def _number(digits: str) -> float | str:
    """The number as a Struct holds it; one beyond a double's range keeps its digits, as text."""
    number = float(digits)
    return number if math.isfinite(number) else digits


def _fitting(value: Any, depth: int) -> Any:
    """The value as a message can hold it: what lies too deep becomes JSON text."""
    match value:
        case str():
            return _valid(value)
        case dict() | list() if depth > DEEPEST:
            return _valid(json.dumps(value, ensure_ascii=False))
        case dict():
            return {_valid(name): _fitting(each, depth + 1) for name, each in value.items()}
        case list():
            return [_fitting(each, depth + 1) for each in value]
    return value


def _valid(text: str) -> str:
    # A `json` column may hold half a surrogate pair, which is no Unicode; a message may not.
    return text if text.isascii() else text.encode(errors="replace").decode()


def _text(value: str | int | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
