"""A batch that tasks have stored as files, applied by one process without Spark.

    tasks: rows ─▶ runs (Arrow files, each in the order of sequences)
    driver: runs ─▶ merged, some thousand rows at a time ─▶ the same work as a task's

Whoever writes as a data source of Spark's in Python cannot ask for rows to be sent to the task of
their key. So the tasks store them as they come, and one process takes all keys. It holds what a
task holds (see `apply`) and a few thousand rows of each run, however large the batch is.
"""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ...change.path import split_path
from .. import LogRange
from ..lake.plan import ShareResult, TableFailure, TablePlan, TableRef
from ..lake.storage import OWN_FOLDER, Folder
from .apply import Changes, TableShare, applied, table_shares
from .fold import ROW_OPS, SequencedRecord, Share
from .input import row_changes
from .scan import Summaries, summed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FOLDER = f"{OWN_FOLDER}/staged"
_ABANDONED = timedelta(days=1)  # a file of a job that was killed; no job stores for so long
_BATCH_ROWS = 2_000  # of a run that are in memory while runs are merged
_BUFFER = 1_000_000  # bytes
_SORTED_BYTES = 32_000_000  # that a task holds to sort: a run of rows that come in any order
_TAKEN_ROWS = 10_000  # that are applied at a time
_STORED = ("sequence", "op", "key", "before", "after", "unchanged", "schema_version", "transaction")
_DESCRIBED = ("schema_version", "epoch", "source", "schema", "table", "connector", "row_schema")
_BOUNDS = [("sequence", "min"), ("sequence", "max"), ("sequence", "count")]


class StagedRun(msgspec.Struct, frozen=True):
    """A file of changes in the order of their sequences."""

    path: str
    first: int
    last: int


class StagedPart(msgspec.Struct):
    """What a task has stored."""

    runs: list[StagedRun] = []
    versions: list[dict[str, Any]] = []  # as `scan.summed` takes them
    others: list[tuple[Any, ...]] = []  # what is no change of a row, likewise


class ChangeStage:
    """The files of one query, or of one job, in the folder of the tables; a task may hold it."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder = folder
        self._name = name  # which no other query has

    def store(self, batches: Iterable[pa.RecordBatch], table: str = "") -> StagedPart:
        """Store changes in files, of all tables or one; runs in Spark's tasks."""
        done = StagedPart()
        versions: dict[tuple[Any, ...], dict[str, Any]] = {}
        writer = _RunWriter(self._folder, self._name, done.runs)
        try:
            for batch in batches:
                wanted = _of_table(batch, table)
                if wanted.num_rows:
                    _note(wanted, versions, done)
                    writer.write(wanted)
        finally:
            writer.close()
        done.versions += versions.values()
        return done

    def clear(self) -> None:
        """Delete its files, also those that a killed driver left, and old ones of other queries."""
        oldest, objects = datetime.now(UTC) - _ABANDONED, self._folder.objects
        with self._folder.reached(_FOLDER):
            objects.delete(
                [
                    entry.path
                    for entry in objects.entries(_FOLDER)
                    if entry.path.startswith(f"{_FOLDER}/{self._name}.") or entry.modified < oldest
                ]
            )


class _RunWriter:
    """Writes the rows of a task into as few runs as their order allows."""

    def __init__(self, folder: Folder, name: str, runs: list[StagedRun]) -> None:
        self._folder = folder
        self._name = name
        self._runs = runs
        self._path = ""
        self._first = self._last = 0
        self._stream: Any = None
        self._file: Any = None
        self._held: list[pa.RecordBatch] = []  # out of order, until they are sorted together
        self._size = 0

    def write(self, batch: pa.RecordBatch) -> None:
        rows = batch.select([name for name in _STORED if name in batch.schema.names])
        sequences = rows["sequence"]
        in_order = pc.all(pc.less_equal(sequences[:-1], sequences[1:]), min_count=0).as_py()
        follows = self._stream is None or sequences[0].as_py() >= self._last
        if in_order and follows and not self._held:
            self._append(rows)
            return
        self._held.append(rows)
        self._size += rows.nbytes
        if self._size >= _SORTED_BYTES:
            self._append_held()

    def _append_held(self) -> None:
        if self._held:
            rows = pa.Table.from_batches(self._held).sort_by("sequence").combine_chunks()
            self._held, self._size = [], 0
            [batch] = rows.to_batches()
            self._append(batch)

    def _append(self, rows: pa.RecordBatch) -> None:
        first, last = rows["sequence"][0].as_py(), rows["sequence"][-1].as_py()
        if self._stream is None or first < self._last:
            self._end()
            self._open(rows.schema, first)
        self._last = last
        for begin in range(0, rows.num_rows, _BATCH_ROWS):
            self._stream.write_batch(rows.slice(begin, _BATCH_ROWS))

    def _open(self, schema: pa.Schema, first: int) -> None:
        self._path, self._first = f"{_FOLDER}/{self._name}.{uuid.uuid4().hex}.arrow", first
        with self._folder.reached(self._path):
            # Buffered: delta-rs takes bytes, and no buffers of Arrow's.
            self._file = self._folder.files.open_output_stream(self._path, buffer_size=_BUFFER)
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        self._stream = pa.ipc.new_stream(self._file, schema, options=options)

    def close(self) -> None:
        try:
            self._append_held()
        finally:
            self._end()

    def _end(self) -> None:
        if self._stream is not None:
            with self._folder.reached(self._path):
                self._stream.close()
                self._file.close()
            self._stream = None
            self._runs.append(StagedRun(self._path, self._first, self._last))


def _of_table(batch: pa.RecordBatch, table: str) -> pa.RecordBatch:
    if not table:
        return batch
    schema, name = split_path(table)
    ours = pc.and_(pc.equal(batch["schema"], schema), pc.equal(batch["table"], name))
    return batch.filter(pc.fill_null(ours, fill_value=False))


def _note(
    batch: pa.RecordBatch, versions: dict[tuple[Any, ...], dict[str, Any]], done: StagedPart
) -> None:
    """Note what a batch has of which table, together with those before it."""
    rows = pa.Table.from_batches([batch])
    groups = rows.group_by(list(_DESCRIBED), use_threads=False).aggregate(_BOUNDS)
    names = [*_DESCRIBED, "first", "last", "changes"]
    found = groups.select([*_DESCRIBED, *(f"sequence_{name}" for _, name in _BOUNDS)])
    for row in found.rename_columns(names).to_pylist():
        before = versions.setdefault(tuple(row[name] for name in _DESCRIBED), row)
        if before is not row:
            before["first"] = min(before["first"], row["first"])
            before["last"] = max(before["last"], row["last"])
            before["changes"] += row["changes"]
    of_rows = pc.is_in(rows["op"], pa.array(sorted(ROW_OPS)))
    others = rows.filter(pc.and_(pc.invert(of_rows), pc.is_valid(rows["table"])))
    columns = others.select(["schema_version", "sequence", "op", "after"]).columns
    done.others += zip(*(column.to_pylist() for column in columns), strict=True)


class StagedInput:
    """What the tasks of a batch have stored; a `BatchInput`."""

    spark: SparkSession | None = None
    whole: LogRange | None = None  # a person may have left some changes out

    def __init__(self, folder: Folder, staged: Sequence[StagedPart]) -> None:
        self._folder = folder
        self._staged = staged
        self.epochs: set[str] = set()
        self.failures: Mapping[TableRef, TableFailure] = {}  # tables that a scan leaves out

    def scan(self) -> Summaries:
        """Add up what the tasks have noted."""
        versions = [row for each in self._staged for row in each.versions]
        self.epochs = {row["epoch"] for row in versions}
        return summed(versions, [other for each in self._staged for other in each.others])

    def run(self, plans: Sequence[TablePlan]) -> dict[int, list[ShareResult]]:
        """Apply everything here."""
        shares = table_shares(plans, Share(0, 1))
        return {each.at: [each] for each in applied(shares, self._changes(shares))}

    def _changes(self, shares: Sequence[TableShare]) -> Iterator[tuple[TableShare, Changes]]:
        by_version = {version: share for share in shares for version in share.plan.versions}
        held: dict[int, list[SequencedRecord]] = {share.at: [] for share in shares}
        count = 0
        for _, version, record in self._merged():
            if (share := by_version.get(version)) is not None:
                held[share.at].append(record)
                count += 1
            if count >= _TAKEN_ROWS:
                yield from _emptied(shares, held)
                count = 0
        yield from _emptied(shares, held)

    def _merged(self) -> Iterator[tuple[int, int, SequencedRecord]]:
        """All changes in order; only runs that lie across each other are open at once."""
        runs = sorted(
            (run for each in self._staged for run in each.runs), key=lambda run: run.first
        )
        across: list[StagedRun] = []
        for run in runs:
            if across and run.first > max(each.last for each in across):
                yield from heapq.merge(*map(self._read, across), key=itemgetter(0))
                across = []
            across.append(run)
        yield from heapq.merge(*map(self._read, across), key=itemgetter(0))

    def _read(self, run: StagedRun) -> Iterator[tuple[int, int, SequencedRecord]]:
        with (
            self._folder.reached(run.path),
            self._folder.files.open_input_stream(run.path) as file,
            pa.ipc.open_stream(file) as stream,
        ):
            for batch in stream:
                for version, change in row_changes(batch):
                    yield change.sequence, version, change.as_record()


def _emptied(
    shares: Sequence[TableShare], held: dict[int, list[SequencedRecord]]
) -> Iterator[tuple[TableShare, Changes]]:
    for share in shares:
        if held[share.at]:
            yield share, held[share.at]
            held[share.at] = []
