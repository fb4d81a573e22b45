"""The tasks behind `entities`: events of whole transactions, as the format `entity` writes them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from ..change.arrow import frame
from ..formats import Rendered
from ..formats.entity import Entity

Batches = Iterator[pa.RecordBatch]

FIELDS = (*frame.REQUIRED, "epoch")

SCHEMA = pa.schema(
    [
        ("sequence", pa.int64()),
        ("event_id", pa.string()),
        ("event_type", pa.string()),
        ("entity_type", pa.string()),
        ("entity_id", pa.string()),
        ("tenant_id", pa.string()),
        ("trigger", pa.string()),
        ("changed_fields", pa.list_(pa.string())),
        ("timestamp", frame.FIELDS["captured_at"]),
        ("transaction_id", pa.string()),
        ("event", pa.string()),
    ]
)
IN_ORDER = ("epoch", "sequence")


@dataclass(frozen=True, slots=True)
class Render:
    """What a task does with whole transactions."""

    format: Entity
    ordered: bool

    def __call__(self, batches: Batches) -> Batches:
        """Their events."""
        for changes in frame.whole(batches if self.ordered else _sorted(batches)):
            events = [
                event
                for transaction in frame.transactions(changes)
                for event in self.format.render(transaction)
            ]
            yield _rows(events)


def _sorted(batches: Batches) -> Batches:
    given = list(batches)
    if given:
        changes = pa.Table.from_batches(given)
        yield from changes.sort_by([(name, "ascending") for name in IN_ORDER]).to_batches()


class _Source(msgspec.Struct):
    transaction_id: str


class _Entity(msgspec.Struct):
    entity_type: str
    entity_id: str | None
    tenant_id: str | None


class _Operation(msgspec.Struct):
    trigger: str
    changed_fields: list[str]


class _Event(msgspec.Struct):
    """An event, as far as it has columns."""

    event_id: str
    event_type: str
    timestamp: str
    source: _Source
    entity: _Entity
    operation: _Operation


_event = msgspec.json.Decoder(_Event).decode


def _rows(events: Sequence[Rendered]) -> pa.RecordBatch:
    decoded = [_event(event.payload) for event in events]
    moments = pa.array([each.timestamp for each in decoded], pa.string())
    arrays = [
        [event.sequence for event in events],
        [each.event_id for each in decoded],
        [each.event_type for each in decoded],
        [each.entity.entity_type for each in decoded],
        [each.entity.entity_id for each in decoded],
        [each.entity.tenant_id for each in decoded],
        [each.operation.trigger for each in decoded],
        [each.operation.changed_fields for each in decoded],
        moments.cast(SCHEMA.field("timestamp").type),
        [each.source.transaction_id for each in decoded],
        [event.payload for event in events],
    ]
    return pa.record_batch(
        [pa.array(array, field.type) for array, field in zip(arrays, SCHEMA, strict=True)],
        schema=SCHEMA,
    )
