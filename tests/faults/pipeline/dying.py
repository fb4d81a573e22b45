"""A process that carries a log into one sink, and kills itself at a named point.

Spark starts once. Each line of standard input is one run to the log's end, whose result is a line
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
from headrace.pipeline.query import QueryPlan
from headrace.pipeline.run import Pipeline, PipelineInput, plans
from headrace.pipeline.session import opened_session
from headrace.retry import Backoff
from headrace.sinks import Sink, SinkPhase
from tests.faults.pipeline.runner import QUICK


class Run(msgspec.Struct, frozen=True):
    """Carry all that is in the log; die at a point."""

    kill: str | None = None
    redrive: bool = False  # send the dead letters again first


class RunResult(msgspec.Struct, frozen=True):
    """How a run has ended."""

    phase: SinkPhase | None = None
    error: str = ""


class Killer:
    """Ends the process at the chosen point."""

    def __init__(self) -> None:
        self.at: str | None = None

    def around(
        self,
        owner: type,
        name: str,
        *,
        before: StrEnum | None = None,
        after: StrEnum | None = None,
        counts: Callable[..., bool] = lambda *_: True,
    ) -> None:
        """Die before or after a method; `counts` says of its arguments whether this call counts."""
        original: Callable[..., Any] = getattr(owner, name)

        def method(*args: Any, **options: Any) -> Any:
            self._reach(before)
            result = original(*args, **options)
            if counts(*args):
                self._reach(after)
            return result

        setattr(owner, name, method)

    def _reach(self, point: StrEnum | None) -> None:
        if point is not None and self.at == point:
            os.kill(os.getpid(), signal.SIGKILL)


Before = Callable[[SparkSession, QueryPlan, Run], None]
"""What is done before a run."""


def serve(folder: Path, sink: Sink, killer: Killer, before: Before = lambda *_: None) -> int:
    """Run for each line of standard input, until that ends."""
    supervise.BACKOFF = Backoff(0.1, 60.0)
    supervise.TRIES_ONCE = 20
    journal = folder / "spark" / f"{os.getpid()}.log"
    with opened_session("local[2]", QUICK, journal=journal) as spark:
        _report(RunResult())
        for line in sys.stdin:
            run = msgspec.json.decode(line, type=Run)
            killer.at = run.kill
            plan = _planned(folder, sink)
            before(spark, plan, run)
            _report(_ran(spark, plan))
    return 0


def _planned(folder: Path, sink: Sink) -> QueryPlan:
    checkpoints = folder / "pipeline"
    checkpoints.mkdir(exist_ok=True)
    feed = PipelineInput(address={"path": str(folder / "log")}, max_changes_per_batch=100)
    [plan] = plans([sink], feed, checkpoints=checkpoints, once=True)
    return plan


def _ran(spark: SparkSession, plan: QueryPlan) -> RunResult:
    with Pipeline(spark, [plan], folder=plan.checkpoint.within) as running:
        running.work(threading.Event(), lambda: None, once=True)
    [status] = running.statuses()
    return RunResult(status.phase, status.error)


def _report(result: RunResult) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    sys.stdout.buffer.flush()
