"""A process that sends a log to an office, and kills itself at a named point.

    python -m tests.faults.pipeline.sender '{"folder": …, "port": …}'

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
from headrace.sinks.push import redrive
from headrace.sinks.push import writer as writers
from headrace.sinks.push.deadletters import DeadLetters
from headrace.sinks.push.ledger import PushLedger
from headrace.sinks.push.redrive import RedriveRunner
from headrace.sinks.push.writer import PushWriter
from tests.faults.pipeline.runner import QUICK
from tests.sinks.socket_sink import Courier


class KillPoint(StrEnum):
    """Where the process may die."""

    SENT = "the tasks have sent, and nothing is noted"
    KEPT = "the dead letters are committed, and the ledger does not say that the batch is settled"
    SETTLED = "the ledger says so, and Spark does not know"
    PAUSED = "the destination takes nothing, and the ledger says how far the batch is"
    REDRIVEN = "dead letters were sent again, and the table still has them"


class Orders(msgspec.Struct, frozen=True):
    """What the process works with."""

    folder: str
    port: int


class Run(msgspec.Struct, frozen=True):
    """Send all that is in the log; die at a point."""

    kill: KillPoint | None = None
    redrive: bool = False


class Told(msgspec.Struct, frozen=True):
    """How a run has ended."""

    phase: SinkPhase | None = None
    error: str = ""


class Killer:
    """Ends the process where it was told to."""

    def __init__(self) -> None:
        self.at: KillPoint | None = None
        self._around(PushWriter, "_delivered", after=KillPoint.SENT)
        self._around(DeadLetters, "commit", after=KillPoint.KEPT)
        self._around(PushLedger, "pause", after=KillPoint.PAUSED)
        self._around(Batches, "__call__", after=KillPoint.SETTLED)
        self._around(RedriveRunner, "_sent", after=KillPoint.REDRIVEN)

    def _around(self, owner: type, name: str, *, after: KillPoint) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def method(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            if self.at is after:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, method)


def main(orders: Orders) -> int:
    """Run whenever told, until standard input ends."""
    supervise.BACKOFF = writers.BACKOFF = Backoff(0.1, 60.0)
    supervise.TRIES_ONCE = 20
    killer = Killer()
    folder = Path(orders.folder)
    journal = folder / "spark" / f"{os.getpid()}.log"
    with opened_session("local[2]", QUICK, journal=journal) as spark:
        _tell(Told())
        for line in sys.stdin:
            run = msgspec.json.decode(line, type=Run)
            killer.at = run.kill
            _tell(_ran(spark, folder, orders.port, run))
    return 0


def _ran(spark: SparkSession, folder: Path, port: int, run: Run) -> Told:
    checkpoints = folder / "pipeline"
    checkpoints.mkdir(exist_ok=True)
    sink = Courier(name="post", port=port, batch_size=20, retry_first_seconds=0.01)
    feed = PipelineInput(address={"path": str(folder / "log")}, max_changes_per_batch=100)
    queries = plans([sink], feed, checkpoints=checkpoints, once=True)
    if run.redrive:
        [plan] = queries
        writer = plan.sink.open(plan.checkpoint.writer())
        assert isinstance(writer, PushWriter)
        redrive.request_redrive(str(checkpoints / "post"))
        writer.serve_requests(spark)
    with Pipeline(spark, queries, folder=checkpoints) as running:
        running.work(threading.Event(), lambda: None, once=True)
    [status] = running.statuses()
    return Told(status.phase, status.error)


def _tell(told: Told) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Orders)))
