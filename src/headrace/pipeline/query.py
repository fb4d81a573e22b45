"""One streaming query: changes from the log, batch by batch, into one sink."""

import gc
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, Self

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from ..change.arrow.frame import REQUIRED
from ..change.event import Table
from ..errors import ConfigError, HeadraceError, LogReplaced, PipelineError, TableFailed
from ..log import Ranges
from ..sinks import (
    FailedTable,
    LogBatch,
    LogRange,
    Progress,
    ReadableLog,
    Sink,
    SinkWriter,
    Takes,
    lost_tail,
)
from ..sinks.results import result, texts
from ..transforms.computed import is_of
from .checkpoint import QueryCheckpoint
from .hadoop import HadoopFiles
from .options import Options
from .reading import PipelineLog
from .remote import reading
from .shaping import shaped_rows

logger = logging.getLogger(__name__)

# Spark has one map for the environment of a source's Python processes, whatever the query. Two
# queries that fill it at once spoil it, and then no task can be sent until Java is started anew.
_starting = threading.Lock()
_LOOK_SECONDS = 0.02
_PLAIN = re.compile(r"\w+\.\w+")  # the name of a table that is a pattern for itself alone
_MOST_PARTS = 8  # each reads everything: with more of them, reading costs more than sending


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineInput:
    """Where a pipeline's changes come from, and in what portions."""

    address: Mapping[str, str]  # the source's options that say where the log is
    max_changes_per_batch: int | None = None  # None: as many as the sink likes best
    trigger_seconds: float = 1.0
    report: str = ""  # the file in which the pipeline reports how its sinks are doing; "": none

    def look(self) -> Ranges:
        """Ask which log it is, and where it begins."""
        return reading(Options.read(self.address)).ranges(0, upto=0)


class Stored(NamedTuple):
    """A batch that a sink has stored."""

    batch: int
    changes: int
    seconds: float
    failed_tables: tuple[FailedTable, ...]
    rescued: Mapping[str, int]  # by table: values that did not fit their columns


BatchOf = Callable[[DataFrame, int], AbstractContextManager[Any]]


class Batches:
    """What Spark calls with each batch."""

    def __init__(
        self,
        writer: SinkWriter[Any],
        sink: str,
        stored: Callable[[Stored], None],
        batch_of: BatchOf = lambda changes, _: nullcontext(changes),
    ) -> None:
        """`batch_of` makes of Spark's rows what the sink takes, for as long as it writes."""
        self.error: BaseException | None = None  # as it was before it crossed the JVM
        self.unmaintained = -1  # the batch after which maintenance failed
        self._writer = writer
        self._sink = sink
        self._stored = stored
        self._batch_of = batch_of
        self._closed = False

    def close(self) -> None:
        """Take no further batch."""
        self._closed = True

    def __call__(self, changes: DataFrame, batch_id: int) -> None:
        """Store a batch."""
        if self._closed:
            raise PipelineError("the pipeline is stopping")
        began = time.monotonic()
        try:
            with self._batch_of(changes, batch_id) as batch:
                count = self._writer.write(batch, batch_id)
            seconds = time.monotonic() - began
            failed, rescued = self._writer.failed_tables(), self._writer.rescued_values()
            self._stored(Stored(batch_id, count, seconds, tuple(failed), rescued))
            self._maintain(batch_id)
        except BaseException as error:
            self.error = error
            raise

    def _maintain(self, batch_id: int) -> None:
        # A failure makes Spark bring the batch again, which then changes nothing; no second try
        # before the next batch lets the query get past it.
        if batch_id == self.unmaintained:
            return
        self.unmaintained = batch_id
        try:
            self._writer.maintain()
        except HeadraceError as error:
            if not (error.retry or isinstance(error, TableFailed)):
                raise
            logger.warning("sink=%s maintained=no error=%s", self._sink, error.explain())
        self.unmaintained = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryPlan:
    """A query to come: its sink, where it reads, and its checkpoint."""

    sink: Sink
    feed: PipelineInput
    checkpoint: QueryCheckpoint
    once: bool = False
    adopt: bool = False  # what another query wrote, and begin a new checkpoint there

    def kept_at(self, address: str) -> Self:
        """The same with its checkpoint in a storage; "": on this machine."""
        return replace(self, checkpoint=replace(self.checkpoint, address=address))

    def reached_by(self, spark: SparkSession) -> Self:
        """The same for a pipeline with this Spark, which may be what reaches the checkpoint."""
        files_of = partial(HadoopFiles.of, spark)
        return replace(self, checkpoint=self.checkpoint.reached_by(files_of))

    def starting(self, writer: SinkWriter[Any]) -> int | None:
        """The first change that the sink needs; None: the checkpoint knows, or the log's first."""
        progress = writer.progress()
        if progress is None:
            return self._beginning() if self.checkpoint.new else None
        log = self.feed.look()
        writer.generation, writer.lineage = log.generation, log
        if progress.epoch != log.epoch:
            if self.adopt:
                return self._adopted(progress, log)
            self._continue(writer, progress, log)
        elif not _is_in(progress, log):
            if self.adopt:
                writer.go_back(log.likely_fork(progress.epoch, progress.generation) or 0)
                return self._adopted(progress, log)
            raise self._lost(progress, log)
        if not self.checkpoint.new:
            return None
        return self._after_loss(progress.sequence + 1, log)

    def _lost(self, progress: Progress, log: Ranges) -> LogReplaced:
        """What to report when the sink has changes that are not in this log, of the same epoch."""
        upto = log.likely_fork(progress.epoch, progress.generation) or 0
        what = lost_tail(f"sink {self.sink.name}", progress.sequence, upto)
        return LogReplaced(what, hint=self.sink.ahead_hint(upto))

    def _beginning(self) -> int | None:
        log = self.feed.look()
        if (beginning := self.checkpoint.beginning(log.epoch)) is not None:
            return beginning
        if log.first_sequence > 1:
            logger.warning(
                "sink=%s begins at sequence=%d, and what came before is no longer in the log; "
                "run `headrace snapshot SOURCE` for a full snapshot",
                self.sink.name,
                log.first_sequence,
            )
        return None

    def _adopted(self, progress: Progress, log: Ranges) -> int | None:
        """Where a sink goes on that accepts another log: after what both logs have in common."""
        upto = log.likely_fork(progress.epoch, progress.generation)
        if upto is None or self.sink.needs_every_row:
            return None
        return max(min(progress.sequence, upto) + 1, log.first_sequence)

    def _continue(self, writer: SinkWriter[Any], progress: Progress, log: Ranges) -> None:
        """Go on with a log that was restored from the one so far, if that is possible."""
        upto = log.likely_fork(progress.epoch, progress.generation)
        name = self.sink.name
        if upto is None:
            raise LogReplaced(
                f"what sink {name} holds comes from another log than this one, "
                f"up to sequence {progress.sequence} there",
                hint="Check data_dir and pipeline.url; if the log is new for good, run "
                f"`headrace pipeline --adopt {name}` to carry all of it into the sink.",
            )
        if not _is_in(progress, log):
            raise LogReplaced(
                f"sink {name} has changes up to {progress.sequence}, but the log was restored from "
                f"a copy that ends at {upto}",
                hint=self.sink.ahead_hint(upto),
            )
        writer.continue_in(log.epoch, upto)
        logger.info(
            "sink=%s goes on with the restored log after_sequence=%d", name, progress.sequence
        )

    def _after_loss(self, wanted: int, log: Ranges) -> int:
        """The first change that a sink can have; who adopts it accepts what it cannot have."""
        if not self.adopt or wanted >= log.first_sequence:
            return wanted
        lost = f"{wanted}-{log.first_sequence - 1}"
        logger.warning("sink=%s lost=%s, which are no longer in the log", self.sink.name, lost)
        return log.first_sequence

    def start(self, spark: SparkSession, batches: Batches, starting: int | None) -> StreamingQuery:
        """Start it; returns when its source is there."""
        with _starting:
            query = self._started(spark, batches, starting)
            while query.isActive and query.status["message"].startswith("Initializing"):
                time.sleep(_LOOK_SECONDS)
        return query

    def _started(
        self, spark: SparkSession, batches: Batches, starting: int | None
    ) -> StreamingQuery:
        # Queries take turns at the cores only if each has a pool of its own.
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", self.sink.name)
        options = self._options(starting)
        cores = spark.sparkContext.defaultParallelism
        options["minPartitions"] = str(cores)
        if parts := parts_of(self.sink, cores):
            if self.sink.sends:
                _expect_no_speculation(spark, self.sink.name)
            options["logRanges"] = str(parts)
        changes = spark.readStream.format("headrace").options(**options).load()
        stream = (
            changes.writeStream.queryName(self.sink.name)
            .option("checkpointLocation", self.checkpoint.location)
            .foreachBatch(batches)
        )
        if self.once:
            return stream.trigger(availableNow=True).start()
        return stream.start()  # the source pauses between batches

    def batches(
        self,
        writer: SinkWriter[Any],
        stored: Callable[[Stored], None],
        driver: str = "",
    ) -> Batches:
        """What Spark calls with each batch, for a sink that is open.

        `driver` is who has claimed the checkpoint; "": nobody has to.
        """
        batch_of = self.batch_of()

        def claimed(changes: DataFrame, batch: int) -> AbstractContextManager[Any]:
            if driver:
                self.checkpoint.expect_claimed(driver)
            writer.generation = self.checkpoint.generation(batch)
            return batch_of(changes, batch)

        return Batches(writer, self.sink.name, stored, claimed)

    def batch_of(self) -> BatchOf:
        """What makes of Spark's rows what the sink takes."""
        if self.sink.takes is not Takes.LOG_RANGE:
            return lambda changes, _: shaped_rows(changes, self.sink)
        options = Options.read(self.feed.address)
        return partial(self._ranges, PipelineLog(reading(options), options))

    @contextmanager
    def _ranges(self, log: ReadableLog, ranges: DataFrame, batch: int) -> Iterator["RangesBatch"]:
        known = self._range_of(log, batch)
        made = RangesBatch(ranges, log, known, address=self.feed.address)
        yield made
        made.count()

    def _range_of(self, log: ReadableLog, batch: int) -> LogRange | None:
        """The whole of a batch, if Spark's own notes say which it is."""
        if (noted := self.checkpoint.batch(batch)) is None or noted[0].epoch != noted[1].epoch:
            return None
        before, end = noted
        return LogRange(log, end.epoch, before.sequence, end.sequence)

    def _options(self, starting: int | None) -> dict[str, str]:
        sink, feed = self.sink, self.feed
        chosen = sink.max_changes_per_batch or feed.max_changes_per_batch
        pause = sink.batch_seconds or feed.trigger_seconds
        options = {
            **feed.address,
            "maxChangesPerBatch": str(chosen or sink.changes_of_batch),
            "pauseMilliseconds": str(max(1, round(pause * 1000))),
        }
        if self.feed.report:
            options |= {"sinkReport": self.feed.report, "sinkName": self.sink.name}
        if self.sink.fields:
            needed = REQUIRED if self.sink.shaping else ()
            options["columns"] = ",".join(dict.fromkeys((*self.sink.fields, *needed)))
        if self.sink.tables and not self.sink.whole_transactions:
            options["tables"] = ",".join(self.sink.tables)
        if starting is not None:
            options["startingSequence"] = str(starting)
        return options


def _is_in(place: Progress, log: Ranges) -> bool:
    """Whether everything up to a place is in this log."""
    upto = log.shared_upto(place.epoch, place.generation)
    return upto is not None and place.sequence <= upto


def parts_of(sink: Sink, cores: int) -> int:
    """Into how many parts the log ranges of a sink are divided; 0: it takes none."""
    if sink.takes is not Takes.LOG_RANGE:
        return 0
    return sink.parallelism or min(cores, _MOST_PARTS)


class RangesBatch(LogBatch):
    """A batch of which Spark has only the log ranges, one a task."""

    def __init__(
        self,
        ranges: DataFrame,
        log: ReadableLog,
        known: LogRange | None = None,
        *,
        address: Mapping[str, str] | None = None,
    ) -> None:
        """`ranges` has the columns of `source.LOG_RANGES`; `known` is what they are together.

        `address` says to the source where the log is.
        """
        self._ranges = ranges
        self._log = log
        self._address = address or {}
        self._known = known
        self._counted = False  # whether Spark has read, and so counted, the rows

    @classmethod
    def of_range(
        cls, spark: SparkSession, wanted: LogRange, *, parts: int, address: Mapping[str, str]
    ) -> "RangesBatch":
        """A range of the log that no query has planned."""
        made = cls(spark.range(parts, numPartitions=parts), wanted.log, wanted, address=address)
        made._counted = True
        return made

    @property
    def spark(self) -> SparkSession:
        """Where its tasks run."""
        return self._ranges.sparkSession

    @property
    def whole(self) -> LogRange | None:
        """All of it, for the driver to look at; None: the batch is empty."""
        if self._known is None:
            rows = self._rows()
            found = (rows[0][name] for name in ("epoch", "after", "upto")) if rows else ("", 0, 0)
            self._known = LogRange(self._log, *found)
        return self._known if self._known.upto > self._known.after else None

    @property
    def upto(self) -> int:
        """The last change's sequence; 0: the batch is empty."""
        return whole.upto if (whole := self.whole) else 0

    def run(self, task: Callable[[LogRange], msgspec.Struct | None]) -> Sequence[str]:
        """Run `task` in Spark, once for each part."""
        if not self._counted:
            self._counted = True
            return texts(self._ranges, _RangeTask(self._log, task))
        return self._run_again(task)

    def changes_of(self, table: Table) -> DataFrame:
        """Its changes of one table, with all columns of `change.arrow.frame`."""
        options = dict(self._address)
        if (whole := self.whole) is not None:
            options |= {"startingSequence": f"{whole.after + 1}", "endingSequence": f"{whole.upto}"}
        if _PLAIN.fullmatch(name := table.path):
            options["tables"] = name
        changes = self.spark.read.format("headrace").options(**options).load()
        return changes.where(is_of(table))

    def count(self) -> None:
        """Let Spark count the changes, if no task has read them: a sink may have no use for them.

        A query's progress has as many input rows as Spark has read.
        """
        if not self._counted and self.whole is not None:
            self._rows()

    def _rows(self) -> list[Row]:
        """The rows that have a range, one of each part."""
        self._counted = True
        # Not `first`: a task that is not read to its end takes its Python process with it, and the
        # next one has to import everything again.
        return self._ranges.where("epoch IS NOT NULL").collect()

    def _run_again(self, task: Callable[[LogRange], msgspec.Struct | None]) -> Sequence[str]:
        """Without reading the rows once more: Spark would count them as further input."""
        if (whole := self.whole) is None:
            return []
        count = self._ranges.rdd.getNumPartitions()
        numbers = self.spark.range(count, numPartitions=count)
        return texts(numbers, _PartTask(replace(whole, parts=count), task))


@dataclass(frozen=True, slots=True)
class _RangeTask:
    """What a task does with the ranges that it gets."""

    log: ReadableLog
    run: Callable[[LogRange], msgspec.Struct | None]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for wanted in batch.filter(batch["epoch"].is_valid()).to_pylist():
                if (value := self.run(LogRange(self.log, **wanted))) is not None:
                    yield result(value)
        _freeze()


@dataclass(frozen=True, slots=True)
class _PartTask:
    """What a task does with the parts whose numbers it gets."""

    whole: LogRange
    run: Callable[[LogRange], msgspec.Struct | None]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part in (number for batch in batches for number in batch["id"].to_pylist()):
            if (value := self.run(replace(self.whole, part=part))) is not None:
                yield result(value)
        _freeze()


@cache
def _freeze() -> None:
    """Leave alone what this process will need to its end; once."""
    # Spark collects garbage after every task, and to look at all modules takes longer than some
    # tasks do.
    gc.collect()
    gc.freeze()


def _expect_no_speculation(spark: SparkSession, name: str) -> None:
    if spark.conf.get("spark.speculation", "false") == "true":
        raise ConfigError(
            f"pipeline.spark: spark.speculation is true, and the sink {name} sends events: two "
            "tasks would send the same ones at once",
            hint="Take it out, or run this sink in a pipeline of its own.",
        )
