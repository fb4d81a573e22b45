"""Dead letters of a sink sent again: by the pipeline that runs, or, where none does, from here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, PipelineError
from ..sinks.push.halt import clear_halt
from ..sinks.push.redrive import RedriveResult, request_redrive, requested, result_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .query import QueryPlan

__all__ = ["RedriveResult", "ask", "nothing", "redrive"]

LOOK_SECONDS = 0.25


def ask(
    folder: Path,
    keys: Sequence[str],
    alive: Callable[[], bool],
    look: Callable[[RedriveResult | None], None],
) -> RedriveResult:
    """Let the running pipeline do it, and wait for what comes of it.

    `folder` is the sink's own, below the checkpoints; `alive` says whether the pipeline still runs,
    and `look` gets the result so far; None: it has not begun.
    """
    request = request_redrive(str(folder), keys)
    while True:
        # Before the result is read: the last result counts.
        living, waiting = alive(), requested(str(folder))
        result = result_of(str(folder), request)
        look(result)
        if result is not None and result.done:
            return result
        if result is None and (waiting is None or waiting.id != request.id):
            raise PipelineError(
                "another redrive of the sink took the place of this one; none is lost",
                hint="Run the command once more when the other has ended.",
            )
        if not living:
            raise PipelineError(
                "the pipeline ended before it sent the dead letters again; none is lost",
                hint="Run the command once more: without a pipeline it sends them itself.",
            )
        time.sleep(LOOK_SECONDS)


def redrive(plan: QueryPlan, spark: SparkSession, keys: Sequence[str]) -> RedriveResult:
    """Do it here; no pipeline may run meanwhile (see `checkpoint.alone_in`).

    A destination that had refused everything is tried again from now on.
    """
    checkpoint = plan.reached_by(spark).checkpoint
    clear_halt(str(checkpoint.notes))
    writer = plan.sink.open(checkpoint.writer())
    if writer.status() is None:
        raise ConfigError(f"the sink {plan.sink.name} sends nothing, so it has no dead letters")
    return writer.redrive(spark, keys)


def nothing(folder: str) -> RedriveResult:
    """The result where there is no dead letter; a destination that had refused is tried again."""
    clear_halt(folder)
    return RedriveResult("")
