"""A bucket's changes put into its files, inside Spark's tasks: what is touched is written anew.

Nothing is deleted here: the files that are replaced stay until the driver has committed, and a task
that fails leaves only files that nobody knows of.
"""

from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..lake.plan import (
    APPLY_ERRORS,
    CURRENT,
    SEQUENCE,
    VALID_TO,
    BucketFile,
    BucketResult,
    TablePlan,
    failure_of,
    part_name,
)
from ..lake.storage import Added
from .effects import Effects, conformed
from .keys import Numbers, buckets
from .route import unpacked

RESULT = pa.schema([("at", pa.int32()), ("kind", pa.string()), ("result", pa.string())])
RESULT_DDL = "at int, kind string, result string"

# Below this share of changed rows a file's keys are looked at before the rest is read.
_KEYS_FIRST = 0.02

_text = msgspec.json.Encoder().encode


class Merge:
    """What a task does with the changes of its buckets."""

    def __init__(self, plans: list[TablePlan]) -> None:
        self._plans = plans

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Merge bucket after bucket of those that fall to one task."""
        order = [("at", "ascending"), ("bucket", "ascending"), ("sequence", "ascending")]
        # A row that moves is put before its old key is removed: it may need what was there.
        changes = unpacked(batches).sort_by([*order, ("op", "descending")])
        pairs = changes["at"].to_numpy().astype(np.int64) << 32 | changes["bucket"].to_numpy()
        starts = np.flatnonzero(np.diff(pairs, prepend=np.int64(-(1 << 40))))
        for start, end in pairwise([*starts.tolist(), changes.num_rows]):
            group = changes.slice(start, end - start)
            yield from self._merged(group["at"][0].as_py(), group["bucket"][0].as_py(), group)

    def _merged(self, at: int, bucket: int, changes: pa.Table) -> list[pa.RecordBatch]:
        if at < 0:
            return _results(at, "seen", changes["key"].to_pylist())
        try:
            done = _Bucket(self._plans[at], bucket).merge(changes)
        except APPLY_ERRORS as error:
            failure = failure_of(error, changes["sequence"][0].as_py())
            return _results(at, "failure", [_text(failure).decode()])
        return _results(at, "done", [_text(done).decode()])


def _results(at: int, kind: str, values: list[str]) -> list[pa.RecordBatch]:
    rows = pa.table([[at] * len(values), [kind] * len(values), values], schema=RESULT)
    batches: list[pa.RecordBatch] = rows.to_batches()
    return batches


class _Bucket:
    """The files of a bucket while a batch is put into them."""

    def __init__(self, plan: TablePlan, bucket: int) -> None:
        self._plan = plan
        self._bucket = bucket
        self._schema = plan.schema
        self._key = [column.name for column in plan.key] or [SEQUENCE]
        self._kept: list[tuple[int, pa.Table]] = []  # (bucket, rows) to be written again
        self._removed: list[str] = []

    def merge(self, changes: pa.Table) -> BucketResult:
        """Put the changes, in their order, into the bucket."""
        effects = Effects(self._plan, changes)
        for part in self._plan.parts_of(self._bucket):
            self._put_into(part, effects)
        new = effects.new_rows()
        count = pc.sum(pc.not_equal(changes["op"], "SCHEMA")).as_py()
        return BucketResult(
            bucket=self._bucket,
            added=[_written(self._plan, at, rows) for at, rows in self._by_bucket(new)],
            removed=self._removed,
            changes=count or 0,
        )

    def _put_into(self, part: BucketFile, effects: Effects) -> None:
        plan = self._plan
        if effects.emptied and not plan.keep_history:
            self._removed.append(part.path)
            return
        if not plan.rewrite and not effects.emptied:
            if not effects.count:
                return
            if effects.count < part.rows * _KEYS_FIRST and not self._touches(part, effects):
                return
        rows = conformed(plan.folder.read(part.path), self._schema)
        where = effects.where([rows[name] for name in self._key])
        left = (
            self._closed(rows, where, effects)
            if plan.keep_history
            else self._without(rows, where, effects)
        )
        if left is None and not plan.rewrite:
            return  # nothing of this file changes
        self._removed.append(part.path)
        self._kept.append((part.bucket, rows if left is None else left))

    def _touches(self, part: BucketFile, effects: Effects) -> bool:
        keys = self._plan.folder.read(part.path, self._key)
        return bool((effects.where([keys[name] for name in self._key]) >= 0).any())

    def _without(self, rows: pa.Table, where: Numbers, effects: Effects) -> pa.Table | None:
        """The rows that no change replaces; None: that is all of them."""
        replaced = effects.older(rows[SEQUENCE].to_numpy(), where)
        if not replaced.any():
            return None
        effects.remember(rows, where, replaced)
        return rows.filter(pa.array(~replaced))

    def _closed(self, rows: pa.Table, where: Numbers, effects: Effects) -> pa.Table | None:
        """The rows with those that a change supersedes marked as past; None: none is."""
        current = rows[CURRENT].to_numpy(zero_copy_only=False)
        where = np.where(current, where, -1)
        superseded = effects.older(rows[SEQUENCE].to_numpy(), where)
        ended = superseded | current if effects.emptied else superseded
        if not ended.any():
            return None
        effects.remember(rows, where, superseded)
        times = effects.end_times(where, superseded)
        schema = rows.schema
        moments = pa.array(times, pa.int64()).cast(schema.field(VALID_TO).type)
        valid_to = pc.if_else(pa.array(ended), moments, rows[VALID_TO])
        still = pa.array(current & ~ended)
        rows = rows.set_column(schema.get_field_index(VALID_TO), schema.field(VALID_TO), valid_to)
        return rows.set_column(schema.get_field_index(CURRENT), schema.field(CURRENT), still)

    def _by_bucket(self, new: pa.Table) -> Iterator[tuple[int, pa.Table]]:
        """Everything there is to write, one table a bucket."""
        plan = self._plan
        if not plan.together:
            whole = pa.concat_tables([*(rows for _, rows in self._kept), new])
            if whole.num_rows:
                yield self._bucket, whole
            return
        groups = [*(self._kept if not plan.rewrite else ())]
        # With other key columns, rows that were there fall into other buckets as well.
        loose = pa.concat_tables([*(rows for _, rows in self._kept), new]) if plan.rewrite else new
        groups += split(loose, self._key, plan.level)
        for bucket in sorted({bucket for bucket, _ in groups}):
            whole = pa.concat_tables([rows for at, rows in groups if at == bucket])
            if whole.num_rows:
                yield bucket, whole


def split(rows: pa.Table, key: list[str], level: int) -> list[tuple[int, pa.Table]]:
    """Rows by their bucket."""
    numbers = buckets([rows[name] for name in key], rows.num_rows, level)
    return [
        (int(bucket), rows.filter(pa.array(numbers == bucket))) for bucket in np.unique(numbers)
    ]


def _written(plan: TablePlan, bucket: int, rows: pa.Table) -> Added:
    return plan.folder.write(rows, part_name(plan.level, bucket), {})
