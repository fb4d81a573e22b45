"""A process that carries a log into Delta tables and a history, and kills itself at a named point.

    python -m tests.faults.pipeline.runner '{"folder": …}'

Spark starts once. Each line of standard input is then one run to the log's end, told about with a
line on standard output. The points are reached from outside: functions of the sinks are replaced by
ones that may kill before or after they do the same.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import SparkSession

from headrace.errors import PipelineError
from headrace.pipeline import supervise
from headrace.pipeline.query import Batches
from headrace.pipeline.run import Pipeline, PipelineInput, plans
from headrace.pipeline.session import opened_session
from headrace.retry import Backoff
from headrace.sinks import LogRange, Sink, SinkStatus
from headrace.sinks.history import History
from headrace.sinks.lake import files
from headrace.sinks.lake.delta import Delta
from headrace.sinks.lake.plan import ShareResults
from headrace.sinks.tables import input as batch_input
from headrace.sinks.tables.apply import ApplyTask
from headrace.sinks.tables.ledger import TablesLedger
from headrace.sinks.tables.sink import Tables
from headrace.sinks.tables.target import TargetTable
from tests.java import QUICK_JAVA

LAKE, AUDIT = "lake", "audit"  # the sinks, and their folders
WORKER_DIED = "worker-died"  # a file that tells so

QUICK = {
    "spark.driver.memory": "512m",
    **QUICK_JAVA,
    "spark.sql.shuffle.partitions": "2",
    "spark.python.authenticate.socketTimeout": "60s",
}


class Point(StrEnum):
    """Where the process, or one that works for it, may die."""

    CREATED = "a table is created, and has no row yet"
    WRITTEN = "the tasks have written files, and nothing is committed"
    ONE_COMMITTED = "one table is committed, and another of the batch is not"
    COMMITTED = "every table is committed, and the ledger does not say so"
    NOTED = "the ledger is written, and Spark does not know that the batch is done"
    COLUMNS_ADDED = "columns are added, and the rows that have them are not"
    REPLACED = "every file is replaced by one with other columns, and the batch is not applied"
    JOINED = "files are joined, and the new ones are not committed"
    ARRANGED = "files are arranged anew, and that is committed"
    HISTORY_WRITTEN = "changes are written to the history, and not committed"
    HISTORY_COMMITTED = "the history is committed, and Spark does not know it"
    JAVA = "Spark's Java process, before a commit"
    WORKER = "a Python worker of Spark that has written its files"


class Orders(msgspec.Struct, frozen=True):
    """What the process works with."""

    folder: str
    vacuum_hours: float = 168.0


class Run(msgspec.Struct, frozen=True):
    """Carry all that is in the log; die at a point."""

    kill: Point | None = None
    most: int = 1000  # changes a batch
    adopt: bool = False


class Told(msgspec.Struct, frozen=True):
    """How a run has ended."""

    sinks: list[SinkStatus] = []
    error: str = ""


class Killer:
    """Ends the process, or Spark's, where it was told to."""

    def __init__(self) -> None:
        self.at: Point | None = None
        self.java = 0  # Spark's process
        self._one = threading.Lock()

    def reach(self, point: Point) -> None:
        """Die if this is the point."""
        if self.at is not point:
            return
        if point is Point.JAVA:
            self.at = None
            os.kill(self.java, signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, owner: type, name: str, point: Callable[..., Point | None]) -> None:
        """Let a method reach a point when it is called."""
        original = getattr(owner, name)

        def method(*args: Any, **options: Any) -> Any:
            if reached := point(*args, **options):
                self.reach(reached)
            return original(*args, **options)

        setattr(owner, name, method)

    def after(self, owner: type, name: str, point: Callable[..., Point | None]) -> None:
        """Let a method reach a point when it has done its work."""
        original = getattr(owner, name)

        def method(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            if reached := point(*args, **options):
                self.reach(reached)
            return result

        setattr(owner, name, method)

    def one_by_one(self, owner: type, name: str) -> None:
        """Let a method run in one thread at a time."""
        original = getattr(owner, name)

        def method(*args: Any, **options: Any) -> Any:
            with self._one:
                return original(*args, **options)

        setattr(owner, name, method)


def lay(killer: Killer) -> None:
    """Put every point in its place; the last one laid around a method is reached first."""
    killer.after(Delta, "commit", _one_committed)
    killer.before(Delta, "commit", _written)
    killer.before(Delta, "commit", _java)
    killer.one_by_one(Delta, "commit")
    killer.after(Delta, "create", lambda folder, *_, **__: _in(folder.uri, LAKE, Point.CREATED))
    killer.after(Delta, "add_columns", lambda *_: Point.COLUMNS_ADDED)
    killer.after(TargetTable, "take_over", lambda *_: Point.REPLACED)
    killer.before(TablesLedger, "save", lambda *_: Point.COMMITTED)
    killer.before(TargetTable, "compacted", lambda *_: Point.JOINED)
    killer.after(TargetTable, "compacted", lambda *_: Point.ARRANGED)
    killer.after(Batches, "__call__", _stored)


def _in(uri: str, sink: str, point: Point) -> Point | None:
    return point if f"/{sink}" in uri else None


def _one_committed(delta: Delta, *_: Any, marks: Any = None, **__: Any) -> Point | None:
    return _in(delta.folder.uri, LAKE, Point.ONE_COMMITTED) if marks else None


def _written(delta: Delta, *_: Any, marks: Any = None, **__: Any) -> Point | None:
    if marks is None:
        return None
    history = _in(delta.folder.uri, AUDIT, Point.HISTORY_WRITTEN)
    return history or Point.WRITTEN


def _java(delta: Delta, *_: Any, **__: Any) -> Point | None:
    return _in(delta.folder.uri, LAKE, Point.JAVA)


def _stored(batches: Batches, *_: Any) -> Point:
    return Point.NOTED if batches._sink == LAKE else Point.HISTORY_COMMITTED


@dataclass(frozen=True, slots=True)
class DyingTask(ApplyTask):
    """A task's work, after which its process dies the first time."""

    died: Path = Path()

    def __call__(self, wanted: LogRange) -> ShareResults:
        results = ApplyTask(self.plans)(wanted)
        if any(each.added for each in results.tables) and not self.died.exists():
            self.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return results


class Runner:
    """Runs a pipeline again and again in one Spark."""

    def __init__(self, orders: Orders, spark: SparkSession) -> None:
        self._folder = Path(orders.folder)
        self._hours = orders.vacuum_hours
        self._spark = spark
        self._killer = Killer()
        self._killer.java = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
        lay(self._killer)

    def run(self, order: Run) -> Told:
        """One run."""
        self._killer.at = order.kill
        dying = partial(DyingTask, died=self._folder / WORKER_DIED)
        task = dying if order.kill is Point.WORKER else ApplyTask
        setattr(batch_input, "ApplyTask", task)  # noqa: B010
        feed = PipelineInput(
            address={"path": str(self._folder / "log")}, max_changes_per_batch=order.most
        )
        checkpoints = self._folder / "pipeline"
        checkpoints.mkdir(exist_ok=True)
        queries = plans(
            self._sinks(),
            feed,
            checkpoints=checkpoints,
            once=True,
            adopt=(LAKE, AUDIT) if order.adopt else (),
        )
        error = ""
        with Pipeline(self._spark, queries, folder=checkpoints) as running:
            try:
                running.work(threading.Event(), lambda: None, once=True)
            except PipelineError as failed:
                error = str(failed)
        return Told(running.statuses(), error)

    def _sinks(self) -> list[Sink]:
        lake, audit = str(self._folder / LAKE), str(self._folder / AUDIT)
        return [
            # So small that a few thousand rows fill several files.
            Tables(name=LAKE, path=lake, file_mb=0.02, vacuum_hours=self._hours),
            History(name=AUDIT, path=audit, vacuum_hours=self._hours),
        ]


def main(orders: Orders) -> int:
    """Run whenever told, until standard input ends."""
    files.GENERATION = 3
    supervise.BACKOFF = Backoff(0.1, 60.0)
    supervise.TRIES_ONCE = 20  # on a busy machine a worker may take too long for Spark
    journal = Path(orders.folder) / "spark" / f"{os.getpid()}.log"
    with opened_session("local[2]", QUICK, journal=journal) as spark:
        runner = Runner(orders, spark)
        _tell(Told())
        for line in sys.stdin:
            told = runner.run(msgspec.json.decode(line, type=Run))
            _tell(told)
            if told.error:
                return 1
    return 0


def _tell(told: Told) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Orders)))
