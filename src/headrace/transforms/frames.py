"""A transform applied to changes that are rows of a DataFrame (`change.arrow.frame`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from ..change.arrow import frame, row_schema
from ..change.event import Change
from .changes import ShapedChanges
from .rules import Transforms

_SHAPED = ("op", "key", "before", "before_kind", "after", "changed", "unchanged", "row_schema")


@dataclass(frozen=True, slots=True)
class ShapedFrames:
    """Runs in Spark's tasks, for sinks that take rows."""

    transforms: Transforms
    fields: tuple[str, ...]  # that are handed on

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The changes as a sink may see them."""
        shaped = ShapedChanges(self.transforms)
        for batch in batches:
            pairs = shaped.each(frame.changes(batch))
            seen = pa.array([at for at, (_, passes) in enumerate(pairs) if passes], pa.int64())
            rows = batch.take(seen).select(self.fields)
            yield _with(rows, [change for change, passes in pairs if passes])


def _with(rows: pa.RecordBatch, changes: Sequence[Change]) -> pa.RecordBatch:
    for name in _SHAPED:
        at = rows.schema.get_field_index(name)
        if at >= 0:
            values = [_shown(name, change) for change in changes]
            field = rows.schema.field(at)
            rows = rows.set_column(at, field, pa.array(values, field.type))
    return rows


def _shown(name: str, change: Change) -> object:
    if name == "row_schema":
        return row_schema(change.table) if change.table.columns else None
    value = getattr(change, name)
    return value.decode() if isinstance(value, bytes) else value
