"""The rows of a table that have certain values, such as those of a foreign key: found in tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from ...change.arrow.frame import pack
from ..lake import vectors
from ..lake.delta import Delta
from ..lake.deltalog import DataFile
from ..lake.plan import CURRENT, PlannedFile
from ..lake.storage import Folder
from ..results import result, results
from .bounds import EXACT, column_bounds
from .keys import row_numbers
from .parquet import PAST, kind, read_in_groups

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TASK_ROWS = 2_000_000  # of the files that one task looks through, about

Values = tuple[Any, ...]
Wanted = Mapping[tuple[str, ...], Collection[Values]]
"""By columns: the values that rows are looked for by."""


@dataclass(frozen=True, slots=True)
class RowSearch:
    """What one task does: look for rows in some files of a table."""

    folder: Folder
    files: tuple[PlannedFile, ...]
    schema: pa.Schema  # the columns that are read
    wanted: Wanted


class FoundRows(msgspec.Struct, frozen=True):
    """What a task has found, as Arrow."""

    packed: bytes


def searches(delta: Delta, columns: Sequence[str], wanted: Wanted) -> list[RowSearch]:
    """The work of looking for rows, as the table is now; `columns` are read of them."""
    schema = delta.schema
    own = [CURRENT] if CURRENT in schema.names else []
    read = pa.schema([schema.field(name) for name in (*columns, *own)])
    files = [
        PlannedFile(file.path, file.rows, 0, vector=file.vector, partition=file.partition)
        for file in delta.files.values()
        if kind(file.path) != PAST and _may_have(file, wanted, schema)
    ]
    work: list[RowSearch] = []
    some: list[PlannedFile] = []
    for file in files:
        some.append(file)
        if sum(each.rows for each in some) >= _TASK_ROWS or file is files[-1]:
            work.append(RowSearch(delta.folder, tuple(some), read, wanted))
            some = []
    return work


def _may_have(file: DataFile, wanted: Wanted, schema: pa.Schema) -> bool:
    """Whether some row of a file may have the values, by its bounds."""
    for (first, *_), values in wanted.items():
        of = schema.field(first).type
        known = column_bounds(file, first, of) if any(each(of) for each in EXACT) else None
        if known is None or any(known[0] <= each[0] <= known[1] for each in values):
            return True
    return False


def run_searches(spark: SparkSession | None, work: Sequence[RowSearch]) -> list[dict[str, Any]]:
    """The rows that are found, each once; without Spark they are looked for here."""
    if not work:
        return []
    if spark is None:
        found = [search(each) for each in work]
    else:
        numbers = spark.range(len(work), numPartitions=len(work))
        found = results(numbers, _Searching(tuple(work)), FoundRows)
    return [row for each in found for row in pa.ipc.open_stream(each.packed).read_all().to_pylist()]


@dataclass(frozen=True, slots=True)
class _Searching:
    """What tasks do with the work whose numbers they get."""

    work: tuple[RowSearch, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                yield result(search(self.work[number]))


def search(work: RowSearch) -> FoundRows:
    """Look through files, a row group at a time."""
    found = [rows for file in work.files for rows in _found_in(work, file)]
    return FoundRows(pack(pa.concat_tables([work.schema.empty_table(), *found])))


def _found_in(work: RowSearch, file: PlannedFile) -> Iterator[pa.Table]:
    dead = vectors.read(work.folder, file.vector) if file.vector else BitMap()
    alive = np.setdiff1d(np.arange(file.rows, dtype=np.int64), row_numbers(dead))
    for _, rows in read_in_groups(work.folder, file, alive, work.schema):
        mask = _any([_all_in(rows, *each) for each in work.wanted.items()])
        if CURRENT in rows.column_names:
            mask = pc.and_(mask, pc.fill_null(rows[CURRENT], fill_value=False))
        yield rows.filter(mask)


def _all_in(
    rows: pa.Table, columns: tuple[str, ...], values: Collection[Values]
) -> pa.ChunkedArray:
    """The rows each of whose columns has one of its values: all that are wanted, and some more."""
    masks = [
        pc.is_in(rows[name], value_set=_typed((each[at] for each in values), rows[name].type))
        for at, name in enumerate(columns)
    ]
    mask = masks[0]
    for other in masks[1:]:
        mask = pc.and_(mask, other)
    return mask


def _any(masks: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    mask = masks[0]
    for other in masks[1:]:
        mask = pc.or_(mask, other)
    return mask


def _typed(values: Iterator[Any], of: pa.DataType) -> pa.Array:
    """Values as a column has them; one that it cannot hold is in no row."""
    found = []
    for value in set(values):
        try:
            found.append(pa.scalar(value, of))
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            continue
    return pa.array([each.as_py() for each in found], of)
