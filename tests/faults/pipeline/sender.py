"""A process that sends a log to an office, and kills itself at a named point.

python -m tests.faults.pipeline.sender FOLDER PORT
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path

from pyspark.sql import SparkSession

from headrace.pipeline.query import Batches, QueryPlan
from headrace.retry import Backoff
from headrace.sinks.push import redrive
from headrace.sinks.push import writer as writers
from headrace.sinks.push.deadletters import DeadLetters
from headrace.sinks.push.ledger import PushLedger
from headrace.sinks.push.redrive import RedriveRunner
from headrace.sinks.push.writer import PushWriter
from tests.faults.pipeline.dying import Killer, Run, serve
from tests.sinks.socket_sink import Courier


class KillPoint(StrEnum):
    """Where the process may die."""

    SENT = "the tasks have sent, and nothing is noted"
    KEPT = "the dead letters are committed, and the ledger does not say that the batch is settled"
    SETTLED = "the ledger says so, and Spark does not know"
    PAUSED = "the destination takes nothing, and the ledger says how far the batch is"
    REDRIVEN = "dead letters were sent again, and the table still has them"


def main(folder: Path, port: int) -> int:
    """Send for each line of standard input."""
    writers.BACKOFF = Backoff(0.1, 60.0)
    killer = Killer()
    killer.around(PushWriter, "_delivered", after=KillPoint.SENT)
    killer.around(DeadLetters, "commit", after=KillPoint.KEPT)
    killer.around(PushLedger, "pause", after=KillPoint.PAUSED)
    killer.around(Batches, "__call__", after=KillPoint.SETTLED)
    killer.around(RedriveRunner, "_sent", after=KillPoint.REDRIVEN)
    sink = Courier(name="post", port=port, batch_size=20, retry_first_seconds=0.01)
    return serve(folder, sink, killer, _redrive)


def _redrive(spark: SparkSession, plan: QueryPlan, run: Run) -> None:
    if run.redrive:
        assert isinstance(plan.sink, Courier)
        writer = plan.sink.open(plan.checkpoint.writer())
        redrive.request_redrive(plan.sink.folder)
        writer.serve_requests(spark)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
