"""One row's values taken out of an Iceberg history: its files, its earlier snapshots.

    find the row's changes ─▶ write their files anew ─▶ one snapshot with the same marks
        ─▶ a snapshot without the old bounds ─▶ no other snapshot, and none of its files

The marks stay as they are, so the sink goes on where it was. A commit that another writer began
before is refused, as always: it requires the snapshot that it knew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileType
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import NoSuchNamespaceError
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan, PyArrowFileIO
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.refs import MAIN_BRANCH

from ...change.erasure import ValuePattern
from ...errors import TableFailed
from ..erasing import ErasedPlace, ErasedRow
from ..lake.erasure import ChangeEraser, Mask, bytes_have, texts_found
from .append import AppendPlan, WrittenFile, conformed
from .columns import ROW, contiguous
from .table import TABLE, IcebergTable, Identifier

if TYPE_CHECKING:
    from .sink import IcebergHistory

_NO_ROW: Mask = np.zeros(0, dtype=np.bool_)


def erase_in_iceberg(sink: IcebergHistory, row: ErasedRow) -> list[ErasedPlace]:
    """Take the row out of the sink's Iceberg table, and look for it afterwards."""
    catalog = sink.link.connect()
    entry = sink.ledger(catalog).entry
    table = row.table.path
    place = f"sink {sink.name}: {table}"
    former = tuple(_former(sink, catalog, table, entry.tables.get(table)))
    if table not in entry.tables:
        return [ErasedPlace(place=place, searched="no table", left=former)]
    name = (*sink.levels, entry.tables[table])
    try:
        found = _opened(sink, catalog, name, table)
        if found is None:
            return [ErasedPlace(place=place, searched="no table", left=former)]
        erasure = _TableErasure(found, ChangeEraser(row, row.key_in(sink.shaping)))
        erasure.run()
        return [erasure.searched(place, row, former)]
    except TableFailed as error:
        return [ErasedPlace(place=place, left=(f"{error}. {error.hint}", *former))]


def _opened(
    sink: IcebergHistory, catalog: RestCatalog, name: Identifier, table: str
) -> IcebergTable | None:
    """The table as its own writer: who that is stays as it is."""
    found = IcebergTable.open(sink.link, catalog, name, table, "")
    if found is None:
        return None
    return IcebergTable(sink.link, found.table, found.marks.writer)


def _former(
    sink: IcebergHistory, catalog: RestCatalog, table: str, own: str | None
) -> Iterator[str]:
    """Histories of the table that the sink does not write any more: renamed ones."""
    known = {own, *sink.ledger(catalog).entry.tables.values()}
    with sink.link.reached(f"namespace {sink.namespace}"):
        try:
            names = [each for each in catalog.list_tables(sink.levels) if each[-1] not in known]
        except NoSuchNamespaceError:
            return
        for name in names:
            if catalog.load_table(name).properties.get(TABLE) == table:
                yield f"{'.'.join(name)} is an earlier history of {table}: drop it with its files"


@dataclass(slots=True)
class _TableErasure:
    """A row that is taken out of one table."""

    found: IcebergTable
    eraser: ChangeEraser
    counts: dict[str, int] = field(default_factory=dict)  # changes with values, by their file

    def run(self) -> None:
        """Rewrite files, and leave no snapshot that has the old ones."""
        self.found.replace(self._rewritten)
        self.found.forget()

    def _rewritten(self, task: FileScanTask, plan: AppendPlan) -> list[WrittenFile] | None:
        """The files for the place of one; None: it has nothing of the row."""
        live = _rows(self.found.table, task)
        # What a delete file hides is in the data file all the same.
        found = self.eraser.find(_stored(self.found.table, task), _NO_ROW)
        if not found.any():
            return None
        self.counts[task.file.file_path] = int(found.sum())
        erased = erased_rows(conformed(live, plan.arrow), self.eraser)
        return list(plan.write(erased)) if erased.num_rows else []

    def searched(self, place: str, row: ErasedRow, former: Sequence[str]) -> ErasedPlace:
        """What was looked through, and where values of the row are left."""
        table, pattern = self.found.table, ValuePattern(sorted(row.texts))
        left, equal, has_row = [*former, *self._kept_snapshots()], 0, False
        tasks = self.found.tasks()
        for task in tasks:
            rows = _stored(table, task)
            if self.eraser.find(rows, _NO_ROW).any():
                left.append(f"{task.file.file_path}: rows with values")
            if stays := self.eraser.left(rows, _NO_ROW):
                left.append(f"{task.file.file_path}: {stays}")
            has_row = has_row or self.eraser.has(rows)
            equal += texts_found(rows, pattern)
        count, others = self._others({task.file.file_path for task in tasks}, pattern)
        notes = [f"{equal} rows with other keys have an equal value"] if equal else []
        if count is None:
            notes.append("files that no snapshot has were not looked for: they cannot be listed")
        return ErasedPlace(
            place=place,
            searched=f"{len(tasks) if count is None else count} files",
            rewritten=sum(self.counts.values()),
            left=(*left, *others),
            notes=tuple(notes),
            has_row=has_row,
        )

    def _kept_snapshots(self) -> Iterator[str]:
        metadata = self.found.table.metadata
        for name, ref in sorted(metadata.refs.items()):
            if name != MAIN_BRANCH and ref.snapshot_id != metadata.current_snapshot_id:
                kind = ref.snapshot_ref_type.value
                yield f"{self.found.name}: the {kind} {name} keeps an earlier snapshot; remove it"

    def _others(self, known: set[str], pattern: ValuePattern) -> tuple[int | None, Sequence[str]]:
        """How many files there are, and those of no snapshot that may have values."""
        table, left = self.found.table, list[str]()
        used = {*known, *_metadata_of(table)}
        if not isinstance(table.io, PyArrowFileIO):
            return None, left
        scheme, netloc, root = PyArrowFileIO.parse_location(table.location(), table.io.properties)
        storage = table.io.fs_by_scheme(scheme, netloc)
        listed = storage.get_file_info(FileSelector(root, recursive=True, allow_not_found=True))
        paths = {each.path for each in listed if each.type is FileType.File}
        own = {PyArrowFileIO.parse_location(each, table.io.properties)[2] for each in used}
        for path in sorted(paths - own):
            if path.endswith(".avro"):
                left.append(f"{path}: of no snapshot, and it may have bounds of values; delete it")
                continue
            with storage.open_input_stream(path) as stream:
                content: bytes = stream.read()
            if bytes_have(content, pattern, is_parquet=path.endswith(".parquet")):
                left.append(f"{path}: an equal value, in a file of no snapshot; delete it")
        return len(paths), left


def _metadata_of(table: Table) -> Iterator[str]:
    """The manifests and their lists that the table has."""
    for snapshot in table.metadata.snapshots:
        yield snapshot.manifest_list
        yield from (each.manifest_path for each in snapshot.manifests(table.io))


def _rows(table: Table, task: FileScanTask) -> pa.Table:
    """The rows of a file that readers see, with the table's columns."""
    return ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue()).to_table([task])


def _stored(table: Table, task: FileScanTask) -> pa.Table:
    """All rows of a file."""
    with table.io.new_input(task.file.file_path).open() as file:
        return pq.ParquetFile(pa.BufferReader(file.read())).read(use_threads=False)


def erased_rows(rows: pa.Table, eraser: ChangeEraser) -> pa.Table:
    """All changes; those of the row without its values, also in the struct `row`."""
    gone = np.zeros(rows.num_rows, dtype=np.bool_)
    for at, images, becomes in eraser.changed(rows):
        # The new values stay of the last change of a row that is there, and under another key.
        gone[at] = images.after is None or becomes.after != images.after
    rows = eraser.erased(rows, gone)
    if ROW not in rows.column_names:
        return rows
    at, struct = rows.schema.get_field_index(ROW), contiguous(rows[ROW])
    fields = [
        pc.struct_field(struct, [number])
        if each.name in eraser.key.texts
        else pc.if_else(
            pa.array(gone), pa.nulls(1, each.type)[0], pc.struct_field(struct, [number])
        )
        for number, each in enumerate(struct.type)
    ]
    made = pa.StructArray.from_arrays(fields, fields=list(struct.type), mask=struct.is_null())
    return rows.set_column(at, rows.schema.field(at), made)
