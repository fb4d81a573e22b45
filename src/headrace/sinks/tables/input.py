"""A batch as the tables sink gets it: a range of the log, or a DataFrame of changes.

Both are scanned before the tasks begin, and both run the same tasks: one for each share of keys.
`staged` is a third one, which needs no Spark.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ...change.arrow.frame import pack, unpack
from ...change.event import Table
from .. import LogBatch, LogRange
from ..lake.plan import (
    APPLY_ERRORS,
    ShareResult,
    ShareResults,
    TableFailure,
    TablePlan,
    TableRef,
)
from ..results import RESULT_DDL, result
from .apply import ApplyTask, Changes, TableShare, applied, table_shares
from .fold import ROW_OPS, RowChange, RowKey, Share, share_of
from .scan import Summaries, scan_log, scan_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_results = msgspec.json.Decoder(ShareResults).decode


class BatchInput(Protocol):
    """A batch, whatever it comes from."""

    @property
    def spark(self) -> SparkSession | None:
        """Where its tasks run; None: in this process."""
        ...

    def scan(self) -> Summaries:
        """What it has, version by version of the tables' columns."""
        ...

    @property
    def epochs(self) -> set[str]:
        """The logs that it comes from; known after `scan`."""
        ...

    @property
    def whole(self) -> LogRange | None:
        """The range of the log that it is; None: it is empty, or may lack some changes."""
        ...

    @property
    def failures(self) -> Mapping[TableRef, TableFailure]:
        """The tables that `scan` has left out, because they cannot be followed."""
        ...

    def run(self, plans: Sequence[TablePlan]) -> dict[int, list[ShareResult]]:
        """Apply it to these tables; returns what tasks did, by the number of the plan."""
        ...


class LogInput:
    """A range of the log, which the tasks read themselves."""

    def __init__(self, batch: LogBatch, wanted: Callable[[Table], bool]) -> None:
        self._batch = batch
        self._wanted = wanted
        self.epochs: set[str] = set()
        self.failures: Mapping[TableRef, TableFailure] = {}

    @property
    def spark(self) -> SparkSession:
        """Where its tasks run."""
        return self._batch.spark

    @property
    def whole(self) -> LogRange | None:
        """The range."""
        return self._batch.whole

    def scan(self) -> Summaries:
        """Ask the log what it has, and look at the heads of the records where it cannot tell."""
        whole = self._batch.whole
        if whole is None:
            return {}
        self.epochs = {whole.epoch}
        return scan_log(whole, self._wanted)

    def run(self, plans: Sequence[TablePlan]) -> dict[int, list[ShareResult]]:
        """One stage: nothing is sent from task to task."""
        return _by_plan(self._batch.run(ApplyTask(tuple(plans))))


class RowsInput:
    """A DataFrame of changes, whose rows are sent to the task of their key."""

    whole: LogRange | None = None  # a person may have left some out

    def __init__(self, changes: DataFrame) -> None:
        self._changes = changes
        self.epochs: set[str] = set()
        self.failures: Mapping[TableRef, TableFailure] = {}

    @property
    def spark(self) -> SparkSession:
        """Where its tasks run."""
        return self._changes.sparkSession

    def scan(self) -> Summaries:
        """Let Spark count."""
        seen, self.epochs = scan_rows(self._changes)
        return seen

    def run(self, plans: Sequence[TablePlan]) -> dict[int, list[ShareResult]]:
        """Two stages: every change goes to the share of its key, and to that which it leaves."""
        shares = _parallelism(self.spark)
        sent = self._changes.mapInArrow(_Send(tuple(plans), shares), "share int, packed binary")
        task: Any = _ApplySent(tuple(plans), shares)
        rows = sent.repartitionById(shares, "share").mapInArrow(task, RESULT_DDL).collect()
        return _by_plan([row["result"] for row in rows])


def _parallelism(spark: SparkSession) -> int:
    """How many tasks run at once: with dynamic allocation, of the executors that are there now."""
    if hasattr(spark, "sparkContext"):
        return int(spark.sparkContext.defaultParallelism)
    return _parallelism_of_connect(spark)


@lru_cache(maxsize=1)
def _parallelism_of_connect(spark: SparkSession) -> int:
    # Spark Connect does not say; but it cuts a range into so many parts. It is a job, so once.
    from pyspark.sql.functions import spark_partition_id  # noqa: PLC0415  # loads Spark

    return spark.range(10_000).select(spark_partition_id()).distinct().count()


def _by_plan(texts: Sequence[str]) -> dict[int, list[ShareResult]]:
    found: dict[int, list[ShareResult]] = defaultdict(list)
    for text in texts:
        for each in _results(text).tables:
            found[each.at].append(each)
    return found


# --- rows on their way to the task of their key --------------------------------------------------

_COLUMNS = ("sequence", "op", "key", "before", "after", "unchanged")
_SENT = pa.schema([("share", pa.int32()), ("packed", pa.binary())])
_TAKEN = pa.schema(
    [
        ("at", pa.int32()),
        ("sequence", pa.int64()),
        ("op", pa.string()),
        ("key", pa.binary()),
        ("before", pa.binary()),
        ("after", pa.binary()),
        ("absent", pa.list_(pa.string())),
        ("commit_time", pa.int64()),
    ]
)


def row_changes(batch: pa.RecordBatch) -> Iterator[tuple[int, RowChange]]:
    """The version of each change, and the change."""
    rows = batch.select(list(_COLUMNS)).to_pylist()
    times = [0] * batch.num_rows
    if "transaction" in batch.schema.names:
        moments = pc.struct_field(batch["transaction"], "commit_time")
        times = moments.cast(pa.int64()).to_pylist()
    for version, row, time in zip(batch["schema_version"].to_pylist(), rows, times, strict=True):
        key, before, after = (
            None if (text := row[name]) is None else text.encode()
            for name in ("key", "before", "after")
        )
        yield (
            version,
            RowChange(row["sequence"], row["op"], key, before, after, row["unchanged"], time),
        )


@dataclass(frozen=True, slots=True)
class _Send:
    """Gives each change to the shares that it concerns."""

    plans: tuple[TablePlan, ...]
    shares: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        versions = {version: at for at, plan in enumerate(self.plans) for version in plan.versions}
        keys = [RowKey(plan.key, chosen=plan.chosen_key) for plan in self.plans]
        for batch in batches:
            sent: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
            for version, change in row_changes(batch):
                if (at := versions.get(version)) is not None:
                    for share in self._shares_of(change, self.plans[at], keys[at]):
                        sent[share].append((at, *change))
            for share, changes in sent.items():
                columns = zip(*changes, strict=True)
                arrays = [pa.array(c, f.type) for c, f in zip(columns, _TAKEN, strict=True)]
                packed = pack(pa.record_batch(arrays, schema=_TAKEN))
                yield pa.record_batch([[share], [packed]], schema=_SENT)
        # Every share has a task, and every task a result.
        yield pa.record_batch(
            [list(range(self.shares)), [pack(_TAKEN.empty_table())] * self.shares], schema=_SENT
        )

    def _shares_of(self, change: RowChange, plan: TablePlan, key: RowKey) -> Sequence[int]:
        if plan.together:
            return (0,)
        if change.op not in ROW_OPS:
            return range(self.shares)
        try:
            own, left = key.keys(change) if key.names else (b"%d" % change.sequence, None)
        except APPLY_ERRORS:
            return (0,)  # where it fails again, for its table alone
        return sorted({share_of(each, self.shares) for each in (own, left) if each is not None})


@dataclass(frozen=True, slots=True)
class _ApplySent:
    """What a task does with the changes that were sent to it."""

    plans: tuple[TablePlan, ...]
    shares: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        numbers: set[int] = set()
        held: list[pa.Table] = []
        for batch in batches:
            numbers |= set(batch.column("share").to_pylist())
            held += unpack(batch.column("packed"))
        if not numbers:
            return
        # From several tasks, so not in order.
        changes = pa.concat_tables(held).sort_by("sequence")
        for number in sorted(numbers):
            shares = table_shares(self.plans, Share(number, self.shares))
            yield result(ShareResults(applied(shares, _sent_to(shares, changes))))


def _sent_to(
    shares: Sequence[TableShare], changes: pa.Table
) -> Iterator[tuple[TableShare, Changes]]:
    at = changes["at"].to_numpy()
    for share in shares:
        own = changes.filter(pa.array(at == share.at)).drop_columns(["at"])
        for batch in own.to_batches(max_chunksize=10_000):
            columns = [column.to_pylist() for column in batch.columns]
            rows = zip(*columns, strict=True)
            yield share, [RowChange(*row).as_record() for row in rows]
