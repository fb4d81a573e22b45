"""Dead letters of a sink sent again: by the pipeline that runs, or, where none does, from here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PipelineError
from ..sinks.push import disabled
from ..sinks.push import redrive as asking
from ..sinks.push.redrive import Redriven

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .query import Plan

__all__ = ["Redriven", "ask", "nothing", "redrive"]

LOOK_SECONDS = 0.25


def ask(
    folder: Path,
    keys: Sequence[str],
    alive: Callable[[], bool],
    look: Callable[[Redriven | None], None],
) -> Redriven:
    """Let the running pipeline do it, and wait for what comes of it.

    `folder` is the sink's own, below the checkpoints; `alive` says whether the pipeline still runs,
    and `look` is told how far it is; None: it has not begun.
    """
    wish = asking.ask(str(folder), keys)
    while True:
        # Before the look at what is told, which comes first: what was said last counts.
        living, asked = alive(), asking.asked(str(folder))
        told = asking.told(str(folder), wish)
        look(told)
        if told is not None and told.done:
            return told
        if told is None and (asked is None or asked.id != wish.id):
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


def redrive(plan: Plan, spark: SparkSession, keys: Sequence[str]) -> Redriven:
    """Do it here; no pipeline may run meanwhile (see `checkpoint.alone_in`).

    A destination that had refused everything is asked again from now on.
    """
    folder = str(plan.checkpoint.folder.parent)
    disabled.enable(folder)
    return plan.sink.open(plan.checkpoint.writer()).redrive(spark, keys)


def nothing(folder: str) -> Redriven:
    """What comes of it where there is no dead letter; whoever had refused is asked again."""
    disabled.enable(folder)
    return Redriven("")
