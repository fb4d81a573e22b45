"""The live rows of some files in new files, sorted, inside Spark's tasks.

The rows stay what they are. Files may be taken whole, or only those of their rows that fall into a
range of the order: these are then dead in their file, and live in the new one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap

from ..lake import vectors
from ..lake.conform import conformed
from ..lake.plan import CURRENT, PlannedFile, TablePlan
from ..lake.storage import Added
from .evolution import Carry
from .keys import Numbers, bitmap, row_numbers
from .parquet import PAST, write_rows
from .rescue import with_carried_rescues

_SAMPLES = 8  # values of a file; one with so many row groups has their bounds


@dataclass(frozen=True, slots=True)
class KeyRange:
    """From `low` on and below `high`, by the first column of the order; None: without end.

    Rows without a value belong to the last range, and so does NaN.
    """

    low: object = None
    high: object = None

    def rows(self, column: pa.ChunkedArray) -> pa.ChunkedArray:
        """Which rows are in it."""
        inside = pa.chunked_array([pa.array(np.ones(len(column), dtype=np.bool_))])
        if self.low is not None:
            below = pc.less(column, pa.scalar(self.low, column.type))
            inside = pc.and_(inside, pc.invert(below))
        if self.high is not None:
            inside = pc.and_(inside, pc.less(column, pa.scalar(self.high, column.type)))
        return pc.fill_null(inside, self.high is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteWork:
    """What one task does."""

    plan: TablePlan
    name: str  # that the new files begin with
    whole: tuple[PlannedFile, ...]  # files that are replaced
    parts: tuple[PlannedFile, ...] = ()  # files of which only the rows of `range` are taken
    range: KeyRange = KeyRange()
    dead: Mapping[str, bytes] = field(default_factory=dict)  # rows that no vector knows of yet
    carry: Carry = field(
        default_factory=Carry
    )  # what the rows become, where their columns are others from now on


class Rewritten(msgspec.Struct, frozen=True):
    """What a task has made; nothing of it counts until it is committed."""

    added: list[Added]
    removed: list[str]
    taken: dict[str, bytes]  # by file: the rows that live elsewhere now, as a bitmap


def rewrite(work: RewriteWork) -> Rewritten:
    """Write the rows anew."""
    taken: dict[str, bytes] = {}
    read = [_live(work, file)[1] for file in work.whole]
    for file in work.parts:
        numbers, rows = _live(work, file, work.range)
        inside = work.range.rows(rows[work.plan.order[0]]).to_numpy().astype(np.bool_)
        if inside.any():
            read.append(rows.filter(pa.array(inside)))
            taken[file.path] = bitmap(numbers[inside]).serialize()
    rows = pa.concat_tables([work.plan.schema.empty_table(), *read])
    added = [
        each for name, part in _by_name(work, rows) for each, _ in write_rows(work.plan, part, name)
    ]
    return Rewritten(added, [file.path for file in work.whole], taken)


def _by_name(work: RewriteWork, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The rows by what their files are to be called: files of others may have past rows too."""
    if work.name == PAST or CURRENT not in rows.column_names:
        yield work.name, rows
        return
    yield work.name, rows.filter(rows[CURRENT])
    yield PAST, rows.filter(pc.invert(rows[CURRENT]))


def samples(plan: TablePlan, file: PlannedFile) -> list[tuple[Any, int]]:
    """Values of the order in a file, and about how many of its rows begin with each."""
    name = plan.order[0]
    with plan.folder.open(file.path) as parquet:
        metadata = parquet.metadata
        at = _column_at(metadata, name)
        if at is None:
            return []
        if metadata.num_row_groups < _SAMPLES:
            values = parquet.read(columns=[name], use_threads=False).column(0).drop_null()
            if pa.types.is_floating(values.type):
                values = values.filter(pc.invert(pc.is_nan(values)))
            values = values.take(pc.sort_indices(values))
            step = max(len(values) // _SAMPLES, 1)
            return [(value, step) for value in values[::step].to_pylist()]
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        known = [(group.column(at).statistics, group.num_rows) for group in groups]
        return [(each.min, rows) for each, rows in known if each and each.has_min_max]


def _column_at(metadata: pq.FileMetaData, column: str) -> int | None:
    paths = [metadata.schema.column(at).path for at in range(len(metadata.schema))]
    return paths.index(column) if column in paths else None


def _live(
    work: RewriteWork, file: PlannedFile, within: KeyRange | None = None
) -> tuple[Numbers, pa.Table]:
    """The rows of a file that are not dead, and their numbers; `within`: a range has all wanted."""
    plan = work.plan
    with plan.folder.open(file.path) as parquet:
        groups = (
            _groups(parquet, plan.order[0], within) if within else range(parquet.num_row_groups)
        )
        counts = [parquet.metadata.row_group(at).num_rows for at in range(parquet.num_row_groups)]
        begins = np.concatenate([[0], np.cumsum(counts)])
        read = parquet.read_row_groups(list(groups), use_threads=False)
    rows = conformed(work.carry.of(read), plan.schema, file.partition)
    rows = with_carried_rescues(rows, read.column_names, plan, work.carry)
    parts = [np.arange(begins[at], begins[at + 1], dtype=np.int64) for at in groups]
    numbers = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    dead = vectors.read(plan.folder, file.vector) if file.vector else BitMap()
    if file.path in work.dead:
        dead |= BitMap.deserialize(work.dead[file.path])
    if dead:
        alive = ~np.isin(numbers, row_numbers(dead))
        numbers, rows = numbers[alive], rows.filter(pa.array(alive))
    return numbers, rows


def _groups(parquet: pq.ParquetFile, column: str, within: KeyRange) -> list[int]:
    """The row groups that may have rows of a range, by their statistics."""
    metadata = parquet.metadata
    at = _column_at(metadata, column)
    if at is None:
        return list(range(metadata.num_row_groups))
    # Statistics say nothing of NaN, which the last range has.
    bounded = within.high is not None or not pa.types.is_floating(
        parquet.schema_arrow.field(column).type
    )
    found = []
    for number in range(metadata.num_row_groups):
        known = metadata.row_group(number).column(at).statistics
        sure = known is not None and known.has_min_max and not known.null_count
        if sure and bounded and within.low is not None and known.max < within.low:
            continue
        if sure and within.high is not None and known.min >= within.high:
            continue
        found.append(number)
    return found
