"""Changes written down as they are, and small files of them joined, inside Spark's tasks.

Files of a partition (a day, of a tenant) hold changes in the log's order. Nobody knows of a file
until the driver has committed it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...change.arrow import frame
from ...errors import LogReplaced, PipelineError
from .. import Progress
from ..results import result
from . import vectors
from .deltalog import DataFile
from .files import GENERATION, by_partition, of_one_size
from .shape import RowShape
from .storage import Added, Folder

FILE_BYTES = 32_000_000  # about the size that files grow to
HELD_BYTES = 128_000_000  # of changes in a task's memory before they are written
_NAME = "changes"
IN_ORDER = [("epoch", "ascending"), ("sequence", "ascending")]


class ChangesRead(msgspec.Struct):
    """The changes that a task has met."""

    changes: int = 0
    last: int = 0
    epochs: set[str] = set()


class Appended(ChangesRead):
    """What a task has met and written; nothing of it counts until it is committed."""

    added: list[Added] = []


class Joined(msgspec.Struct, frozen=True):
    """Files and what one task made of them."""

    removed: list[str]
    added: list[Added]


@dataclass(frozen=True, slots=True)
class Append:
    """What a task does with its part of a batch."""

    folder: Folder
    partition_by: tuple[str, ...]
    shape: RowShape
    epoch: str  # of the log …
    applied: int  # … of which the table has everything up to here

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write down what the table does not have yet."""
        met = Appended()
        held: list[pa.Table] = []
        size = 0
        for rows in self.shape(fresh(met, batches, Progress(self.epoch, self.applied))):
            held.append(rows)
            size += rows.nbytes
            if size >= HELD_BYTES:
                met.added += self._written(held)
                held, size = [], 0
        met.added += self._written(held)
        yield result(met)

    def _written(self, held: Sequence[pa.Table]) -> list[Added]:
        if not held:
            return []
        groups = by_partition(pa.concat_tables(held), self.partition_by)
        return [self._file(rows, group) for group, rows in groups]

    def _file(self, changes: pa.Table, group: dict[str, Any]) -> Added:
        partition = {name: None if value is None else str(value) for name, value in group.items()}
        rows = changes.drop_columns(list(group)).sort_by(IN_ORDER)
        return self.folder.write(rows, _NAME, partition)


def fresh(
    met: ChangesRead, batches: Iterable[pa.RecordBatch], known: Progress
) -> Iterator[pa.RecordBatch]:
    """Those changes that are not there yet, all being counted as met."""
    for batch in batches:
        # Spark gives times in the session's zone; the moments are the same.
        changes = batch.cast(frame.schema())
        met.changes += changes.num_rows
        met.last = max(met.last, pc.max(changes["sequence"]).as_py() or 0)
        met.epochs.update(pc.unique(changes["epoch"]).to_pylist())
        there = pc.and_(
            pc.equal(changes["epoch"], known.epoch),
            pc.less_equal(changes["sequence"], known.sequence),
        )
        yield changes.filter(pc.invert(there))


def epoch_of(met: Iterable[ChangesRead], known: str, *, adopt: bool, place: str) -> str:
    """The log that a batch comes from; `known` is the one so far, "" being none."""
    epochs = {epoch for each in met for epoch in each.epochs}
    if len(epochs) > 1:
        raise PipelineError(
            "the batch holds changes of several logs, and their sequences have no common order",
            hint="Give each log a history of its own.",
        )
    epoch = epochs.pop() if epochs else known
    if known not in ("", epoch) and not adopt:
        raise LogReplaced(f"the history in {place} comes from another log")
    return epoch


@dataclass(frozen=True, slots=True)
class Join:
    """What a task does with files that are to become one."""

    folder: Folder
    work: list[list[DataFile]] = field(default_factory=list)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Join the files whose number comes."""
        for batch in batches:
            for at in batch.column("id").to_pylist():
                yield result(self._joined(self.work[at]))

    def _joined(self, parts: Sequence[DataFile]) -> Joined:
        # Older files may lack a field that changes have now.
        files = [live_rows(self.folder, part) for part in parts]
        rows = pa.concat_tables(files, promote_options="default")
        added = self.folder.write(rows.sort_by(IN_ORDER), _NAME, dict(parts[0].partition))
        return Joined([part.path for part in parts], [added])


def live_rows(folder: Folder, file: DataFile) -> pa.Table:
    """The rows of a file but those that somebody has deleted."""
    rows = folder.read(file.path)
    if file.vector is None:
        return rows
    dead = np.zeros(file.rows, dtype=np.bool_)
    dead[vectors.read(folder, file.vector).to_array()] = True
    return rows.filter(pa.array(~dead))


def due(parts: Iterable[DataFile]) -> list[list[DataFile]]:
    """Files worth joining, a list for each new one."""
    small: dict[object, list[DataFile]] = defaultdict(list)
    for part in parts:
        if part.size < FILE_BYTES / GENERATION:
            small[part.partition].append(part)
    return [
        joined for found in small.values() for joined in of_one_size(found, lambda part: part.size)
    ]
