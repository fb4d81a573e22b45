"""What a history keeps of a change: all its fields, or an event in a format; with its partition.

This runs in Spark's tasks, on changes that come straight from the source: in order, and each
transaction whole within one task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ...change.arrow import frame
from ...change.event import Change, Table
from ...errors import ConfigError, nearest
from ...formats import AnyFormat, Format, Rendered, StreamFormat, TransactionFormat
from ...formats.catalogue import Formats, event_names, names
from ...transforms.rules import TableTransform, expect_not_computed
from .. import Sink
from ..erasing import ErasedRow
from .erasure import ChangeEraser, EventEraser, RowEraser

DAY = "day"
TENANT = "tenant"
PARTITIONS = ((DAY, pa.date32()), (TENANT, pa.string()))

_ROW_OPS = ("INSERT", "READ", "UPDATE", "DELETE")
_EVENT_FIELDS = ("sequence", "id", "op", "source", "schema", "table")

Batches = Iterable[pa.RecordBatch]


class RowShape(Protocol):
    """How changes become the rows of a history."""

    @property
    def schema(self) -> pa.Schema:
        """The rows' columns, with those of PARTITIONS at the end."""
        ...

    def __call__(self, batches: Batches) -> Iterator[pa.Table]:
        """The rows of ordered changes."""
        ...


@dataclass(frozen=True, slots=True)
class WholeChanges:
    """Changes with all their fields."""

    tenant: str  # a column; "": there are no tenants

    @property
    def schema(self) -> pa.Schema:
        """The fields of a change."""
        return pa.schema([*frame.schema(), *PARTITIONS])

    def __call__(self, batches: Batches) -> Iterator[pa.Table]:
        """Each change as it is."""
        for batch in batches:
            changes = pa.Table.from_batches([batch])
            days = commit_times(changes).cast(pa.date32())
            partitions = (days, tenants(changes, self.tenant))
            yield pa.table([*changes.columns, *partitions], schema=self.schema)


@dataclass(frozen=True, slots=True)
class FormattedEvents:
    """Changes in a format, as text, beside what identifies them."""

    formats: Formats
    format: str
    tenant: str  # a column; an entity's event itself says whose it is
    tables: tuple[str, ...] = ()  # globs of those whose changes events may stand for; none: all

    @property
    def schema(self) -> pa.Schema:
        """What all events have."""
        moment = frame.FIELDS["captured_at"]
        own = [("commit_time", moment), ("event", pa.string()), ("epoch", pa.string())]
        return pa.schema([*frame.schema(_EVENT_FIELDS), *own, *PARTITIONS])

    def __call__(self, batches: Batches) -> Iterator[pa.Table]:
        """The events of all changes that the format carries, one by one or as they belong."""
        for changes in frame.whole(batches):
            events = list(self._events(changes))
            at = pa.array([at for at, _ in events], pa.int64())
            yield self._rows(changes, at, [event for _, event in events])

    def _events(self, changes: pa.Table) -> Iterator[tuple[int, bytes]]:
        """Events, each with the row of the change that it stands for."""
        render = _render(self.formats, self.format, changes["epoch"][0].as_py())
        begin = 0
        for transaction in frame.transactions(changes):
            rows = {change.sequence: at for at, change in enumerate(transaction)}
            for sequence, event in render(transaction):
                at = rows[sequence]
                if self._wants(transaction[at].table):
                    yield begin + at, event
            begin += len(transaction)

    def _wants(self, table: Table) -> bool:
        return not self.tables or any(map(table.matches, self.tables))

    def _rows(self, changes: pa.Table, at: pa.Array, events: Sequence[bytes]) -> pa.Table:
        # Events of whole transactions are about entities, and name their tenant.
        of_entities = isinstance(self.formats.named(self.format), TransactionFormat)
        times = commit_times(changes).take(at)
        arrays = [
            *(changes[name].take(at) for name in _EVENT_FIELDS),
            times,
            pa.array(events, pa.string()),
            changes["epoch"].take(at),
            times.cast(pa.date32()),
            _owners(events) if of_entities else tenants(changes, self.tenant).take(at),
        ]
        return pa.table(arrays, schema=self.schema)


class Shaped(Sink):
    """What sinks that keep changes, all their fields or their events, have in common."""

    __slots__ = ()

    if TYPE_CHECKING:  # frozen fields of derived classes

        @property
        def format(self) -> str: ...  # "": all fields

        @property
        def formats(self) -> Formats: ...

        @property
        def tenant(self) -> str: ...

    @property
    def whole_transactions(self) -> bool:
        """Only whole transactions show what happened to an entity."""
        return bool(self.format) and isinstance(self.formats.named(self.format), TransactionFormat)

    @property
    def renders(self) -> bool:
        """Whether it keeps events, and not all fields."""
        return bool(self.format)

    @property
    def shape(self) -> RowShape:
        """What is kept of changes."""
        if not self.format:
            return WholeChanges(self.tenant)
        return FormattedEvents(self.formats, self.format, self.tenant, self.tables)

    def eraser(self, row: ErasedRow) -> RowEraser:
        """How a row is taken out of what is kept."""
        key = row.key_in(self.shaping)
        return EventEraser(row) if self.format else ChangeEraser(row, key)

    def expect_shape(self, taker: str) -> None:
        """Refuse a format that cannot be kept, and a tenant that it does not go with."""
        if self.format:
            expect_format(self.format, self.formats, taker)
        if self.whole_transactions and self.tenant:
            raise ConfigError(
                f"tenant: {self.tenant} does not go with format: {self.format}; leave it out, the "
                "model says whose an entity is"
            )
        if self.whole_transactions:
            expect_not_computed(self.transforms, f"format: {self.format}")
        expect_tenant(self.tenant, self.transforms)


def expect_tenant(column: str, transforms: Mapping[str, TableTransform]) -> None:
    """Refuse transforms that hide whose a row is."""
    for table, rule in transforms.items() if column else ():
        hidden = rule.select and column not in rule.select
        if hidden or (column in rule.mask and rule.mask[column] is None):
            raise ConfigError(
                f"transforms.{table}: {column} says whose a row is (tenant), so it cannot be left "
                "out or made null"
            )


def expect_format(name: str, formats: Formats, taker: str) -> None:
    """Refuse what is no format, and one whose events cannot be identified by their change."""
    known = event_names()
    if name not in names():
        raise ConfigError(f"format: no format called {name}{nearest(name, known)}")
    if isinstance(formats.named(name), StreamFormat):
        raise ConfigError(
            f"format: {name} is for streams, in which events may belong to no change; "
            f"{taker} takes: {', '.join(known)}"
        )


Render = Callable[[Sequence[Change]], Iterable[Rendered]]


def renderer(format: AnyFormat) -> Render:
    """What a format makes of transactions."""
    if isinstance(format, TransactionFormat):
        return format.render
    assert not isinstance(format, StreamFormat), f"{format.name} is for streams"
    return partial(_one_by_one, format)


def _one_by_one(format: Format, transaction: Sequence[Change]) -> list[Rendered]:
    encoded = [(change.sequence, format.encode(change)) for change in transaction]
    return [Rendered(sequence, payload) for sequence, payload in encoded if payload is not None]


@lru_cache(maxsize=64)
def _render(formats: Formats, name: str, epoch: str) -> Render:
    # Kept for all tasks of a process: a format remembers what the changes of a table share.
    return renderer(formats.of_log(epoch).named(name))


def commit_times(changes: pa.Table) -> pa.ChunkedArray:
    """When each change was committed."""
    return pc.struct_field(changes["transaction"], "commit_time")


# --- tenants -------------------------------------------------------------------------------------


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


class _Entity(msgspec.Struct):
    tenant_id: str | None = None


class _Owned(msgspec.Struct):
    """An entity's event, as far as it says whose it is."""

    entity: _Entity


_owned = msgspec.json.Decoder(_Owned).decode


def _owners(events: Sequence[bytes]) -> pa.Array:
    return pa.array([_owned(event).entity.tenant_id or None for event in events], pa.string())
