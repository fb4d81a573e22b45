"""One streaming query: changes from the log, batch by batch, into one sink."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from ..errors import ConfigError, HeadraceError, LogReplaced, PipelineError, TableFailed
from ..log import Ranges
from ..sinks import Paced, Sharing, Sink, Troubled, Writer
from .checkpoint import Checkpoint
from .options import Options
from .remote import reading

logger = logging.getLogger(__name__)

# Spark has one map for the environment of a source's Python processes, whatever the query. Two
# queries that fill it at once spoil it, and then no task can be sent until Java is started anew.
_starting = threading.Lock()
_LOOK_SECONDS = 0.02
_MOST_SHARES = 8  # each reads everything: with more of them, reading costs more than sending


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Where a pipeline's changes come from, and in what portions."""

    address: Mapping[str, str]  # the source's options that say where the log is
    max_changes_per_batch: int = 100_000
    trigger_seconds: float = 1.0

    def look(self) -> Ranges:
        """Ask which log it is, and where it begins."""
        return reading(Options.read(self.address)).ranges(0, upto=0)


class Stored(NamedTuple):
    """A batch that a sink has stored."""

    batch: int
    changes: int
    seconds: float
    troubled: tuple[Troubled, ...]


class Batches:
    """What Spark calls with each batch."""

    def __init__(self, writer: Writer, sink: str, noted: Callable[[Stored], None]) -> None:
        self.error: BaseException | None = None  # as it was before it crossed the JVM
        self.untended = -1  # the batch after which the sink could not be looked after
        self._writer = writer
        self._sink = sink
        self._noted = noted
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
            count = self._writer.write(changes, batch_id)
            seconds = time.monotonic() - began
            self._noted(Stored(batch_id, count, seconds, tuple(self._writer.troubled())))
            self._tend(batch_id)
        except BaseException as error:
            self.error = error
            raise

    def _tend(self, batch_id: int) -> None:
        # A failure of tending makes Spark bring the batch again, which then changes nothing; but
        # not tending again until the next batch lets the query get past it.
        if batch_id == self.untended:
            return
        self.untended = batch_id
        try:
            self._writer.tend()
        except HeadraceError as error:
            if not (error.retry or isinstance(error, TableFailed)):
                raise
            logger.warning("sink=%s tended=no error=%s", self._sink, error.explain())
        self.untended = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that tells a query apart from another."""

    sink: Sink
    feed: Feed
    checkpoint: Checkpoint
    once: bool = False
    adopt: bool = False  # what another query wrote, and begin a new checkpoint there

    def starting(self, writer: Writer) -> int | None:
        """The first change that the sink needs; None: the checkpoint knows, or the log's first."""
        if not self.checkpoint.new:
            return None
        log = self.feed.look()
        if (progress := writer.progress()) is None:
            if log.first_sequence > 1:
                logger.warning(
                    "sink=%s begins at sequence=%d, and what came before is no longer in the log; "
                    "run `headrace snapshot SOURCE` for a full copy",
                    self.sink.name,
                    log.first_sequence,
                )
            return None
        if progress.epoch == log.epoch:
            return progress.sequence + 1
        if self.adopt:
            return None
        raise LogReplaced(
            f"what sink {self.sink.name} holds comes from another log than this one, "
            f"up to sequence {progress.sequence} there",
            hint="Check data_dir and pipeline.url; if the log is new for good, run "
            f"`headrace pipeline --adopt {self.sink.name}` to carry all of it into the sink.",
        )

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
        if shares := shares_of(self.sink, cores):
            _expect_no_speculation(spark, self.sink.name)
            options["shares"] = str(shares)
        changes = spark.readStream.format("headrace").options(**options).load()
        stream = (
            changes.writeStream.queryName(self.sink.name)
            .option("checkpointLocation", self.checkpoint.folder.as_uri())
            .foreachBatch(batches)
        )
        if self.once:
            return stream.trigger(availableNow=True).start()
        sink = self.sink
        seconds = sink.batch_seconds if isinstance(sink, Paced) else self.feed.trigger_seconds
        every = f"{round(seconds * 1000)} milliseconds"
        return stream.trigger(processingTime=every).start()

    @property
    def _most_changes(self) -> int:
        own = self.sink.max_changes_per_batch if isinstance(self.sink, Sharing) else None
        return own or self.feed.max_changes_per_batch

    def _options(self, starting: int | None) -> dict[str, str]:
        options = {
            **self.feed.address,
            "columns": ",".join(self.sink.fields),
            "packed": str(self.sink.packed).lower(),
            "maxChangesPerBatch": str(self._most_changes),
        }
        if self.sink.tables and not self.sink.whole:
            options["tables"] = ",".join(self.sink.tables)
        if starting is not None:
            options["startingSequence"] = str(starting)
        return options


def shares_of(sink: Sink, cores: int) -> int:
    """How many tasks of a sink send events, and wait for another system; 0: none does."""
    if not isinstance(sink, Sharing):
        return 0
    return sink.parallelism or min(cores, _MOST_SHARES)


def _expect_no_speculation(spark: SparkSession, name: str) -> None:
    if spark.conf.get("spark.speculation", "false") == "true":
        raise ConfigError(
            f"pipeline.spark: spark.speculation is true, and the sink {name} sends events: two "
            "tasks would send the same ones at once",
            hint="Take it out, or run this sink in a pipeline of its own.",
        )
