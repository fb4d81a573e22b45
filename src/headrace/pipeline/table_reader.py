"""The rows of a Delta table as Spark reads them, without a jar: each task reads some of its files.

Rows that deletion vectors mark as dead are left out. What is read is the version that the table
has when the read is planned.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from deltalake.schema import Schema
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from ..change.path import split_path
from ..errors import ConfigError
from ..sinks.lake import vectors
from ..sinks.lake.catalog.spark import PLACE
from ..sinks.lake.conform import conformed
from ..sinks.lake.deltalog import DataFile, DeltaLog, TableState
from ..sinks.lake.features import expect_readable
from ..sinks.lake.storage import Folder
from ..sinks.tables.bounds import column_bounds
from ..sinks.tables.keys import row_numbers
from .table_options import TableOptions

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.parquet import ParquetFile

_TASK_BYTES = 32_000_000  # of files that one task reads, unless one alone is larger


@dataclass(frozen=True, slots=True)
class Bounds:
    """The values of a column that a query wants: from `low` to `high`; None: without end."""

    low: Any = None
    high: Any = None

    def within(self, other: "Bounds") -> "Bounds":
        """What both allow."""
        low = max((each for each in (self.low, other.low) if each is not None), default=None)
        high = min((each for each in (self.high, other.high) if each is not None), default=None)
        return Bounds(low, high)

    def meets(self, least: Any, most: Any) -> bool:
        """Whether values between these two may be among them."""
        below = self.low is not None and most < self.low
        above = self.high is not None and least > self.high
        return not (below or above)


@dataclass(frozen=True, slots=True)
class TableScan:
    """What tasks must know of a table."""

    folder: Folder
    schema: pa.Schema
    wanted: tuple[tuple[str, Bounds], ...] = ()

    def rows(self, file: DataFile) -> Iterator["RecordBatch"]:
        """The live rows of a file, row group by row group."""
        dead = row_numbers(vectors.read(self.folder, file.vector)) if file.vector else np.empty(0)
        with self.folder.open(file.path) as parquet:
            there = set(parquet.schema_arrow.names)
            names = [name for name in self.schema.names if name in there]
            begin = 0
            for group in range(parquet.num_row_groups):
                count = parquet.metadata.row_group(group).num_rows
                end = begin + count
                if self._may_have(parquet, group):
                    read = parquet.read_row_group(group, columns=names, use_threads=False)
                    if not names:  # all values are those of the partition, or null
                        read = pa.table({"_": pa.nulls(count)})
                    alive = np.ones(count, dtype=np.bool_)
                    alive[dead[(dead >= begin) & (dead < end)].astype(np.int64) - begin] = False
                    rows = conformed(read, self.schema, file.partition)
                    yield from (rows if alive.all() else rows.filter(pa.array(alive))).to_batches()
                begin = end

    def _may_have(self, parquet: "ParquetFile", group: int) -> bool:
        columns = parquet.metadata.row_group(group)
        known = {columns.column(at).path_in_schema: at for at in range(columns.num_columns)}
        for name, bounds in self.wanted:
            if name not in known or not _comparable(self.schema, name):
                continue
            found = columns.column(known[name]).statistics
            if found is None or not found.has_min_max or type(found.min) is not type(_any(bounds)):
                continue
            if not bounds.meets(found.min, found.max):
                return False
        return True

    def may_have(self, file: DataFile) -> bool:
        """Whether a file may hold rows that the query wants, by what the log says of it."""
        for name, bounds in self.wanted:
            if not _comparable(self.schema, name):
                continue
            found = column_bounds(file, name, self.schema.field(name).type)
            if found and type(found[0]) is type(_any(bounds)) and not bounds.meets(*found):
                return False
        return True


class FilesPartition(InputPartition):
    """What one task reads."""

    def __init__(self, value: tuple[DataFile, ...]) -> None:
        super().__init__(value)


class TableReader(DataSourceReader):
    """Reads a table as it is now."""

    def __init__(self, options: TableOptions) -> None:
        folder, state = _table(options)
        self._files = tuple(state.files.values())
        self._scan = TableScan(folder, _schema(options, state))

    def partitions(self) -> list[InputPartition]:
        """Files, small ones together."""
        wanted = [file for file in self._files if self._scan.may_have(file)]
        return [FilesPartition(tuple(files)) for files in _packed(wanted)]

    def read(self, partition: InputPartition) -> Iterator["RecordBatch"]:
        """The rows of some files, on an executor."""
        # A table without files gets a partition of Spark's own, with no value.
        if not isinstance(partition, FilesPartition):
            return
        for file in partition.value:
            yield from self._scan.rows(file)


class FilteredTableReader(TableReader):
    """The same for part of a table, where `spark.sql.python.filterPushdown.enabled` is set."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Pass over files and row groups without wanted rows; Spark still looks at the rest."""
        wanted: dict[str, Bounds] = {}
        for each in filters:
            attribute: tuple[str, ...] = getattr(each, "attribute", ())
            bounds = _bounds(each)
            if len(attribute) == 1 and bounds is not None:
                wanted[attribute[0]] = wanted.get(attribute[0], Bounds()).within(bounds)
        self._scan = replace(self._scan, wanted=tuple(wanted.items()))
        return filters


def table_schema(options: TableOptions) -> StructType:
    """The columns that a read gives."""
    _, state = _table(options)
    return from_arrow_schema(_schema(options, state), prefer_timestamp_ntz=True)


def catalog_options(options: TableOptions, schema: StructType) -> TableOptions:
    """The options of a read; a table of Spark's catalog has its folder in a column's metadata."""
    places = [each.metadata[PLACE] for each in schema.fields if PLACE in each.metadata]
    if options.path or not places:
        return options
    found = options.of_catalog(schema.names, places[0])
    there = table_schema(found)
    for wanted in schema.fields:
        if there[wanted.name].dataType != wanted.dataType:
            raise ConfigError(
                f"column {wanted.name} has another type in Spark's catalog than in {places[0]}",
                hint="A running pipeline with `catalog` brings the catalog up to date.",
            )
    return found


def _table(options: TableOptions) -> tuple[Folder, TableState]:
    options.expect_reading()
    folder = options.folder
    if options.table:
        folder = folder.within(*split_path(options.table))
    state = DeltaLog(folder).read()
    if state is None:
        raise ConfigError(
            f"there is no Delta table in {folder.uri}",
            hint="path is the folder of all tables together with the option table, or that of one.",
        )
    expect_readable(folder.uri, state.protocol, state.metadata)
    return folder, state


def _schema(options: TableOptions, state: TableState) -> pa.Schema:
    whole = pa.schema(Schema.from_json(state.metadata.schema_string).to_arrow())
    if not options.chosen:
        return whole
    if unknown := [name for name in options.chosen if name not in whole.names]:
        raise ConfigError(
            f"the option columns names {unknown[0]!r}; there are: {', '.join(whole.names)}"
        )
    return pa.schema([whole.field(name) for name in options.chosen])


def _packed(files: Sequence[DataFile]) -> Iterator[list[DataFile]]:
    held: list[DataFile] = []
    size = 0
    for file in files:
        if held and size + file.size > _TASK_BYTES:
            yield held
            held, size = [], 0
        held.append(file)
        size += file.size
    if held:
        yield held


def _bounds(each: Filter) -> Bounds | None:
    """The values that a filter lets pass, as far as bounds can say."""
    match each:
        case EqualTo(value=value) | EqualNullSafe(value=value) if value is not None:
            return Bounds(value, value)
        case GreaterThan(value=int(value)):
            return Bounds(low=value + 1)
        case LessThan(value=int(value)):
            return Bounds(high=value - 1)
        case GreaterThan(value=value) | GreaterThanOrEqual(value=value):
            return Bounds(low=value)
        case LessThan(value=value) | LessThanOrEqual(value=value):
            return Bounds(high=value)
        case In(value=values) if values and None not in values:
            return Bounds(min(values), max(values))
    return None


def _any(bounds: Bounds) -> Any:
    return bounds.high if bounds.low is None else bounds.low


def _comparable(schema: pa.Schema, name: str) -> bool:
    """Whether the bounds in statistics are values that a filter can be compared with."""
    if name not in schema.names:
        return False
    kind = schema.field(name).type
    return any(
        is_kind(kind)
        for is_kind in (
            pa.types.is_integer,
            pa.types.is_string,
            pa.types.is_date32,
            pa.types.is_decimal,
        )
    )
