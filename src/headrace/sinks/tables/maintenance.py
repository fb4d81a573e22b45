"""Compaction and vacuum beside the stream, in a thread and Spark jobs of their own.

Files are written anew piece by piece, each in a commit of its own. What the stream has marked as
dead meanwhile is dead in the new files too. A table whose readers know no vectors is the exception:
its pieces are committed at once, between two batches.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from ...errors import HeadraceError
from ..results import result, results
from .compaction import due, is_behind
from .rewrite import RewriteWork, Rewritten, rewrite

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .target import TargetTable

logger = logging.getLogger(__name__)

_NICE = 10  # of the tasks: what a core that others want gives them is a tenth


def run_rewrites(
    spark: SparkSession | None, work: Sequence[RewriteWork], *, aside: bool = False
) -> list[Rewritten]:
    """Do some work, each piece in a task, or without Spark here; `aside`: other tasks go first."""
    if not work:
        return []
    if spark is None:
        return [rewrite(each) for each in work]
    numbers = spark.range(len(work), numPartitions=len(work))
    return results(numbers, _Rewriting(tuple(work), aside), Rewritten)


@dataclass(frozen=True, slots=True)
class _Rewriting:
    """What tasks do with the work whose numbers they get."""

    work: tuple[RewriteWork, ...]
    aside: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # A thread of its own: its process will have other tasks, and they are not to be slow.
        with ThreadPoolExecutor(1, initializer=_step_back if self.aside else None) as thread:
            for batch in batches:
                for number in batch.column("id").to_pylist():
                    yield result(thread.submit(rewrite, self.work[number]).result())


def _step_back() -> None:
    """Leave the processor to the stream's tasks when they want it."""
    if sys.platform == "linux":  # where every thread has a priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


@dataclass(frozen=True, slots=True)
class MaintenanceWork:
    """The tables whose files may be worth compacting, and those with unused ones to delete."""

    compacts: Sequence[TargetTable]
    vacuums: Sequence[TargetTable]
    vacuum_hours: float


class Maintenance:
    """Compaction and vacuum of a sink's tables, in a thread beside the stream."""

    def __init__(self, between_batches: threading.Lock) -> None:
        self._between_batches = between_batches
        self._committing = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self, spark: SparkSession | None, work: MaintenanceWork) -> bool:
        """Do this; False: it is closed, or the last work is still under way."""
        if self._closed or (self._thread is not None and self._thread.is_alive()):
            return False
        if work.compacts or work.vacuums:
            self._thread = threading.Thread(target=self._run, args=(spark, work), daemon=True)
            self._thread.start()
        return True

    def wait(self) -> None:
        """Until the work that is under way has ended."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Commit nothing from now on; one that is being made is waited for."""
        with self._committing:
            self._closed = True

    def _run(self, spark: SparkSession | None, work: MaintenanceWork) -> None:
        for target in work.compacts:
            try:
                while not self._closed and self._compact(spark, target):
                    pass
            except Exception as error:  # noqa: BLE001 - the stream goes on, and so does the next round
                _warn(target, "compacted", error)
        for target in work.vacuums:
            try:
                if not self._closed:
                    target.delta.vacuum(work.vacuum_hours)
            except Exception as error:  # noqa: BLE001 - as above
                _warn(target, "vacuumed", error)

    def _compact(self, spark: SparkSession | None, target: TargetTable) -> bool:
        """One round; True: there may be more to do."""
        if not target.delta.has_vectors:
            with self._between_batches:
                work = target.compaction()
                done = run_rewrites(spark, work)
                return bool(done) and self._commit(target, work, done)
        with self._between_batches:
            plan, files = target.layout()
        any_done, aside = False, not is_behind(files)
        for piece in due(plan, files):
            if self._closed:
                return False
            with self._between_batches:
                updated = target.updated(piece)
            done = run_rewrites(spark, [updated], aside=aside)
            with self._between_batches:
                any_done |= self._commit(target, [updated], done)
        return any_done

    def _commit(
        self, target: TargetTable, work: Sequence[RewriteWork], done: Sequence[Rewritten]
    ) -> bool:
        # A writer that has been closed may have a successor, which takes it for an intruder.
        with self._committing:
            return not self._closed and target.compacted(work, done)


def _warn(target: TargetTable, what: str, error: Exception) -> None:
    reason = error.explain() if isinstance(error, HeadraceError) else repr(error)
    logger.warning("table=%s %s=no error=%s", target.ref, what, reason)
