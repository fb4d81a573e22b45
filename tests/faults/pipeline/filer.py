"""A process that carries a log into files, and kills itself at a named point.

    python -m tests.faults.pipeline.filer FOLDER

Spark starts once. Each line of standard input is one run to the log's end, told about with a line
on standard output.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import SparkSession

from headrace.pipeline import supervise
from headrace.pipeline.query import Batches
from headrace.pipeline.run import Pipeline, PipelineInput, plans
from headrace.pipeline.session import opened_session
from headrace.retry import Backoff
from headrace.sinks import SinkPhase
from headrace.sinks.files.ledger import FilesLedger
from headrace.sinks.files.sink import Files, FilesWriter
from tests.faults.pipeline.runner import QUICK


class Point(StrEnum):
    """Where the process may die."""

    STAGED = "the tasks have written files, and nothing is committed"
    WRITTEN = "the entry is written, and has no name yet"
    COMMITTED = "the entry counts, and no file is at its place"
    ONE_MOVED = "one file is at its place, and others are not"
    MOVED = "all files are at their places, and Spark does not know"


class Run(msgspec.Struct, frozen=True):
    """Carry all that is in the log; die at a point."""

    kill: Point | None = None


class Told(msgspec.Struct, frozen=True):
    """How a run has ended."""

    phase: SinkPhase | None = None
    error: str = ""


class Killer:
    """Ends the process where it was told to."""

    def __init__(self) -> None:
        self.at: Point | None = None
        self._around(FilesWriter, "_staged", after=Point.STAGED)
        self._around(FilesLedger, "_name", before=Point.WRITTEN)
        self._around(FilesLedger, "commit", after=Point.COMMITTED)
        self._around(Path, "replace", after=Point.ONE_MOVED)
        self._around(Batches, "__call__", after=Point.MOVED)

    def _around(
        self, owner: type, name: str, *, before: Point | None = None, after: Point | None = None
    ) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def method(*args: Any, **options: Any) -> Any:
            self._reach(before)
            result = original(*args, **options)
            if name != "replace" or "day=" in str(args[1]):  # Spark's own notes are moved as well
                self._reach(after)
            return result

        setattr(owner, name, method)

    def _reach(self, point: Point | None) -> None:
        if point is not None and self.at is point:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> int:
    """Run whenever told, until standard input ends."""
    supervise.BACKOFF = Backoff(0.1, 60.0)
    supervise.TRIES_ONCE = 20
    killer = Killer()
    journal = folder / "spark" / f"{os.getpid()}.log"
    with opened_session("local[2]", QUICK, journal=journal) as spark:
        _tell(Told())
        for line in sys.stdin:
            killer.at = msgspec.json.decode(line, type=Run).kill
            _tell(_ran(spark, folder))
    return 0


def _ran(spark: SparkSession, folder: Path) -> Told:
    checkpoints = folder / "pipeline"
    checkpoints.mkdir(exist_ok=True)
    sink = Files(name="drawer", path=str(folder / "files"))
    feed = PipelineInput(address={"path": str(folder / "log")}, max_changes_per_batch=100)
    queries = plans([sink], feed, checkpoints=checkpoints, once=True)
    with Pipeline(spark, queries, folder=checkpoints) as running:
        running.work(threading.Event(), lambda: None, once=True)
    [status] = running.statuses()
    return Told(status.phase, status.error)


def _tell(told: Told) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
