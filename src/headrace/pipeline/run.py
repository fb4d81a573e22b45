"""A pipeline at work: every sink's query kept going, and an account of it in a file."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from pyspark.sql import SparkSession

from ..errors import ConfigError, PipelineError
from ..formats.catalogue import Formats
from ..sinks import Sink, SinkPhase, SinkStatus, informed, report
from .checkpoint import QueryCheckpoint, alone_in
from .hadoop import HadoopStorage
from .lag import LogEnd, starting
from .query import PipelineInput, QueryPlan, parts_of
from .session import hide_task_errors, jvm_lives, local_cores, rejects_tasks
from .supervise import Supervised

__all__ = [
    "Pipeline",
    "PipelineInput",
    "SinkStatusLog",
    "alone_in",
    "announce",
    "extra_tasks",
    "plans",
]

logger = logging.getLogger(__name__)

_FORMATS = Formats()
LOOK_SECONDS = 0.25
REPORT_SECONDS = 2.0
TASKS_SECONDS = 5.0  # between two looks whether tasks are refused
PROGRESS_SECONDS = 10.0  # between two lines about what the sinks have stored


class Pipeline:
    """Everything one `headrace pipeline` does, from entering to leaving."""

    def __init__(
        self,
        spark: SparkSession,
        plans: Sequence[QueryPlan],
        *,
        folder: Path,
    ) -> None:
        """Describe it; `folder` is where it says how it is doing."""
        expect_reachable(spark, plans)
        self._spark = spark
        self._folder = folder
        self._sinks = [Supervised(plan, spark) for plan in plans]
        self._end = LogEnd(plans[0].feed, self._positions)  # all read the same log
        self._due = self._tasks_due = 0.0

    def __enter__(self) -> Self:
        self._hide_values()
        self._end.__enter__()
        for sink in self._sinks:
            sink.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # All are closed before any is waited for.
        for sink in self._sinks:
            sink.close()
        for sink in self._sinks:
            sink.join()
        self._end.__exit__(kind, error, trace)
        self._report(due=0.0)

    def _hide_values(self) -> None:
        """Keep what statements and functions raise out of Spark's log."""
        if any(sink.plan.sink.shaping.computes for sink in self._sinks):
            hide_task_errors(self._spark)

    def statuses(self) -> list[SinkStatus]:
        """How every sink is doing."""
        return [
            msgspec.structs.replace(sink.status(), lag=self._end.lag(sink.position))
            for sink in self._sinks
        ]

    def _positions(self) -> dict[str, int | None]:
        return {sink.plan.sink.name: sink.position for sink in self._sinks}

    def take_up(self, plans: Sequence[QueryPlan]) -> None:
        """Go on with other plans: only sinks that came, went or differ are touched."""
        wanted = {plan.sink.name: plan for plan in plans}
        kept = {s.plan.sink.name: s for s in self._sinks if s.same(wanted.get(s.plan.sink.name))}
        leaving = [sink for sink in self._sinks if sink.plan.sink.name not in kept]
        for sink in leaving:
            sink.close()
        while any(not sink.ended for sink in leaving):
            self._report(due=self._due)
            time.sleep(LOOK_SECONDS)
        sinks = [kept.get(name) or Supervised(plan, self._spark) for name, plan in wanted.items()]
        self._sinks = sinks
        self._hide_values()
        for sink in sinks:
            if sink.plan.sink.name not in kept:
                sink.start()

    @property
    def halted(self) -> list[SinkStatus]:
        """The sinks that a person must look after."""
        return [status for status in self.statuses() if status.phase is SinkPhase.HALTED]

    def work(self, stopping: threading.Event, look: Callable[[], None], *, once: bool) -> None:
        """Stay until `stopping` is set, or (`once`) until every sink has all there is."""
        log = SinkStatusLog()
        while True:
            log.report(self.statuses())
            look()
            self._report(due=self._due)
            if once and all(sink.ended for sink in self._sinks):
                log.report(self.statuses())
                return
            self._expect_spark()
            if stopping.wait(LOOK_SECONDS):
                return

    def _expect_spark(self) -> None:
        """Raise PipelineError when Spark will never run a task again."""
        if not jvm_lives(self._spark):
            raise PipelineError(
                "Spark's Java process has ended; no batch is lost, the next start goes on",
                hint="Start the pipeline again; if Java ran out of memory, raise "
                "spark.driver.memory in pipeline.spark.",
            )
        if time.monotonic() < self._tasks_due:
            return
        self._tasks_due = time.monotonic() + TASKS_SECONDS
        if rejects_tasks(self._spark):
            raise PipelineError(
                "Spark takes no more tasks: its executor was stopped; no batch is lost, the next "
                "start goes on",
                hint="Start the pipeline again; what Spark says about it is in pipeline/spark.log "
                "in data_dir.",
            )

    def _report(self, *, due: float) -> None:
        if time.monotonic() < due:
            return
        self._due = time.monotonic() + REPORT_SECONDS
        _report(self._folder, self.statuses())


def expect_reachable(spark: SparkSession, plans: Sequence[QueryPlan]) -> None:
    """Raise ConfigError when Spark has no file system for where checkpoints are."""
    for address in {plan.checkpoint.address for plan in plans} - {""}:
        HadoopStorage.of(spark).expect_classes(address)


def announce(plans: Sequence[QueryPlan], folder: Path) -> None:
    """Report how far the sinks are, before Spark has started."""
    _report(folder, starting(plans))


def _report(folder: Path, statuses: Sequence[SinkStatus]) -> None:
    try:
        report.write(folder, statuses)
    except OSError as error:
        # Sinks elsewhere can go on without it.
        logger.warning("status cannot be written, error=%s", error.strerror)


def plans(
    sinks: Sequence[Sink],
    feed: PipelineInput,
    *,
    checkpoints: Path,
    once: bool = False,
    adopt: Sequence[str] = (),
    formats: Formats = _FORMATS,
) -> list[QueryPlan]:
    """A query for each sink; those named in `adopt` take over from whoever wrote before.

    Sinks that write events get the `formats` of this installation, those that keep notes a folder.
    """
    names = [sink.name for sink in sinks]
    for name in adopt:
        if name not in names:
            raise ConfigError(f"no sink called {name}; there are: {', '.join(names)}")
    return [
        QueryPlan(
            sink=informed(sink, formats=formats, folder=str(checkpoints / sink.name)),
            feed=feed,
            checkpoint=QueryCheckpoint(sink.name, checkpoints),
            once=once,
            adopt=sink.name in adopt,
        )
        for sink in sinks
    ]


def extra_tasks(plans: Sequence[QueryPlan], master: str) -> int:
    """How many tasks may run beyond those of the cores, on a local master; see `opened_session`."""
    cores, sinks = local_cores(master), [plan.sink for plan in plans]
    waiting = sum(parts_of(sink, cores) for sink in sinks if sink.sends)
    return waiting + sum(sink.tasks_aside for sink in sinks)


class SinkStatusLog:
    """Logs how the sinks are doing, each change once."""

    def __init__(self) -> None:
        self._known: Mapping[str, SinkStatus] = {}
        self._stored: dict[str, int] = {}  # the changes of each sink that were last logged
        self._due = time.monotonic() + PROGRESS_SECONDS

    def report(self, statuses: Sequence[SinkStatus]) -> None:
        """Log what differs from the last time."""
        for status in statuses:
            before = self._known.get(status.sink)
            if before is None or (before.phase, before.error) != (status.phase, status.error):
                _log_phase(status)
            for table in status.failed_tables:
                if before is None or table not in before.failed_tables:
                    logger.warning(
                        "sink=%s table=%s failed=%s", status.sink, table.table, table.reason
                    )
        self._known = {status.sink: status for status in statuses}
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + PROGRESS_SECONDS
            self._log_progress(statuses)

    def _log_progress(self, statuses: Sequence[SinkStatus]) -> None:
        for status in statuses:
            if status.changes != self._stored.get(status.sink, 0):
                self._stored[status.sink] = status.changes
                logger.info(
                    "sink=%s stored batch=%d changes=%d rate=%.0f sequence=%d lag=%s",
                    status.sink,
                    status.batch,
                    status.changes,
                    status.changes_per_second,
                    status.sequence,
                    "unknown" if status.lag is None else status.lag,
                )


def _log_phase(status: SinkStatus) -> None:
    logger.info("sink=%s phase=%s sequence=%d", status.sink, status.phase, status.sequence)
    if status.phase is SinkPhase.WAITING:
        logger.warning("sink=%s is tried again; error=%s", status.sink, status.error)
    elif status.phase is SinkPhase.HALTED:
        logger.error(
            "sink=%s halted, the others go on; error=%s; hint=%s",
            status.sink,
            status.error,
            status.hint,
        )
