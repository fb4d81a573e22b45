"""Rows in a table's files: sorted when they are written, found by their numbers when read."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import TableFailed
from ..lake.conform import conformed
from ..lake.files import by_partition
from ..lake.plan import SEQUENCE, PlannedFile, TablePlan
from ..lake.storage import Added, Folder
from .keys import Numbers
from .lookup import KeyColumns

GROUP_ROWS = 50_000  # of a row group: what is read for one row …
GROUP_BYTES = 16_000_000  # … and what that may take of memory

# What a file's name says of its rows: from a batch, in order with the files of this name, large
# and in order as a snapshot brought them, past.
LOOSE, SORTED, FILLED, PAST = "rows", "sorted", "filled", "past"


def key_columns(plan: TablePlan) -> KeyColumns:
    """The key as the table's files have it."""
    names = tuple(column.name for column in plan.key)
    types = tuple(plan.schema.field(name).type for name in names)
    return KeyColumns(names, types, nullable=plan.chosen_key)


def kind(path: str) -> str:
    """What the name of a file says of its rows; "": it is not one of ours, or an old one."""
    found = path.rpartition("/")[2].partition("-")[0]
    return found if found in (LOOSE, SORTED, FILLED, PAST) else ""


def in_order(rows: pa.Table, order: Sequence[str]) -> pa.Table:
    """Rows as they stand in a file."""
    if is_in_order(rows, order):
        return rows
    columns = [(name, "ascending") for name in order or (SEQUENCE,)]
    return rows.take(pc.sort_indices(rows, sort_keys=columns))


def is_in_order(rows: pa.Table, order: Sequence[str]) -> bool:
    """Whether they are so already, as most of a snapshot's are: to move all values takes long."""
    first = rows[next(iter(order), SEQUENCE)]
    comparable = pa.types.is_primitive(first.type) and not first.null_count
    return comparable and bool(pc.all(pc.less(first[:-1], first[1:])).as_py())


def joined(
    pieces: Iterable[tuple[str, pa.Table]], most_bytes: int
) -> Iterator[tuple[str, pa.Table]]:
    """Rows by the name of their file, the small pieces of each joined."""
    held: dict[str, list[pa.Table]] = defaultdict(list)
    size: dict[str, int] = defaultdict(int)
    for name, rows in pieces:
        if rows.num_rows:
            held[name].append(rows)
            size[name] += rows.nbytes
        if size[name] >= most_bytes:
            yield name, pa.concat_tables(held.pop(name))
            del size[name]
    for name, some in held.items():
        yield name, pa.concat_tables(some)


def write_rows(plan: TablePlan, rows: pa.Table, name: str) -> Iterator[tuple[Added, pa.Table]]:
    """New files of rows, and what is in each."""
    rows = in_order(rows, plan.order)
    for group, of_partition in by_partition(rows, plan.partition_by):
        partition = {name: _text(name, value) for name, value in group.items()}
        for start in range(0, of_partition.num_rows, plan.file_rows):
            part = of_partition.slice(start, plan.file_rows)
            stored = part.drop_columns(list(partition))
            fitting = GROUP_BYTES * part.num_rows // max(part.nbytes, 1)
            group_rows = max(min(fitting, GROUP_ROWS), 1)
            yield plan.folder.write(stored, name, partition, group_rows=group_rows), part


def _text(name: str, value: object) -> str | None:
    if value == "":
        raise TableFailed(
            f"column {name} has an empty text, and partition_by names it: Delta cannot tell it "
            "from null",
            hint="Choose another column for partition_by, remove the folder of the Delta table, "
            "then run `headrace snapshot SOURCE TABLE`.",
        )
    if value is None or isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_rows(folder: Folder, file: PlannedFile, rows: Numbers, schema: pa.Schema) -> pa.Table:
    """Some rows of a file, by their numbers, with some columns as the table has them now."""
    parts = list(read_in_groups(folder, file, rows, schema))
    order = np.concatenate([np.empty(0, dtype=np.int64), *(which for which, _ in parts)])
    read = pa.concat_tables([schema.empty_table(), *(part for _, part in parts)])
    return read if np.array_equal(order, np.arange(len(rows))) else read.take(np.argsort(order))


def read_in_groups(
    folder: Folder, file: PlannedFile, rows: Numbers, schema: pa.Schema
) -> Iterator[tuple[Numbers, pa.Table]]:
    """The same, row group by row group, and which of the rows each has: they may be large."""
    with folder.open(file.path) as parquet:
        there = set(parquet.schema_arrow.names)
        names = [name for name in schema.names if name in there]
        counts = [parquet.metadata.row_group(at).num_rows for at in range(parquet.num_row_groups)]
        ends = np.cumsum(counts)
        groups = np.searchsorted(ends, rows, side="right")
        for group in np.unique(groups).tolist():
            which = np.flatnonzero(groups == group)
            read = parquet.read_row_group(group, columns=names, use_threads=False)
            numbers = pa.array(rows[which] - (ends[group] - counts[group]))
            # Types of another writer, such as string_view, may not be taken from: first ours.
            yield which, conformed(read, schema, file.partition).take(numbers)
