"""Changes written down as they are, and small files of them joined, inside Spark's tasks.

Files of a partition (a day, of a tenant) hold changes in the log's order. Nobody knows of a file
until the driver has committed it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from .. import frame
from ._plan import Part
from ._store import Added, Folder

DAY = "day"
TENANT = "tenant"
SCHEMA = pa.schema([*frame.schema(), (DAY, pa.date32()), (TENANT, pa.string())])
SAID = pa.schema([("said", pa.string())])
SAID_DDL = "said string"

FILE_BYTES = 32_000_000  # about the size that files grow to
_GENERATION = 8  # files of about one size are joined when there are so many
_HELD_BYTES = 128_000_000  # of changes in a task's memory before they are written
_NAME = "changes"
_ROW_OPS = ("INSERT", "READ", "UPDATE", "DELETE")
_IN_ORDER = [("epoch", "ascending"), ("sequence", "ascending")]

_to_json = msgspec.json.Encoder().encode


class Appended(msgspec.Struct):
    """What a task has met and written; nothing of it counts until it is committed."""

    changes: int = 0
    last: int = 0
    epochs: set[str] = set()
    added: list[Added] = []


class Joined(msgspec.Struct, frozen=True):
    """Files and what one task made of them."""

    removed: list[str]
    added: list[Added]


@dataclass(frozen=True, slots=True)
class Append:
    """What a task does with its part of a batch."""

    folder: Folder
    partition_by: tuple[str, ...]
    tenant: str  # a column; "": there are no tenants
    epoch: str  # of the log …
    applied: int  # … of which the table has everything up to here

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write down what the table does not have yet."""
        told = Appended()
        held: list[pa.Table] = []
        size = 0
        for batch in batches:
            held.append(self._fresh(told, pa.Table.from_batches([batch])))
            size += held[-1].nbytes
            if size >= _HELD_BYTES:
                told.added += self._written(held)
                held, size = [], 0
        told.added += self._written(held)
        yield said(told)

    def _fresh(self, told: Appended, changes: pa.Table) -> pa.Table:
        """The changes that are not in the table, with their partition."""
        # Spark gives times in the session's zone; the moments are the same.
        changes = changes.cast(frame.schema())
        told.changes += changes.num_rows
        told.last = max(told.last, pc.max(changes["sequence"]).as_py() or 0)
        told.epochs.update(pc.unique(changes["epoch"]).to_pylist())
        known = pc.and_(
            pc.equal(changes["epoch"], self.epoch),
            pc.less_equal(changes["sequence"], self.applied),
        )
        changes = changes.filter(pc.invert(known))
        days = pc.struct_field(changes["transaction"], "commit_time").cast(pa.date32())
        changes = changes.append_column(DAY, days)
        return changes.append_column(TENANT, tenants(changes, self.tenant))

    def _written(self, held: Sequence[pa.Table]) -> list[Added]:
        if not held:
            return []
        changes = pa.concat_tables(held)
        groups = changes.select(self.partition_by).group_by(list(self.partition_by)).aggregate([])
        return [
            self._file(changes.filter(_matches(changes, group)), group)
            for group in groups.to_pylist()
        ]

    def _file(self, changes: pa.Table, group: dict[str, Any]) -> Added:
        partition = {name: None if value is None else str(value) for name, value in group.items()}
        rows = changes.drop_columns(list(group)).sort_by(_IN_ORDER)
        return self.folder.write(rows, _NAME, partition)


def _matches(changes: pa.Table, group: dict[str, Any]) -> Any:
    """Which changes belong to a partition; null is a value like others."""
    found: Any = pa.scalar(True)
    for name, value in group.items():
        column = changes[name]
        same = pc.is_null(column) if value is None else pc.equal(column, value)
        found = pc.and_(found, pc.fill_null(same, False))
    return found


def tenants(changes: pa.Table, column: str) -> pa.Array:
    """Whose row each change is about: the column's value after it, else before it, else its key."""
    if not column:
        return pa.nulls(changes.num_rows, pa.string())
    tenant_of = _Tenant(column)
    ops = changes["op"].to_pylist()
    images = zip(*(changes[name].to_pylist() for name in ("after", "before", "key")), strict=True)
    return pa.array(
        [
            next(filter(None, map(tenant_of, of)), None) if op in _ROW_OPS else None
            for op, of in zip(ops, images, strict=True)
        ],
        pa.string(),
    )


class _Tenant:
    """Finds one column's value in an image without reading the others."""

    def __init__(self, column: str) -> None:
        shape: Any = msgspec.defstruct(
            "Tenant", [("value", msgspec.Raw, msgspec.Raw())], rename={"value": column}
        )
        self._decode = msgspec.json.Decoder(shape).decode

    def __call__(self, image: str | None) -> str | None:
        """The value as text; None: there is none. An empty text is none to Delta as well."""
        value = bytes(self._decode(image).value) if image else b""
        if value in (b"", b"null"):
            return None
        return str(msgspec.json.decode(value)) if value[:1] == b'"' else value.decode()


@dataclass(frozen=True, slots=True)
class Join:
    """What a task does with files that are to become one."""

    folder: Folder
    work: list[list[Part]] = field(default_factory=list)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Join the files whose number comes."""
        for batch in batches:
            for at in batch.column("id").to_pylist():
                yield said(self._joined(self.work[at]))

    def _joined(self, parts: Sequence[Part]) -> Joined:
        rows = pa.concat_tables([self.folder.read(part.path) for part in parts])
        added = self.folder.write(rows.sort_by(_IN_ORDER), _NAME, dict(parts[0].partition))
        return Joined([part.path for part in parts], [added])


def due(parts: Iterable[Part]) -> list[list[Part]]:
    """Files worth joining, a list for each new one.

    Files wait for others of about their size, so that a change is written again only as often as
    its file has grown eightfold.
    """
    waiting: dict[tuple[object, int], list[Part]] = defaultdict(list)
    for part in parts:
        if part.size < FILE_BYTES / _GENERATION:
            size = int(math.log(max(part.size, 1), _GENERATION))
            waiting[part.partition, size].append(part)
    return [
        found[at : at + _GENERATION]
        for found in waiting.values()
        for at in range(0, len(found) - _GENERATION + 1, _GENERATION)
    ]


def said(what: Appended | Joined) -> pa.RecordBatch:
    """A task's word to the driver."""
    return pa.RecordBatch.from_pylist([{"said": _to_json(what).decode()}], SAID)
