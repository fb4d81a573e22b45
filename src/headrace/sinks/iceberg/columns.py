"""The columns of an Iceberg history, and how they follow those of the source's table.

All columns of a change are there as in a Delta history. Beside them, `row` is a struct with the
table's own columns: of the row after the change, or before it was deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.schema import Schema
from pyiceberg.table.update.schema import UpdateSchema
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from ...change.arrow import arrow_schema, frame
from ...change.event import Column
from ...errors import TableFailed
from ..lake.shape import TENANT

COMMIT_TIME = "commit_time"
ROW = "row"
ELEMENT = "element"

Path = tuple[str, ...]

_PLAIN: dict[pa.DataType, IcebergType] = {
    pa.bool_(): BooleanType(),
    pa.int8(): IntegerType(),
    pa.int16(): IntegerType(),
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    pa.float32(): FloatType(),
    pa.float64(): DoubleType(),
    pa.string(): StringType(),
    pa.binary(): BinaryType(),
    pa.date32(): DateType(),
    pa.timestamp("us"): TimestampType(),
    pa.timestamp("us", tz="UTC"): TimestamptzType(),
}


def fixed_columns() -> pa.Schema:
    """The columns that every history has."""
    own = [(COMMIT_TIME, frame.FIELDS["captured_at"]), (TENANT, pa.string())]
    return pa.schema([*frame.schema(), *own])


def partition_sources() -> list[str]:
    """The columns that a history can be partitioned by."""
    return [each.name for each in fixed_columns() if not pa.types.is_nested(each.type)]


@dataclass(frozen=True, slots=True)
class TableVersion:
    """Columns that the source's table had for some time."""

    columns: tuple[Column, ...]
    connector: str
    as_text: frozenset[str] = frozenset()

    def types(self) -> dict[str, IcebergType]:
        """The Iceberg type of each column."""
        arrow = arrow_schema(self.columns, connector=self.connector, as_text=self.as_text)
        return {each.name: iceberg_type(each.type) for each in arrow}


def iceberg_type(kind: pa.DataType) -> IcebergType:
    """The type that holds all values of an Arrow type; ids are given when it becomes a column's.

    >>> str(iceberg_type(pa.list_(pa.int16())))
    'list<int>'
    """
    if pa.types.is_decimal(kind):
        return DecimalType(kind.precision, kind.scale)
    if pa.types.is_list(kind):
        return ListType(
            element_id=0, element_type=iceberg_type(kind.value_type), element_required=False
        )
    return _PLAIN[kind]


def holds(wider: IcebergType, kind: IcebergType) -> bool:
    """Whether a column of type `wider` takes all values of `kind`: Iceberg's type promotions.

    >>> holds(LongType(), IntegerType()), holds(IntegerType(), LongType())
    (True, False)
    """
    if isinstance(wider, DecimalType) and isinstance(kind, DecimalType):
        return bool(wider.scale == kind.scale and wider.precision >= kind.precision)
    if isinstance(wider, ListType) and isinstance(kind, ListType):
        return holds(wider.element_type, kind.element_type)
    promoted = (type(kind), type(wider)) in ((IntegerType, LongType), (FloatType, DoubleType))
    return promoted or (type(kind) is type(wider) and not isinstance(kind, ListType))


def row_types(schema: Schema) -> dict[str, IcebergType]:
    """The types of the table's own columns, as a history has them."""
    rows = (each.field_type for each in schema.fields if each.name == ROW)
    return {
        each.name: each.field_type
        for struct in rows
        if isinstance(struct, StructType)
        for each in struct.fields
    }


def fits(schema: Schema, version: TableVersion) -> bool:
    """Whether the rows of a version can be written as the history is."""
    known = row_types(schema)
    return all(name in known and holds(known[name], kind) for name, kind in version.types().items())


def evolve(update: UpdateSchema, schema: Schema, version: TableVersion) -> None:
    """Add the columns that a version has more, and widen types.

    TableFailed: a column's type becomes one that Iceberg does not promote it to.
    """
    known, wanted = row_types(schema), version.types()
    if not known and wanted:
        fields = [NestedField(0, name, kind, required=False) for name, kind in wanted.items()]
        update.add_column(ROW, StructType(*fields))
        return
    for name, kind in wanted.items():
        if name not in known:
            update.add_column((ROW, name), kind)
        elif not holds(known[name], kind):
            for path, promoted in _promotions((ROW, name), known[name], kind):
                update.update_column(path, promoted)


def _promotions(
    path: Path, old: IcebergType, new: IcebergType
) -> Iterator[tuple[Path, IcebergType]]:
    if not holds(new, old):
        raise TableFailed(
            f"column {path[1]!r} is {old} in the Iceberg table and becomes {new}, and Iceberg "
            "has no such promotion"
        )
    if isinstance(old, ListType) and isinstance(new, ListType):
        yield from _promotions((*path, ELEMENT), old.element_type, new.element_type)
    else:
        yield path, new


# --- values --------------------------------------------------------------------------------------


def typed_rows(decoded: pa.Table, present: pa.Array, target: pa.StructType) -> pa.Array:
    """The struct `row`: decoded columns with the types that the history has.

    `present` says which rows there are; columns that a version does not have are null.
    """
    arrays = [
        contiguous(decoded[each.name]).cast(each.type)
        if each.name in decoded.column_names
        else pa.nulls(decoded.num_rows, each.type)
        for each in target
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(target), mask=pc.invert(present))


def contiguous(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def names_in_text(table: str, as_text: Sequence[str]) -> frozenset[str]:
    """The columns of a table that are kept as text.

    >>> sorted(names_in_text("public.a", ["public.a.x", "public.ab.y"]))
    ['x']
    """
    prefix = f"{table}."
    return frozenset(each.removeprefix(prefix) for each in as_text if each.startswith(prefix))
