"""A process that carries a log into one sink, and kills itself at a named point.

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
from headrace.pipeline.run import Pipeline, PipelineInput, plans
from headrace.pipeline.session import opened_session
from headrace.retry import Backoff
from headrace.sinks import Sink, SinkPhase
from tests.faults.pipeline.runner import QUICK


class Run(msgspec.Struct, frozen=True):
    """Carry all that is in the log; die at a point."""

    kill: str | None = None


class Told(msgspec.Struct, frozen=True):
    """How a run has ended."""

    phase: SinkPhase | None = None
    error: str = ""


class Killer:
    """Ends the process where it was told to."""

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


def serve(folder: Path, sink: Sink, killer: Killer) -> int:
    """Run whenever told, until standard input ends."""
    supervise.BACKOFF = Backoff(0.1, 60.0)
    supervise.TRIES_ONCE = 20
    journal = folder / "spark" / f"{os.getpid()}.log"
    with opened_session("local[2]", QUICK, journal=journal) as spark:
        _tell(Told())
        for line in sys.stdin:
            killer.at = msgspec.json.decode(line, type=Run).kill
            _tell(_ran(spark, folder, sink))
    return 0


def _ran(spark: SparkSession, folder: Path, sink: Sink) -> Told:
    checkpoints = folder / "pipeline"
    checkpoints.mkdir(exist_ok=True)
    feed = PipelineInput(address={"path": str(folder / "log")}, max_changes_per_batch=100)
    queries = plans([sink], feed, checkpoints=checkpoints, once=True)
    with Pipeline(spark, queries, folder=checkpoints) as running:
        running.work(threading.Event(), lambda: None, once=True)
    [status] = running.statuses()
    return Told(status.phase, status.error)


def _tell(told: Told) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()
