"""`spark.readStream.format("headrace")` and `spark.read.format("headrace")`: changes as rows.

An offset is {"epoch": the log's, "sequence": the last one read}. The driver only asks where
transactions end; rows go from the log to the executors.
"""

import time
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from ..change.arrow import frame
from ..errors import ConfigError
from ..log import Ranges
from .options import EARLIEST, LATEST, Options
from .reading import LogAccess, SequenceRange, expect_shared, lose, read
from .remote import reading

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_IDLE_SECONDS = 0.1  # a log that had nothing new is not read again before
_STOP_SECONDS = 0.2  # a query that is to stop waits at most so long for an answer
_SMALLEST_PART = 5_000  # changes; fewer are not worth a task

LOG_RANGES = pa.schema(
    [
        ("epoch", pa.string()),
        ("after", pa.int64()),
        ("upto", pa.int64()),
        ("part", pa.int32()),
        ("parts", pa.int32()),
    ]
)
"""One row a task, for sinks whose tasks read the log: the fields of a `SequenceRange`."""

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
        """The columns of `change.arrow.frame`, or those that were chosen."""
        options = self._options
        if options.log_ranges:
            return from_arrow_schema(LOG_RANGES)
        return from_arrow_schema(frame.schema(options.columns))

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read."""
        return ChangeReader(self._options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """A streaming read."""
        if self._options.ending != LATEST:
            raise ConfigError("the option endingSequence is for spark.read, a stream has no end")
        return ChangeStreamReader(self._options)


class RangePartition(InputPartition):
    """What one task reads."""

    def __init__(self, value: SequenceRange) -> None:
        super().__init__(value)


class ChangeReader(DataSourceReader):
    """Reads what the log holds now."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._reading = reading(options)

    def partitions(self) -> list[InputPartition]:
        """Ranges that end with transactions; none when there is nothing to read."""
        options, now = self._options, self._reading.ranges(0, upto=0)
        after = _after(options, now)
        upto = now.latest_sequence if isinstance(options.ending, str) else options.ending
        upto = min(upto, now.latest_sequence)
        begin, end = _offset(now.epoch, after), _offset(now.epoch, upto)
        return _partitions(self._reading, options, begin, end)

    def read(self, partition: InputPartition) -> Iterator["RecordBatch"]:
        """The changes of a range, on an executor."""
        return _read(self._reading, partition, self._options)


class ChangeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what the log holds, then what comes."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._reading = reading(options)
        self._initial: Offset | None = None
        self._opening = options.starting == LATEST
        self._target: int | None = None  # where a run of what is available now ends
        self._latest: Offset | None = None
        self._due = 0.0  # when to look again

    def initialOffset(self) -> Offset:  # noqa: N802
        """Where a query without a checkpoint begins; the same for as long as this process lives."""
        if self._initial is None:
            now = self._reading.ranges(0, upto=0)
            self._initial = _offset(now.epoch, _after(self._options, now))
        return self._initial

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read no further than the log reaches now."""
        self._target = self._reading.ranges(0, upto=0).latest_sequence

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """What `maxChangesPerBatch` says."""
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
        self._latest = _offset(now.epoch, now.latest_sequence)
        self._check(start, now)
        looked, pause = time.monotonic(), self._options.pause / 1000
        if now.ends:
            all_taken = now.ends[-1] == now.latest_sequence
            self._due = looked + pause if all_taken else 0.0
            return _offset(now.epoch, now.ends[-1])
        self._due = looked + max(pause, _IDLE_SECONDS)
        # Beyond what was lost, so that the loss is reported once.
        return _offset(now.epoch, max(start["sequence"], now.first_sequence - 1))

    def _pauses(self) -> bool:
        """Wait until it is time to look again, but not for long; True: it is not yet."""
        # A trigger of Spark's would wait as well when more changes are there than a batch took.
        if self._target is None and self._options.pause:
            time.sleep(max(0.0, min(self._due - time.monotonic(), _STOP_SECONDS)))
        return time.monotonic() < self._due

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """How far the log reached at the last look: lag, in the query's progress."""
        return self._latest

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Ranges that end with transactions; none when there is nothing to read."""
        options, after, upto = self._options, start["sequence"], end["sequence"]
        if after > upto and options.starting == EARLIEST:
            # A first batch that is run again, after retention has removed all of it.
            lose(options, upto, after + 1)
        return _partitions(self._reading, options, start, end)

    def read(self, partition: InputPartition) -> Iterator["RecordBatch"]:
        """The changes of a range, on an executor."""
        return _read(self._reading, partition, self._options)

    def _check(self, start: Offset, now: Ranges) -> None:
        expect_shared(start["epoch"], start["sequence"], now)
        if start["sequence"] + 1 < now.first_sequence:
            lose(self._options, start["sequence"] + 1, now.first_sequence, now.removed)


def _offset(epoch: str, sequence: int) -> Offset:
    # Spark compares offsets as text, so the order of the keys matters.
    return {"epoch": epoch, "sequence": sequence}


def _after(options: Options, now: Ranges) -> int:
    """The sequence that a first read goes on after."""
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
        expect_shared(offset["epoch"], offset["sequence"], now)
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
    reading: LogAccess, partition: InputPartition, options: Options
) -> Iterator["RecordBatch"]:
    # A batch read without any range gets a partition of Spark's own, with no value.
    if not isinstance(partition, RangePartition):
        return iter(())
    wanted: SequenceRange = partition.value
    if options.log_ranges:
        values = [[getattr(wanted, name)] for name in LOG_RANGES.names]
        return iter([pa.record_batch(values, LOG_RANGES)])
    return read(reading, wanted, options)
