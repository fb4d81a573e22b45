"""The peer: delta-rs on one node, appending rows and merging the same batches, with its defaults.

It reads the same log, and decodes the same images with the same code, since it needs typed rows
too: what is compared is how a batch gets into the table.
"""

import sys
import time

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake

from headrace.change.arrow import decode
from headrace.pipeline.options import Options
from headrace.pipeline.reading import DiskLog, SequenceRange, read

from . import delta
from .lake_task import Lap, Task, outcome
from .orders import COLUMNS
from .process import Outcome, answer

_FIELDS = ("sequence", "op", "key", "after")
OP = "_op"  # a column beside those of the row


def apply(task: Task) -> Outcome:
    """The task's changes: appended where there is no table yet, merged into it afterwards."""
    fresh = delta.version(task.table) < 0
    laps = [Lap(time.perf_counter(), 0, delta.version(task.table))]
    for after in range(task.after, task.upto, task.batch):
        changes = changes_of(task, after, min(after + task.batch, task.upto))
        rows = typed(changes if fresh else latest(changes))
        began = time.perf_counter()
        _append(task, rows) if fresh else _merge(task, rows)
        now = time.perf_counter()
        laps.append(Lap(now, changes.num_rows, delta.version(task.table), now - began))
    return outcome(task, laps)


def changes_of(task: Task, after: int, upto: int) -> pa.Table:
    """Changes of the log."""
    log, options = DiskLog(task.log), Options(path=task.log, chosen=_FIELDS)
    epoch = log.ranges(0, upto=0).epoch
    return pa.Table.from_batches(list(read(log, SequenceRange(epoch, after, upto), options)))


def latest(changes: pa.Table) -> pa.Table:
    """The last change of each key; MERGE refuses a key that comes twice."""
    last = changes.group_by("key").aggregate([("sequence", "max")])["sequence_max"]
    return changes.filter(pc.is_in(changes["sequence"], last.combine_chunks()))


def typed(changes: pa.Table) -> pa.Table:
    """The rows behind the changes, and what happened to each."""
    images = pc.coalesce(changes["after"], changes["key"])  # a DELETE has only its key
    return decode(images, COLUMNS, connector="postgres").append_column(OP, changes["op"])


def _append(task: Task, rows: pa.Table) -> None:
    task.table.mkdir(parents=True, exist_ok=True)
    write_deltalake(str(task.table), rows.drop_columns([OP]), mode="append")


def _merge(task: Task, rows: pa.Table) -> None:
    values = {column.name: f"s.{column.name}" for column in COLUMNS}
    (
        DeltaTable(str(task.table))
        .merge(rows, predicate="t.id = s.id", source_alias="s", target_alias="t")
        .when_matched_delete(predicate=f"s.{OP} = 'DELETE'")
        .when_matched_update(values)
        .when_not_matched_insert(values, predicate=f"s.{OP} <> 'DELETE'")
        .execute()
    )


def main(encoded: str) -> None:
    """Do one task and answer."""
    answer(apply(msgspec.json.decode(encoded, type=Task)))


if __name__ == "__main__":
    main(sys.argv[1])
