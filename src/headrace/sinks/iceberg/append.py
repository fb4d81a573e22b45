"""Changes written as files of Iceberg tables, inside Spark's tasks.

Every file has a name of its own: an attempt of a task that Spark has given up may write on while
the driver commits the files of another. Nobody knows of a file until the driver has committed it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import schema_to_pyarrow, write_file
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionFieldValue, PartitionKey
from pyiceberg.table import WriteTask
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record

from ...change.arrow import columns_of, decode, keyless
from ...change.path import table_path
from ...errors import DecodeError
from .. import Progress
from ..lake.append import HELD_BYTES, IN_ORDER, ChangesRead, fresh
from ..lake.files import by_partition
from ..lake.shape import commit_times, tenants
from ..results import result
from .columns import ROW, TableVersion, contiguous, fits, fixed_columns, names_in_text, typed_rows

_ROW_OPS = pa.array(["INSERT", "READ", "UPDATE", "DELETE"])
_PARTITION = "\0partition"


class WrittenFile(msgspec.Struct, frozen=True):
    """A data file and its metrics, as a manifest has them; see Iceberg's `data_file`."""

    path: str
    size: int
    rows: int
    spec: int
    partition: list[int | str | bool | None]
    column_sizes: dict[int, int]
    value_counts: dict[int, int]
    null_value_counts: dict[int, int]
    nan_value_counts: dict[int, int]
    lower_bounds: dict[int, bytes]
    upper_bounds: dict[int, bytes]
    split_offsets: list[int] | None = None

    @classmethod
    def of(cls, file: DataFile, spec: int) -> WrittenFile:
        """What pyiceberg says of a file that it has written with a partition spec."""
        partition = [file.partition[at] for at in range(len(file.partition))]
        return cls(
            file.file_path,
            file.file_size_in_bytes,
            file.record_count,
            spec,
            partition,
            file.column_sizes,
            file.value_counts,
            file.null_value_counts,
            file.nan_value_counts,
            file.lower_bounds,
            file.upper_bounds,
            file.split_offsets,
        )

    def data_file(self) -> DataFile:
        """The same for a commit."""
        file = DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=self.path,
            file_format=FileFormat.PARQUET,
            partition=Record(*self.partition),
            record_count=self.rows,
            file_size_in_bytes=self.size,
            column_sizes=self.column_sizes,
            value_counts=self.value_counts,
            null_value_counts=self.null_value_counts,
            nan_value_counts=self.nan_value_counts,
            lower_bounds=self.lower_bounds,
            upper_bounds=self.upper_bounds,
            split_offsets=self.split_offsets,
        )
        file.spec_id = self.spec
        return file


class VersionMet(msgspec.Struct, frozen=True, order=True):
    """Columns of a table that its Iceberg table does not have yet."""

    sequence: int  # of the first change that has them
    row_schema: str | None
    connector: str
    source: str


class Misfit(msgspec.Struct, frozen=True, order=True):
    """A change whose row does not fit its columns."""

    sequence: int
    reason: str
    hint: str


class TableWritten(msgspec.Struct):
    """What a task has met and written of one table."""

    last: int = 0  # the highest sequence that is in a file
    files: list[WrittenFile] = []
    unknown: list[VersionMet] = []  # nothing from the first of them on was written
    misfit: Misfit | None = None


class HistoryWritten(ChangesRead):
    """What a task has met and written; nothing of it counts until it is committed."""

    tables: dict[str, TableWritten] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class AppendPlan:
    """What a task knows of an Iceberg table; can be pickled."""

    metadata: TableMetadata = field(repr=False)  # without its snapshots
    io: FileIO = field(repr=False)
    applied: Mapping[str, int]  # by the log's epoch: it has everything up to here
    before: int | None = None  # the first change that it cannot take; None: it takes all

    @cached_property
    def arrow(self) -> pa.Schema:
        """The columns as Arrow has them."""
        return schema_to_pyarrow(self.metadata.schema(), include_field_ids=False)

    def write(self, rows: pa.Table) -> Iterator[WrittenFile]:
        """Files of rows, one for each partition."""
        metadata = self.metadata
        spec, schema = metadata.spec(), metadata.schema()
        names = [f"{_PARTITION}{at}" for at in range(len(spec.fields))]
        keyed = rows
        for name, each in zip(names, spec.fields, strict=True):
            source = schema.find_field(each.source_id)
            values = each.transform.pyarrow_transform(source.field_type)(
                contiguous(rows[source.name])
            )
            keyed = keyed.append_column(name, values)
        for group, own in by_partition(keyed, names):
            key = PartitionKey(
                [
                    PartitionFieldValue(each, group[name])
                    for name, each in zip(names, spec.fields, strict=True)
                ],
                spec,
                schema,
            )
            content = own.drop_columns(names).sort_by(IN_ORDER)
            task = WriteTask(
                write_uuid=uuid.uuid4(),
                task_id=0,
                schema=schema,
                record_batches=content.combine_chunks().to_batches(),
                partition_key=key if names else None,
            )
            for file in write_file(self.io, metadata, iter([task])):
                yield WrittenFile.of(file, spec.spec_id)


@dataclass(frozen=True, slots=True)
class AppendHistory:
    """What a task does with its part of a batch."""

    plans: Mapping[str, AppendPlan | None]  # by schema.table; None: it is not followed
    tenant: str = ""
    as_text: tuple[str, ...] = ()
    only: frozenset[str] | None = None  # tables, the others being done; None: all

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write what the tables do not have yet."""
        met = HistoryWritten()
        held: dict[str, list[pa.Table]] = {}
        size = 0
        for changes in fresh(met, batches, Progress("", 0)):
            for table, rows in _by_table(changes):
                for typed in self._typed(table, rows, met):
                    held.setdefault(table, []).append(typed)
                    size += typed.nbytes
            if size >= HELD_BYTES:
                self._write(held, met)
                held, size = {}, 0
        self._write(held, met)
        yield result(met)

    def _typed(self, table: str, rows: pa.Table, met: HistoryWritten) -> Iterator[pa.Table]:
        """The rows of a table as its Iceberg table has them, one table for each set of columns."""
        plan = self.plans.get(table)
        followed = plan is not None or table not in self.plans
        if not followed or (self.only is not None and table not in self.only):
            return
        written = met.tables.setdefault(table, TableWritten())
        for group, own in by_partition(rows, ("row_schema", "connector", "source")):
            wanted = own if plan is None else own.filter(_wanted(own, plan))
            if not wanted.num_rows:
                continue
            version = self._version(table, group)
            if plan is None or not fits(plan.metadata.schema(), version):
                first = pc.min(wanted["sequence"]).as_py()
                written.unknown.append(VersionMet(sequence=first, **group))
            elif not (written.unknown or written.misfit):
                try:
                    yield self._shaped(wanted, version, plan)
                except DecodeError as error:
                    first = _first_misfit(wanted, version)
                    written.misfit = Misfit(first, str(error), error.hint)

    def _version(self, table: str, group: Mapping[str, Any]) -> TableVersion:
        columns = columns_of(group["row_schema"]) if group["row_schema"] else ()
        return TableVersion(columns, group["connector"], names_in_text(table, self.as_text))

    def _shaped(self, changes: pa.Table, version: TableVersion, plan: AppendPlan) -> pa.Table:
        own = (commit_times(changes), tenants(changes, self.tenant))
        rows = pa.table([*changes.columns, *own], schema=fixed_columns())
        if version.columns and ROW in plan.arrow.names:
            images = contiguous(row_images(changes))
            decoded = _decoded(images, version)
            struct = typed_rows(decoded, images.is_valid(), plan.arrow.field(ROW).type)
            rows = rows.append_column(ROW, struct)
        return conformed(rows, plan.arrow)

    def _write(self, held: Mapping[str, Sequence[pa.Table]], met: HistoryWritten) -> None:
        for table, parts in held.items():
            rows, written = pa.concat_tables(parts), met.tables[table]
            plan = self.plans[table]
            assert plan is not None
            written.files += plan.write(rows)
            written.last = max(written.last, pc.max(rows["sequence"]).as_py())


def _by_table(changes: pa.RecordBatch) -> Iterator[tuple[str, pa.Table]]:
    for group, rows in by_partition(pa.Table.from_batches([changes]), ("schema", "table")):
        yield table_name(group["schema"], group["table"]), rows


def table_name(schema: str | None, table: str | None) -> str:
    """A table as the config names it; a message belongs to none."""
    return table_path(schema or "", table) if table else ""


def _wanted(rows: pa.Table, plan: AppendPlan) -> pa.ChunkedArray:
    """Which changes the table has not got, and can take."""
    epochs, applied = rows["epoch"], plan.applied
    reached = [applied.get(epoch, 0) for epoch in epochs.to_pylist()]
    wanted = pc.greater(rows["sequence"], pa.array(reached, pa.int64()))
    if plan.before is not None:
        wanted = pc.and_(wanted, pc.less(rows["sequence"], plan.before))
    return wanted


def row_images(changes: pa.Table) -> pa.ChunkedArray:
    """The row that each change is about: after it, else before it; null: it is about none."""
    about_row = pc.is_in(changes["op"], value_set=_ROW_OPS)
    image = pc.coalesce(changes["after"], changes["before"], changes["key"])
    return pc.if_else(about_row, image, pa.scalar(None, pa.string()))


def _decoded(images: pa.ChunkedArray, version: TableVersion) -> pa.Table:
    # What does not fit is null in `row`: the change's own image has its text.
    return decode(
        images,
        keyless(version.columns),
        connector=version.connector,
        as_text=version.as_text,
        rescue=True,
    )


def _first_misfit(rows: pa.Table, version: TableVersion) -> int:
    """The sequence of the first change whose row cannot be decoded."""
    images = row_images(rows)
    for at in range(len(images)):
        try:
            _decoded(images.slice(at, 1), version)
        except DecodeError:
            return int(rows["sequence"][at].as_py())
    raise AssertionError("all rows can be decoded")


def conformed(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns of the Iceberg table, in its order and with its types."""
    columns = [
        rows[each.name].cast(each.type)
        if each.name in rows.column_names
        else pa.nulls(rows.num_rows, each.type)
        for each in schema
    ]
    return pa.table(columns, schema=schema)
