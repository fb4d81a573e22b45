"""One row's events taken out of the files sink: its files are written anew without them.

Parquet has the sequence of each event. A line of JSON is found by the id of its change; of formats
without one, by being the line that the change was written as, unless Spark has computed that.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...change.erasure import ValuePattern
from ...formats import StreamFormat, TransactionFormat
from ..erasing import ErasedPlace, ErasedRow
from ..lake.disk import sync_names
from ..lake.erasure import RowEraser, texts_found
from .ledger import FOLDER, FilesLedger

if TYPE_CHECKING:
    from .sink import Files

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_name = re.compile(r"log(?P<log>\d+)-(?P<first>\d+)-\d+\..*").fullmatch
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder(order="sorted").encode


class _Content(Protocol):
    """How events lie in files of one kind."""

    def erase(self, path: Path) -> int:
        """Write a file anew without the row's events; returns how many it had."""
        ...

    def unknown(self, path: Path, *, older: bool) -> int:
        """How many events may be the row's; `older`: the log has no change of this file."""
        ...

    def equal(self, path: Path, pattern: ValuePattern) -> int:
        """How many events have one of these values."""
        ...


def erase_in_files(sink: Files, row: ErasedRow) -> ErasedPlace:
    """Take the row out of the sink's files, and look for it afterwards."""
    place, root = f"sink {sink.name}", Path(os.path.abspath(sink.path))
    if not root.is_dir():
        return ErasedPlace(place=place, searched="no files")
    ledger = FilesLedger(str(root))
    ledger.place()
    ledger.sweep()  # what a writer has left that was killed: nothing of it counts
    logs = list(ledger.entry.logs) if ledger.entry else []
    content: _Content = (
        _ParquetFiles(sink, sink.eraser(row))
        if sink.kind == "parquet"
        else _LineFiles.of(sink, row)
    )
    own = sorted(path for path in root.rglob("*") if path.is_file())
    files = [path for path in own if FOLDER not in path.relative_to(root).parts]
    count = sum(map(content.erase, files))
    left, equal, pattern = list[str](), 0, ValuePattern(row.texts)
    for path in filter(Path.exists, own):
        if path not in files:
            if pattern.found_in(path.read_bytes()):
                left.append(f"{path}: an equal value")
            continue
        equal += content.equal(path, pattern)
        older = _is_older(path.name, logs, row)
        if unknown := content.unknown(path, older=older):
            why = "are older than the log" if older else "Spark has computed and that have no id"
            left.append(f"{path}: {unknown} events that {why}, so it cannot tell whose they are")
    former = root.parent.glob(f"{root.name}-until-*")
    left += [f"{path}: what the sink had before a reset; delete it" for path in former]
    notes = (f"{equal} events of other rows have an equal value",) if equal else ()
    return ErasedPlace(
        place=place, searched=f"{len(own)} files", rewritten=count, left=tuple(left), notes=notes
    )


def _is_older(name: str, logs: Collection[str], row: ErasedRow) -> bool:
    """Whether a file has changes that the log does not have."""
    found = _name(name)
    if found is None:
        return True
    epochs = dict(enumerate(logs, 1))
    return epochs.get(int(found["log"])) not in row.epochs or int(found["first"]) < row.first


@dataclass(frozen=True, slots=True)
class _ParquetFiles:
    sink: Files
    eraser: RowEraser

    def erase(self, path: Path) -> int:
        rows = _read_parquet(path)
        found = self.eraser.find(rows, np.zeros(rows.num_rows, dtype=np.bool_))
        if found.any():
            left = self.eraser.erased(rows, found)
            with _replacing(path, empty=not left.num_rows) as fresh:
                self.sink.style.write(left, fresh)
        return int(found.sum())

    def unknown(self, path: Path, *, older: bool) -> int:
        return self.eraser.unknown(_read_parquet(path)) if older else 0

    def equal(self, path: Path, pattern: ValuePattern) -> int:
        return texts_found(_read_parquet(path), pattern)


def _read_parquet(path: Path) -> pa.Table:
    with pq.ParquetFile(path) as file:
        return file.read(use_threads=False)


@dataclass(frozen=True, slots=True)
class _LineFiles:
    ids: re.Pattern[bytes] | None  # of the changes
    written: frozenset[bytes]  # what they were written as, if the format has no ids
    table: bytes  # its name
    blind: bool = False  # what they were written as is not known

    @classmethod
    def of(cls, sink: Files, row: ErasedRow) -> _LineFiles:
        ids = b"|".join(change.id.encode() for change in row.valued)
        lines = frozenset(map(_comparable, _rendered(sink, row)))
        computed = sink.shaping.computed(row.table.schema, row.table.name) is not None
        blind = computed and bool(lines)
        return cls(re.compile(ids) if ids else None, lines, row.table.name.encode(), blind)

    def erase(self, path: Path) -> int:
        lines = list(_read_lines(path))
        left = [line for line in lines if not self._is_wanted(line)]
        if len(left) < len(lines):
            with _replacing(path, empty=not left) as fresh:
                fresh.write_bytes(_compressed(path, b"".join(line + b"\n" for line in left)))
        return len(lines) - len(left)

    def _is_wanted(self, line: bytes) -> bool:
        if self.ids is not None and self.ids.search(line):
            return True
        return bool(self.written) and _comparable(line) in self.written

    def unknown(self, path: Path, *, older: bool) -> int:
        if not (older or self.blind):
            return 0
        return sum(self.table in line for line in _read_lines(path))

    def equal(self, path: Path, pattern: ValuePattern) -> int:
        return sum(bool(pattern.found_in(line)) for line in _read_lines(path))


def _rendered(sink: Files, row: ErasedRow) -> Iterator[bytes]:
    """The lines of the row's changes, where the format does not name the change."""
    changes = row.valued
    if sink.shaping:
        # Only here: it needs sqlglot where a transform has a condition.
        from ...transforms.changes import ShapedChanges  # noqa: PLC0415

        changes = ShapedChanges(sink.shaping)(changes)
    for epoch in row.epochs:
        format = sink.formats.of_log(epoch).named(sink.format)
        if isinstance(format, StreamFormat | TransactionFormat):
            return
        for change in changes:
            line = format.encode(change)
            if line is not None and change.id.encode() not in line:
                yield line


def _comparable(line: bytes) -> bytes:
    """A line without the moment when it was written."""
    event = _decode(line)
    if not isinstance(event, dict):
        return line
    return _encode({name: value for name, value in event.items() if not name.startswith("ts_")})


def _read_lines(path: Path) -> Iterator[bytes]:
    codec = _CODECS.get(path.suffix)
    with pa.input_stream(str(path), compression=codec) as stream:
        content = stream.read()
    return (line for line in content.split(b"\n") if line)


def _compressed(path: Path, content: bytes) -> bytes:
    codec = _CODECS.get(path.suffix)
    return pa.Codec(codec).compress(content, asbytes=True) if codec else content


@contextmanager
def _replacing(path: Path, *, empty: bool) -> Iterator[Path]:
    """A new file for the place of another; an empty one is deleted."""
    fresh = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        yield fresh
        if empty:
            path.unlink()
        else:
            fresh.chmod(path.stat().st_mode)
            with fresh.open("rb") as opened:
                os.fsync(opened.fileno())
            fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    sync_names(path.parent)
