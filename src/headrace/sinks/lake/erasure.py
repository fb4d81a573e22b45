"""One row's values taken out of a Delta table: out of its files, its earlier versions and its log.

    find the row's rows, dead ones too ─▶ write their files anew ─▶ one commit
        ─▶ checkpoint, and no commit before it ─▶ no file that the table does not have

Deletion vectors only hide rows, earlier versions keep whole files, and commits have the least and
the greatest value of each column. So the table's earlier versions cannot be read afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from ...change.erasure import KeyValues, RowImages, ValuePattern, has_raw_row
from ...change.event import Op
from ...errors import SinkFenced
from ..erasing import ErasedPlace, ErasedRow, erased_images
from . import vectors
from .conform import conformed
from .delta import Delta
from .deltalog import DataFile, DeltaLog
from .files import by_partition
from .foreign import WRITER
from .storage import Added, Folder, is_local
from .vacuum import vacuum

Mask = np.ndarray[Any, np.dtype[np.bool_]]
_AT_ONCE = timedelta(0)
_IMAGES = ("before_kind", "before", "after")


class RowEraser(Protocol):
    """Finds one row among the rows of files, and takes its values out."""

    def find(self, rows: pa.Table, dead: Mask) -> Mask:
        """Which rows have values that must go; `dead` ones are hidden from readers."""
        ...

    def erased(self, rows: pa.Table, found: Mask) -> pa.Table:
        """All rows, those that were found without their values, or not at all."""
        ...

    def unknown(self, rows: pa.Table) -> int:
        """How many rows may be the row's, or another's: nobody can tell."""
        ...

    def left(self, rows: pa.Table, dead: Mask) -> str:
        """What else of the row stays, or may; "": nothing."""
        ...

    def has(self, rows: pa.Table) -> bool:
        """Whether some are the row's, be it without values."""
        ...


# --- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileForm:
    """How rows lie in a table's files: with these columns, or (None) as they are."""

    schema: pa.Schema | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)  # files whose order values decide

    def read(self, folder: Folder, file: DataFile) -> pa.Table:
        """All rows of a file, also dead ones, with the columns of its partition."""
        rows = folder.read(file.path)
        shared = dict(file.partition)
        fields = self.schema or pa.unify_schemas(
            [rows.schema, pa.schema([(name, pa.string()) for name in shared])]
        )
        return conformed(rows, fields, file.partition)


def erase_rows(
    place: str, folder: Folder, eraser: RowEraser, form: FileForm, texts: Sequence[str]
) -> ErasedPlace:
    """Take a row out of a table, and look for it afterwards; no other process may write."""
    state = DeltaLog(folder).read()
    if state is None:
        return ErasedPlace(place=place, searched="no table")
    owner = state.metadata.configuration.get(WRITER, "")
    if not owner:
        raise SinkFenced(f"the Delta table {folder.uri} was not written by Headrace")
    delta = Delta.open(folder, owner)
    assert delta is not None, "it was just read"
    added, removed, count = list[Added](), list[str](), 0
    for file in delta.files.values():
        rows = form.read(folder, file)
        dead = _dead(folder, file)
        found = eraser.find(rows, dead)
        if not found.any():
            continue
        live = rows.filter(pa.array(~dead))
        touched = found[~dead]
        left = eraser.erased(live, touched) if touched.any() else live
        name = file.path.rpartition("/")[2].partition("-")[0]
        added += _written(folder, left, file, form.renamed.get(name, name))
        removed.append(file.path)
        count += int(found.sum())
    if removed:
        delta.commit(added, removed)
    if delta.partition_by:
        delta.note({})  # the last commit stays, and must not name the partitions of removed files
    _purge(folder, delta)
    found_after = _search(folder, eraser, form, texts)
    return msgspec.structs.replace(found_after, place=place, rewritten=count)


def _dead(folder: Folder, file: DataFile) -> Mask:
    dead = np.zeros(file.rows, dtype=np.bool_)
    if file.vector is not None:
        dead[vectors.read(folder, file.vector).to_array()] = True
    return dead


def _written(folder: Folder, rows: pa.Table, file: DataFile, name: str) -> Iterator[Added]:
    names = [each for each, _ in file.partition]
    if not rows.num_rows:
        return
    for values, part in by_partition(rows, names):
        partition = {each: _text(value) for each, value in values.items()}
        yield folder.write(part.drop_columns(names), name, partition, group_rows=50_000)


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def _purge(folder: Folder, delta: Delta) -> None:
    """Leave the table's last version alone: no earlier commit, no file of earlier versions."""
    try:
        DeltaTable(folder.uri, storage_options=dict(folder.options)).create_checkpoint()
    except (DeltaError, OSError) as error:
        raise folder.failure("its earlier versions were not deleted", error) from error
    log = DeltaLog(folder)
    log.forget(delta.version)
    state = log.read()
    assert state is not None, "it has a checkpoint"
    vacuum(folder, state, _AT_ONCE)  # notes what is unused …
    vacuum(folder, state, _AT_ONCE)  # … and deletes it
    if is_local(folder.uri):
        _remove_empty(Path(folder.uri))


def _remove_empty(folder: Path) -> None:
    """Folders of partitions have a value in their name."""
    for path in sorted((each for each in folder.rglob("*=*") if each.is_dir()), reverse=True):
        with suppress(OSError):  # it has files
            path.rmdir()


def _search(folder: Folder, eraser: RowEraser, form: FileForm, texts: Sequence[str]) -> ErasedPlace:
    """What was looked through, where values of the row are left, and where equal ones are."""
    state = DeltaLog(folder).read()
    files = state.files if state else {}
    left, equal, count, has_row = list[str](), 0, 0, False
    pattern = ValuePattern(texts)
    for entry in folder.objects.entries(""):
        count += 1
        file = files.get(entry.path)
        if file is not None:
            rows, dead = form.read(folder, file), _dead(folder, file)
            if eraser.find(rows, dead).any():
                left.append(f"{entry.path}: rows with values")
            if stays := eraser.left(rows, dead):
                left.append(f"{entry.path}: {stays}")
            if unknown := eraser.unknown(rows):
                left.append(
                    f"{entry.path}: {unknown} events that are older than the log, so it cannot "
                    "tell whose they are"
                )
            has_row = has_row or eraser.has(rows)
            equal += texts_found(rows, pattern)
            continue
        content = folder.objects.read(entry.path) or b""
        is_parquet = entry.path.endswith(".parquet")
        if bytes_have(content, pattern, is_parquet=is_parquet):
            left.append(f"{entry.path}: an equal value")
    notes = (f"{equal} rows with other keys have an equal value",) if equal else ()
    return ErasedPlace(
        place="", searched=f"{count} files", left=tuple(left), notes=notes, has_row=has_row
    )


def parquet_has(path: Path, pattern: ValuePattern) -> bool:
    """Whether a Parquet file on disk has one of the values."""
    return bytes_have(path.read_bytes(), pattern, is_parquet=True)


def bytes_have(content: bytes, pattern: ValuePattern, *, is_parquet: bool) -> bool:
    """Whether the content of a file has one of the values."""
    if not is_parquet:
        return bool(pattern.found_in(content))
    try:
        rows = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
    except pa.ArrowInvalid:
        return bool(pattern.found_in(content))  # what a killed writer has left
    return texts_found(rows, pattern) > 0


def texts_found(rows: pa.Table, pattern: ValuePattern) -> int:
    """How many rows have one of the values in some column."""
    if not pattern.texts or not rows.num_rows:
        return 0
    found = np.zeros(rows.num_rows, dtype=np.bool_)
    for column in rows.columns:
        found |= _column_found(column, pattern)
    return int(found.sum())


def _column_found(column: pa.ChunkedArray, pattern: ValuePattern) -> Mask:
    kind = column.type
    if pa.types.is_nested(kind):
        values = [repr(value).encode() for value in column.to_pylist()]
        return np.array([bool(pattern.found_in(value)) for value in values], dtype=np.bool_)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        found = [bool(value and pattern.found_in(value)) for value in column.to_pylist()]
        return np.array(found, dtype=np.bool_)
    texts = column if pa.types.is_string(kind) else column.cast(pa.string())
    mask = np.zeros(len(column), dtype=np.bool_)
    for text in pattern.texts:
        hit = pc.fill_null(pc.match_substring(texts, text), fill_value=False)
        mask |= hit.to_numpy(zero_copy_only=False).astype(np.bool_)
    return mask


# --- rows that are changes -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChangeEraser:
    """Changes with all their fields: their images lose their values, as the log's do."""

    row: ErasedRow
    key: KeyValues

    def find(self, rows: pa.Table, dead: Mask) -> Mask:
        """Those whose images differ from what they become."""
        found = np.zeros(rows.num_rows, dtype=np.bool_)
        for at, images, becomes in self.changed(rows):
            found[at] = images != becomes
        return found

    def erased(self, rows: pa.Table, found: Mask) -> pa.Table:
        """The same changes with other images."""
        becomes = {at: each for at, _, each in self.changed(rows)}
        for name in _IMAGES:
            values = rows[name].to_pylist()
            for at, images in becomes.items():
                value = getattr(images, name)
                values[at] = value.decode() if isinstance(value, bytes) else value
            at = rows.schema.get_field_index(name)
            field = rows.schema.field(at)
            rows = rows.set_column(at, field, pa.array(values, field.type))
        return rows

    def changed(self, rows: pa.Table) -> Iterator[tuple[int, RowImages, RowImages]]:
        """The row's changes, their images, and what these become."""
        for at, (key, before, after, kind, epoch, sequence) in _of_table(
            self.row, rows, ("key", "before", "after", "before_kind", "epoch", "sequence")
        ):
            # The key may be written in another way, from before the sink's transforms were changed.
            own = self.key.are_in(key) or self.row.is_own(epoch, sequence)
            if key is None or not (own or self.key.are_in(before)):
                continue
            images = RowImages(kind, _bytes(before), _bytes(after), ())
            kept = not own or self.row.is_kept(epoch, sequence)
            yield at, images, erased_images(images, self.key, kept=kept)

    def unknown(self, rows: pa.Table) -> int:
        """None: every change has its key."""
        return 0

    def left(self, rows: pa.Table, dead: Mask) -> str:
        """Rows that could not be decoded: they are as they came, so nobody can tell whose."""
        count = sum(
            op == Op.MESSAGE.value and has_raw_row(after)
            for _, (op, after) in _of_table(self.row, rows, ("op", "after"))
        )
        return f"{count} rows of the table that could not be decoded" if count else ""

    def has(self, rows: pa.Table) -> bool:
        """Whether one is a change of the row."""
        return any(True for _ in self.changed(rows))


@dataclass(frozen=True, slots=True)
class EventEraser:
    """Events in a format, which are left out: found by their change, or by the key if they have it.

    Of changes that the log no longer has, nobody knows whose events without a key are.
    """

    row: ErasedRow
    key: KeyValues | None = None

    def find(self, rows: pa.Table, dead: Mask) -> Mask:
        """Those of the row, but those of changes that have no value which must go."""
        found = np.zeros(rows.num_rows, dtype=np.bool_)
        names = ("epoch", "sequence", *(("key",) if self.key else ()))
        for at, (epoch, sequence, *key) in _of_table(self.row, rows, names):
            named = self.key is not None and self.key.are_in(key[0])
            if named or self.row.is_change(epoch, sequence):
                found[at] = not self.row.is_plain(epoch, sequence)
        return found

    def erased(self, rows: pa.Table, found: Mask) -> pa.Table:
        """The others."""
        return rows.filter(pa.array(~found))

    def unknown(self, rows: pa.Table) -> int:
        """How many events of the table are older than the log."""
        if self.key is not None:
            return 0
        return sum(
            epoch not in self.row.epochs or sequence < self.row.first
            for _, (epoch, sequence) in _of_table(self.row, rows, ("epoch", "sequence"))
        )

    def left(self, rows: pa.Table, dead: Mask) -> str:
        """Nothing."""
        return ""

    def has(self, rows: pa.Table) -> bool:
        """No: its events are removed."""
        return False


def _of_table(
    row: ErasedRow, rows: pa.Table, names: Sequence[str]
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """The numbers of the rows that are changes of the row's table, and some of their columns."""
    table = row.table
    same = pc.equal(rows["source"], table.source)
    same = pc.and_(same, pc.equal(rows["schema"], table.schema))
    same = pc.and_(same, pc.equal(rows["table"], table.name))
    numbers = np.flatnonzero(pc.fill_null(same, fill_value=False).to_numpy())
    some = rows.select(list(names)).take(pa.array(numbers))
    values = zip(*(column.to_pylist() for column in some.columns), strict=True)
    return zip(numbers.tolist(), values, strict=True)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
