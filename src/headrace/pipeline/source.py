"""`spark.readStream.format("headrace")` and `spark.read.format("headrace")`: changes as rows.

An offset is {"epoch": the log's, "sequence": the last one read, "generation": of the log's writer
when it was read}. The driver only asks where transactions end; rows go from the log to the
executors.
"""

import sys
import time
from collections.abc import Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import DataType, StructField, StructType

from ..change.arrow import frame
from ..errors import ConfigError
from ..log import FIRST_GENERATION, Ranges
from ..sinks import Progress
from .options import EARLIEST, LATEST, Options
from .reading import LogAccess, SequenceRange, expect_shared, lose, read, read_typed
from .remote import reading
from .reported import last_reported
from .typed import TypedTable

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_IDLE_SECONDS = 0.1  # a log that had nothing new is not read again before
_STOP_SECONDS = 0.2  # a query that is to stop waits at most so long for an answer
_CLOCK_SECONDS = 60.0  # that clocks of two machines may differ
_SMALLEST_PART = 5_000  # changes; fewer are not worth a task
_NULL_ROWS = 10_000  # in a batch of Arrow's
_NO_END = 2**63 - 1
PUSHDOWN = "pyspark.sql.worker.data_source_pushdown_filters"  # whom Spark asks if it pushes filters

LOG_RANGES = pa.schema(
    [
        ("epoch", pa.string()),
        ("after", pa.int64()),
        ("upto", pa.int64()),
        ("part", pa.int32()),
        ("parts", pa.int32()),
    ]
)
"""The first row of a task, for sinks whose tasks read the log: the fields of a `SequenceRange`.

The rows that follow have no values: there are as many rows as changes, so that a query's progress
says how many changes came.
"""

Offset = dict[str, Any]


class ChangeSource(DataSource):
    """The changes of a log, one row each."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._options = Options.read(options)

    @classmethod
    def name(cls) -> str:
        """What `format` calls it."""
        return "headrace"

    def schema(self) -> StructType:
        """The columns of `change.arrow.frame` or of one table, or those that were chosen."""
        options = self._options
        if options.log_ranges:
            return from_arrow_schema(LOG_RANGES)
        if options.table:
            return _spark_schema(self._versions()[-1])
        return from_arrow_schema(frame.schema(options.columns))

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read."""
        # Where Spark does not push filters, a reader that could take them is an error.
        kind = FilteredReader if PUSHDOWN in sys.modules else ChangeReader
        return kind(self._options, self._typed(schema))

    def _versions(self) -> list[TypedTable]:
        return TypedTable.versions(self._options, reading(self._options).tables())

    def _typed(self, schema: StructType) -> TypedTable | None:
        """The table as it was when Spark asked for its columns; None: no table was chosen."""
        if not self._options.table:
            return None
        for found in reversed(self._versions()):
            if _types(_spark_schema(found)) == _types(schema):
                return found
        raise ConfigError(
            f"the table {self._options.table} never had the columns of this schema",
            hint="Leave out `schema(…)`: the option table brings the columns.",
        )

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """A streaming read."""
        options = self._options
        if options.ending != LATEST or options.ending_time is not None:
            name = "endingSequence" if options.ending_time is None else "endingTimestamp"
            raise ConfigError(f"the option {name} is for spark.read, a stream has no end")
        return ChangeStreamReader(options, self._typed(schema))


class RangePartition(InputPartition):
    """What one task reads."""

    def __init__(self, value: SequenceRange) -> None:
        super().__init__(value)


class ChangeReader(DataSourceReader):
    """Reads what the log holds now."""

    def __init__(self, options: Options, table: TypedTable | None = None) -> None:
        self._options = options
        self._table = table
        self._reading = reading(options)
        self._least, self._most = 0, _NO_END  # sequences that a query asks for

    def partitions(self) -> list[InputPartition]:
        """Ranges that end with transactions; none when there is nothing to read."""
        options, now = self._options, self._reading.ranges(0, upto=0)
        after = _after(options, now, self._reading)
        upto = now.latest_sequence if isinstance(options.ending, str) else options.ending
        if options.ending_time is not None:
            upto = self._reading.since(options.ending_time) - 1
        after, upto = max(after, self._least - 1), min(upto, now.latest_sequence, self._most)
        begin, end = _offset(now, after), _offset(now, upto)
        return _partitions(self._reading, options, begin, end)

    def read(self, partition: InputPartition) -> Iterator["RecordBatch"]:
        """The changes of a range, on an executor."""
        return _read(self._reading, partition, self._options, self._table)


class FilteredReader(ChangeReader):
    """The same for part of the log, where `spark.sql.python.filterPushdown.enabled` is set."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Pass over the sequences that nobody wants; Spark still looks at what is left."""
        for each in filters:
            # A table may have a column `sequence` of its own.
            own = "sequence" if self._table is None else "_sequence"
            if getattr(each, "attribute", None) != (own,):
                continue
            match each:
                case EqualTo(value=int(value)):
                    self._least, self._most = max(self._least, value), min(self._most, value)
                case GreaterThan(value=int(value)):
                    self._least = max(self._least, value + 1)
                case GreaterThanOrEqual(value=int(value)):
                    self._least = max(self._least, value)
                case LessThan(value=int(value)):
                    self._most = min(self._most, value - 1)
                case LessThanOrEqual(value=int(value)):
                    self._most = min(self._most, value)
        return filters


class ChangeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what the log holds, then what comes."""

    def __init__(self, options: Options, table: TypedTable | None = None) -> None:
        self._options = options
        self._table = table
        self._reading = reading(options)
        self._initial: Offset | None = None
        self._opening = options.starting == LATEST
        self._target: int | None = None  # where a run of what is available now ends
        self._latest: Offset | None = None
        self._due = 0.0  # when to look again

    def initialOffset(self) -> Offset:  # noqa: N802
        """Where a query without a checkpoint begins; the same for as long as this process lives."""
        if self._initial is None:
            self._expect_past()
            now = self._reading.ranges(0, upto=0)
            self._initial = _offset(now, _after(self._options, now, self._reading))
        return self._initial

    def _expect_past(self) -> None:
        """Refuse a time to come: what is captured until then would come too."""
        moment = self._options.starting_time
        if moment is not None and moment / 1e6 > time.time() + _CLOCK_SECONDS:
            raise ConfigError("the option startingTimestamp of a stream is a time to come")

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read no further than the log reaches now."""
        self._target = self._reading.ranges(0, upto=0).latest_sequence

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """What `maxChangesPerTrigger` says."""
        return ReadMaxRows(self._options.most)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Where the next batch ends; `start` itself when there is nothing new."""
        if self._opening and start == self._initial:
            # Spark writes down where a batch ends, not where the first one starts. An empty first
            # batch makes "latest" the same place for a query that is killed during it.
            self._opening = False
            return start
        if self._pauses():
            return start
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        now = self._reading.ranges(start["sequence"], limit=most, upto=self._target)
        self._latest = _latest(start, now)
        self._check(start, now)
        looked, pause = time.monotonic(), self._options.pause / 1000
        if now.ends:
            all_taken = now.ends[-1] == now.latest_sequence
            self._due = looked + pause if all_taken else 0.0
            return _offset(now, now.ends[-1])
        self._due = looked + max(pause, _IDLE_SECONDS)
        # Beyond what was lost, so that the loss is reported once.
        if (lost := now.first_sequence - 1) > start["sequence"] or start["epoch"] != now.epoch:
            return _offset(now, max(start["sequence"], lost))
        # As it is, with the generation that it has: another text would make a batch.
        return start

    def _pauses(self) -> bool:
        """Wait until it is time to look again, but not for long; True: it is not yet."""
        # A trigger of Spark's would wait as well when more changes are there than a batch took.
        if self._target is None and self._options.pause:
            time.sleep(max(0.0, min(self._due - time.monotonic(), _STOP_SECONDS)))
        return time.monotonic() < self._due

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """How far the log reached at the last look, and the lag: for the query's progress.

        Also how the sink of a pipeline is doing, by its last report.
        """
        options = self._options
        if self._latest is None or not options.report:
            return self._latest
        return self._latest | {"sink": last_reported(options.report, options.sink)}

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Ranges that end with transactions; none when there is nothing to read."""
        options, after, upto = self._options, start["sequence"], end["sequence"]
        if after > upto and options.starting == EARLIEST:
            # A first batch that is run again, after retention has removed all of it.
            lose(options, upto, after + 1)
        return _partitions(self._reading, options, start, end)

    def read(self, partition: InputPartition) -> Iterator["RecordBatch"]:
        """The changes of a range, on an executor."""
        return _read(self._reading, partition, self._options, self._table)

    def _check(self, start: Offset, now: Ranges) -> None:
        expect_shared(_place(start), now)
        if start["sequence"] + 1 < now.first_sequence:
            lose(self._options, start["sequence"] + 1, now.first_sequence, now.removed)


def _offset(now: Ranges, sequence: int) -> Offset:
    # Spark compares offsets as text, so the order of the keys matters.
    return {"epoch": now.epoch, "sequence": sequence, "generation": now.generation}


def _place(offset: Offset) -> Progress:
    # Earlier versions noted no generation.
    generation = offset.get("generation", FIRST_GENERATION)
    return Progress(offset["epoch"], offset["sequence"], generation)


def _latest(start: Offset, now: Ranges) -> Offset:
    """How far the log reaches, and what of it a batch leaves to the next ones."""
    end = now.ends[-1] if now.ends else max(start["sequence"], now.first_sequence - 1)
    left = max(now.latest_sequence - end, 0)
    reported = _offset(now, now.latest_sequence) | {"changesBehindLatest": left}
    if not left or now.left_since:
        age = time.time() - now.left_since / 1e6 if left else 0.0
        reported["secondsBehindLatest"] = round(max(age, 0.0), 3)
    return reported


def _spark_schema(table: TypedTable) -> StructType:
    plain = from_arrow_schema(table.schema, prefer_timestamp_ntz=True)
    comments = {
        each.name: {"comment": each.comment} for each in table.table.columns if each.comment
    }
    return StructType(
        [StructField(f.name, f.dataType, f.nullable, comments.get(f.name)) for f in plain]
    )


def _types(schema: StructType) -> list[tuple[str, DataType, bool]]:
    """What must be the same of a schema: comments need not be."""
    return [(field.name, field.dataType, field.nullable) for field in schema]


def _after(options: Options, now: Ranges, log: LogAccess) -> int:
    """The sequence that a first read goes on after."""
    if options.starting_time is not None:
        return log.since(options.starting_time) - 1
    if options.starting == EARLIEST:
        return now.first_sequence - 1
    if isinstance(options.starting, str):
        return now.latest_sequence
    if options.starting > now.latest_sequence + 1:
        raise ConfigError(
            f"startingSequence {options.starting} is beyond the log, "
            f"which ends at {now.latest_sequence}"
        )
    return options.starting - 1


def _partitions(
    reading: LogAccess, options: Options, start: Offset, end: Offset
) -> list[InputPartition]:
    after, upto = start["sequence"], end["sequence"]
    if after >= upto:
        return []
    # A large batch is cut into more ranges, so that a task that fails has not much to repeat.
    parts = 1 if options.log_ranges else max(options.parts, (upto - after) // options.most)
    now = reading.ranges(after, upto=upto, parts=parts)
    for offset in (start, end):
        expect_shared(_place(offset), now)
    epoch = now.epoch
    if after + 1 < now.first_sequence:
        lose(options, after + 1, min(now.first_sequence, upto + 1), now.removed)
    starts = [max(after, now.first_sequence - 1), *now.ends]
    if options.log_ranges and now.ends:
        parts = max(1, min(options.log_ranges, (upto - after) // _SMALLEST_PART))
        return [
            RangePartition(SequenceRange(epoch, starts[0], now.ends[-1], part, parts))
            for part in range(parts)
        ]
    return [
        RangePartition(SequenceRange(epoch, begin, end))
        for begin, end in zip(starts, now.ends, strict=False)
    ]


def _read(
    reading: LogAccess, partition: InputPartition, options: Options, table: TypedTable | None
) -> Iterator["RecordBatch"]:
    # A batch read without any range gets a partition of Spark's own, with no value.
    if not isinstance(partition, RangePartition):
        return iter(())
    wanted: SequenceRange = partition.value
    if options.log_ranges:
        return _counted(wanted)
    if table is not None:
        return read_typed(reading, wanted, options, table)
    return read(reading, wanted, options)


def _counted(wanted: SequenceRange) -> Iterator["RecordBatch"]:
    """A range, and a null row for each further change of its part: Spark counts rows."""
    yield pa.record_batch([[getattr(wanted, name)] for name in LOG_RANGES.names], LOG_RANGES)
    size = wanted.upto - wanted.after
    begin, end = (size * at // wanted.parts for at in (wanted.part, wanted.part + 1))
    for at in range(begin + 1, end, _NULL_ROWS):
        count = min(_NULL_ROWS, end - at)
        yield pa.record_batch([pa.nulls(count, field.type) for field in LOG_RANGES], LOG_RANGES)
