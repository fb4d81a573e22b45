"""Files of a batch, written by Spark's tasks to where nobody looks for them.

A task holds its part of the batch in memory and writes a file for each day, of each tenant, at
once; of what is too much for that, or for one file, several. Events of one change stay together.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...errors import SinkUnavailable
from .. import Progress
from ..lake.append import ChangesRead, fresh
from ..lake.disk import sync_names
from ..lake.shape import PARTITIONS, RowShape
from ..lake.storage import LONGEST_NAME, repetitive
from ..results import result
from .ledger import File

Kind = Literal["jsonl", "parquet"]
Compression = Literal["none", "gzip", "zstd"]

# A name of their own: no pattern for the files themselves finds them.
_SUFFIX = ".part"
_HELD_BYTES = 128_000_000  # of changes in a task's memory before they are written
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_ENDINGS = {"none": "", "gzip": ".gz", "zstd": ".zst"}
_SEQUENCE = 19  # digits of the largest

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Staged(ChangesRead):
    """What a task has met and written; nothing of it counts until it is committed."""

    files: list[File] = msgspec.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Style:
    """What files look like."""

    kind: Kind
    compression: Compression
    most_bytes: int  # in a file, before compression

    @property
    def ending(self) -> str:
        """How their names end."""
        return ".parquet" if self.kind == "parquet" else f".jsonl{_ENDINGS[self.compression]}"

    def write(self, rows: pa.Table, path: Path) -> int:
        """A new file, on disk when this returns; returns its size."""
        with path.open("xb") as file:
            if self.kind == "parquet":
                pq.write_table(
                    rows,
                    file,
                    compression=self.compression,
                    use_dictionary=repetitive(rows),
                    version="2.6",
                )
            else:
                file.write(self._lines(rows))
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    def _lines(self, rows: pa.Table) -> bytes | pa.Buffer:
        lines = "".join(f"{event}\n" for event in rows["event"].to_pylist()).encode()
        return lines if self.compression == "none" else pa.Codec(self.compression).compress(lines)


@dataclass(frozen=True, slots=True)
class Stage:
    """What a task does with its part of a batch."""

    folder: Path
    by: tuple[str, ...]  # what folders are named by
    shape: RowShape
    style: Style
    known: Progress  # what is in the files already

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write down what is not in the files yet."""
        staged = Staged()
        held: list[pa.Table] = []
        size = 0
        for rows in self.shape(fresh(staged, batches, self.known)):
            held.append(rows)
            size += rows.nbytes
            if size >= _HELD_BYTES:
                staged.files += self._written(held)
                held, size = [], 0
        staged.files += self._written(held)
        yield result(staged)

    def _written(self, held: Sequence[pa.Table]) -> list[File]:
        rows = pa.concat_tables(held) if held else None
        if not rows:
            return []
        try:
            files = [
                self._file(piece, place)
                for place, group in _places(rows, self.by)
                for piece in pieces(group, self.style.most_bytes)
            ]
            sync_names(self.folder)
        except OSError as error:
            raise SinkUnavailable(
                f"{self.folder} cannot be written: {error.strerror or error}"
            ) from error
        return files

    def _file(self, rows: pa.Table, place: str) -> File:
        name = f"{uuid.uuid4().hex}{_SUFFIX}"
        own = rows.drop_columns([name for name, _ in PARTITIONS])
        size = self.style.write(own, self.folder / name)
        first, last = rows["sequence"][0].as_py(), rows["sequence"][-1].as_py()
        return File(f"{self.folder.name}/{name}", place, first, last, rows.num_rows, size)


def final(file: File, log: int, style: Style) -> File:
    """A staged file with its path: the names sort as the changes do, those of later logs last."""
    span = f"{file.first:0{_SEQUENCE}}-{file.last:0{_SEQUENCE}}"
    path = f"{file.path}/log{log:04}-{span}{style.ending}"
    return File(file.staged, path, file.first, file.last, file.events, file.size)


def _places(rows: pa.Table, by: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
    """The folders that rows belong to, with these rows, in order."""
    codes = np.zeros(rows.num_rows, np.int64)
    for name in by:
        column = rows[name].combine_chunks().dictionary_encode("encode")
        codes = codes * max(len(column.dictionary), 1) + column.indices.to_numpy()
    # Stable, for a change may have several events.
    order = np.lexsort((_numbers(rows["sequence"]), codes))
    for part in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
        group = rows.take(pa.array(part))
        yield "/".join(_folder(name, group[name][0].as_py()) for name in by), group


def _folder(name: str, value: object) -> str:
    """A folder named as Hive does."""
    if value is None:
        return f"{name}={_NO_VALUE}"
    text = str(value)
    quoted = _quoted(text)
    if len(quoted.encode()) > LONGEST_NAME:  # a file system takes no longer name
        quoted = f"{_quoted(text[:30])}~{hashlib.sha256(text.encode()).hexdigest()}"
    return f"{name}={quoted}"


def _quoted(text: str) -> str:
    # Spark and Hive take the letters of other alphabets as they are, and misread their bytes.
    return "".join(quote(letter, safe="") if letter.isascii() else letter for letter in text)


def pieces(rows: pa.Table, most_bytes: int) -> Iterator[pa.Table]:
    """Rows in parts of so many bytes; only what belongs to one change may be larger."""
    ends, sequences = np.cumsum(_sizes(rows)), _numbers(rows["sequence"])
    begin, done = 0, 0
    while begin < rows.num_rows:
        fit = int(np.searchsorted(ends, done + most_bytes, "right"))
        end = int(np.searchsorted(sequences, sequences[fit], "left")) if fit < len(ends) else fit
        if end <= begin:
            end = int(np.searchsorted(sequences, sequences[begin], "right"))
        yield rows.slice(begin, end - begin)
        begin, done = end, int(ends[end - 1])


def _sizes(rows: pa.Table) -> Numbers:
    """About how many bytes each row has in a file."""
    if "event" in rows.column_names:
        return _numbers(pc.add(pc.binary_length(rows["event"]).cast(pa.int64()), 1))
    return np.full(rows.num_rows, max(rows.nbytes // rows.num_rows, 1), np.int64)


def _numbers(column: pa.ChunkedArray) -> Numbers:
    numbers: Numbers = column.to_numpy()
    return numbers
